"""Weights are fetched on demand and compared with the hash that the Hub lists. Cached files are not fetched again."""

from __future__ import annotations

import errno
import hashlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from hub_family import RECIPE, go_offline, header_sizes, mergegate
from hub_look_alike import WRITER, Fault, LookAlike, hub

from mergegate.merge_core import load_recipe, open_checkpoint
from mergegate.merge_core.errors import InvalidInput, MergegateError, Refused
from mergegate.merge_core.files.hashing import HashMemo
from mergegate.tasks.models.checkpoints import pin
from mergegate.tasks.models.checkpoints.hub.snapshot import Snapshot
from mergegate.tasks.models.checkpoints.parent_weights import Downloaded, FetchedWeights, download_snapshots

Obstacle = Callable[[LookAlike, pytest.MonkeyPatch], None]


@pytest.fixture
def memo(tmp_path: Path) -> HashMemo:
    return HashMemo(tmp_path / "hashes.sqlite")


def parents() -> tuple[pin.ResolvedCheckpoint, ...]:
    return pin.resolve_parents(load_recipe(RECIPE))


def snapshots_of(found: tuple[pin.ResolvedCheckpoint, ...]) -> list[Snapshot]:
    return [parent.snapshot for parent in found if parent.snapshot]


def download(found: tuple[pin.ResolvedCheckpoint, ...], memo: HashMemo) -> Downloaded:
    return download_snapshots(snapshots_of(found), memo)


def weights_of(models: Path) -> dict[str, int]:
    """Return the size of each model's weight files, by SHA-256."""
    files = models.glob("*/model*.safetensors")
    return {hashlib.sha256(data).hexdigest(): len(data) for data in (file.read_bytes() for file in files)}


def test_only_files_of_the_checkpoint_are_downloaded_and_have_the_digest_of_the_local_files(
    online: LookAlike, models: Path, memo: HashMemo
) -> None:
    found = parents()
    come = download_snapshots([*snapshots_of(found), *snapshots_of(found)], memo)
    weights = weights_of(models)
    assert online.sent == weights
    assert (come.new_files, come.bytes) == (len(weights), sum(weights.values()))
    for parent in found:
        assert pin.open_parent(parent).nbytes == open_checkpoint(models / parent.name).nbytes
    assert {parent.name: parent.digest for parent in pin.pin_checkpoints(found, memo)} == {
        path.name: pin.checkpoint_digest(path, memo) for path in models.iterdir()
    }


@pytest.mark.parametrize(
    ("downloaded", "amount"),
    [
        (Downloaded(files=1, new_files=1, bytes=2_000), "2 kB in 1 file"),
        (Downloaded(files=6, new_files=4, bytes=2_000), "2 kB in 4 files"),
        (Downloaded(files=1, new_files=0, bytes=0), "1 file already cached"),
        (Downloaded(files=6, new_files=0, bytes=0), "6 files already cached"),
    ],
)
def test_the_summary_counts_files(downloaded: Downloaded, amount: str) -> None:
    assert FetchedWeights(downloaded, ("base@3f1c09a2",)).summary() == f"base@3f1c09a2 · {amount}"


def test_unrelated_files_do_not_change_the_digest(models: Path, memo: HashMemo) -> None:
    before = pin.checkpoint_digest(models / "base", memo)
    for name in ("pytorch_model.bin", "consolidated.safetensors"):
        (models / "base" / name).unlink()
    assert pin.checkpoint_digest(models / "base", memo) == before
    assert pin.deciding_files(models / "base") == (
        "config.json", "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors",
        "model.safetensors.index.json", "tokenizer.json",
    )  # fmt: skip


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "additional_chat_templates/tools.jinja"])
def test_every_deciding_file_changes_the_digest(models: Path, memo: HashMemo, name: str) -> None:
    before = pin.checkpoint_digest(models / "base", memo)
    (models / "base" / name).parent.mkdir(exist_ok=True)
    (models / "base" / name).write_text("{}")
    assert pin.checkpoint_digest(models / "base", memo) != before


def test_cached_files_are_neither_fetched_nor_hashed_again(
    online: LookAlike, memo: HashMemo, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = parents()
    first = download(found, memo)
    online.log.clear()
    monkeypatch.setattr(
        "mergegate.merge_core.files.hashing.sha256_file", lambda path: pytest.fail(f"{path} is read again")
    )
    assert download(found, memo) == Downloaded(first.files, 0, 0)
    assert online.log == []


def test_pinned_and_cached_parents_need_no_request(
    online: LookAlike, models: Path, memo: HashMemo, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = RECIPE
    for name in ("base", "math", "code"):
        text = text.replace(f"acme/{name}", f"acme/{name}@{online.repositories[f'acme/{name}'].branches['main']}")
    recipe = load_recipe(text)
    download(pin.resolve_parents(recipe), memo)
    first = pin.resolve_parents(recipe)
    online.log.clear()
    assert pin.resolve_parents(recipe) == first
    go_offline(monkeypatch)
    found = pin.resolve_parents(recipe)
    assert download(found, memo).new_files == 0
    assert len({parent.digest for parent in pin.pin_checkpoints(found, memo)}) == 3
    assert online.log == []


def test_a_branch_with_a_cached_commit_needs_one_request(online: LookAlike, memo: HashMemo) -> None:
    download(parents(), memo)
    online.log.clear()
    assert len(parents()) == 3
    paths = sorted(entry.path for entry in online.log)
    assert paths == [f"/api/models/acme/{name}" for name in ("base", "code", "math")]


def test_a_file_that_differs_from_the_listing_is_refused_and_can_be_repaired(
    online: LookAlike, models: Path, memo: HashMemo
) -> None:
    file = models / "math" / "model.safetensors"
    whole = file.read_bytes()
    stored = online.objects.place(hashlib.sha256(whole).hexdigest())
    stored.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))  # The size stays the same, so the client does not notice.
    found = parents()
    with pytest.raises(Refused, match="sha256") as caught:
        download(found, memo)
    assert caught.value.where.endswith(": model.safetensors")
    assert "acme/math@" in caught.value.where
    blob = Path(caught.value.remedy.partition("delete ")[2].partition(" and run")[0])
    assert blob.is_file()

    stored.write_bytes(whole)
    with pytest.raises(Refused):
        download(found, memo)  # The damaged file is still in the cache.
    blob.unlink()
    assert download(found, memo).new_files == 1


def test_a_small_file_that_was_changed_in_the_cache_is_refused(online: LookAlike, memo: HashMemo) -> None:
    found = parents()
    (found[0].directory / "config.json").resolve().write_text("{}")
    with pytest.raises(Refused, match="git's sha1"):
        download(found, memo)


def test_every_damaged_file_is_named(online: LookAlike, memo: HashMemo) -> None:
    found = parents()
    snapshots = [
        replace(one, files={name: replace(file, sha256="0" * 64, blob="0" * 40) for name, file in one.files.items()})
        for one in snapshots_of(found)[:1]
    ]
    with pytest.raises(Refused) as caught:
        download_snapshots(snapshots, memo)
    assert caught.value.found.count("also:") == len(snapshots[0].files) - 1


def test_progress_is_reported_in_the_context_of_the_caller(online: LookAlike, memo: HashMemo, models: Path) -> None:
    from contextvars import ContextVar

    here: ContextVar[str] = ContextVar("here")
    here.set("caller")
    told: list[tuple[int, int, str]] = []
    download_snapshots(snapshots_of(parents()), memo, lambda done, total: told.append((done, total, here.get())))
    total = sum(weights_of(models).values())
    assert told[-1] == (total, total, "caller")
    assert [done for done, _, _ in told] == sorted(done for done, _, _ in told)


def test_weights_in_xet_are_downloaded_with_xet(
    online: LookAlike, models: Path, memo: HashMemo, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from huggingface_hub import CommitOperationAdd, HfApi, constants

    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", False)
    with hub(tmp_path / "xet", xet=True) as stand_in:
        monkeypatch.setenv("HF_ENDPOINT", stand_in.url)
        api = HfApi(endpoint=stand_in.url, token=WRITER)
        api.create_repo("acme/math", private=False)
        files = [CommitOperationAdd(path.name, path) for path in (models / "math").iterdir()]
        api.create_commit("acme/math", files, commit_message="upload")
        file = models / "math" / "model.safetensors"
        stored = stand_in.repository.at("main").tree["model.safetensors"]
        assert stored.xet
        assert stored.sha256
        # An HTTP bridge serves ranges of the file.
        stand_in.objects.place(stored.sha256).write_bytes(file.read_bytes())
        found = pin.resolve_parents(load_recipe("merge_method: passthrough\nmodels: [{model: acme/math}]\n"))
        assert pin.open_parent(found[0]).tensors.keys() == open_checkpoint(models / "math").tensors.keys()
        header = stand_in.sent[stored.sha256]
        told: list[tuple[int, int]] = []
        come = download_snapshots(snapshots_of(found), memo, lambda done, total: told.append((done, total)))
        assert stand_in.sent[stored.sha256] == header < stored.size
    assert come.bytes == stored.size
    assert told[-1] == (stored.size, stored.size)
    assert (found[0].directory / "model.safetensors").read_bytes() == file.read_bytes()


def test_a_storage_that_fails_once_is_tried_again(online: LookAlike, memo: HashMemo) -> None:
    found = parents()
    online.set_faults([Fault("fail", path="/_storage", times=2), Fault("drop", path="/_storage", nth=4)])
    waits: list[float] = []
    assert download_snapshots(snapshots_of(found), memo, wait=waits.append).new_files == 4
    assert len(waits) == 2


def refuse_access(online: LookAlike, patch: pytest.MonkeyPatch) -> None:
    online.repositories["acme/math"].gated = "auto"


def fill_disk(online: LookAlike, patch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    patch.setattr("huggingface_hub.hf_hub_download", fail)


def break_storage(kind: str) -> Obstacle:
    return lambda online, patch: online.set_faults([Fault(kind, path="/_storage", times=1000)])


@pytest.mark.parametrize(
    ("obstacle", "error", "words", "remedy"),
    [
        (lambda online, patch: go_offline(patch), InvalidInput, "HF_HUB_OFFLINE", ""),
        pytest.param(refuse_access, InvalidInput, "gated", "", marks=pytest.mark.story),
        (fill_disk, Refused, "No space left", "HF_HOME"),
        *(
            pytest.param(break_storage(kind), Refused, "", "run again", marks=pytest.mark.story)
            for kind in ("fail", "drop")
        ),
    ],
)
def test_weights_that_cannot_be_fetched_are_reported(
    online: LookAlike, memo: HashMemo, monkeypatch: pytest.MonkeyPatch, obstacle: Obstacle, error: type[MergegateError],
    words: str, remedy: str,
) -> None:  # fmt: skip
    found = parents()
    obstacle(online, monkeypatch)
    with pytest.raises(error, match=words) as caught:
        download_snapshots(snapshots_of(found), memo, wait=lambda seconds: None)
    assert remedy in caught.value.remedy


@pytest.mark.story
def test_a_branch_that_moves_during_the_merge_is_merged_as_pinned(
    online: LookAlike, models: Path, tmp_path: Path
) -> None:
    def move(request: object) -> None:
        if getattr(request, "path", "").endswith("/api/models/acme/math"):
            online.add_model("acme/math", models / "code")

    before = online.repositories["acme/math"].branches["main"]
    online.after.append(move)
    weights = []
    for name, recipe in (("remote", RECIPE), ("local", RECIPE.replace("acme/", f"{models}/"))):
        (tmp_path / f"{name}.yaml").write_text(recipe)
        result = mergegate("merge", str(tmp_path / f"{name}.yaml"), str(tmp_path / name), "--device", "cpu")
        assert result.exit_code == 0, result.output
        weights.append([file.read_bytes() for file in sorted((tmp_path / name).glob("*.safetensors"))])
    assert weights[0] == weights[1] != []
    assert online.repositories["acme/math"].branches["main"] != before


def test_a_moved_branch_is_a_different_parent(online: LookAlike, models: Path, memo: HashMemo) -> None:
    def digests() -> dict[str, tuple[str | None, str]]:
        found = parents()
        download(found, memo)
        return {parent.name: (parent.revision, parent.digest) for parent in pin.pin_checkpoints(found, memo)}

    before = digests()
    online.add_model("acme/math", models / "code")
    after = digests()
    assert after["math"][1] == before["code"][1] != before["math"][1]
    assert after["math"][0] != before["math"][0]
    assert (after["base"], after["code"]) == (before["base"], before["code"])


@pytest.mark.story
def test_an_impossible_merge_downloads_nothing(online: LookAlike, models: Path, tmp_path: Path) -> None:
    from family import save_tokenizer

    save_tokenizer(models / "math", [f"t{number}" for number in reversed(range(24))])
    online.add_model("acme/math", models / "math")
    (tmp_path / "recipe.yaml").write_text(RECIPE)
    result = mergegate("merge", str(tmp_path / "recipe.yaml"), str(tmp_path / "out"))
    assert result.exit_code == 3
    assert "tokenizer.json" in result.stderr
    assert online.sent == header_sizes(models)
