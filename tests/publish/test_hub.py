"""Test publishing to the Hub with the real client on both transports, also with a fault at any request."""

from __future__ import annotations

import copy
import errno
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from forked_publishers import ForkedPublishers, hub_publishers
from hub_look_alike import READER, STRANGER, WRITER, Fault, LookAlike, hub, use_hub
from look_alike_repository import Repository, plain
from loopback import Request
from samples import sampled, sampled_rows
from target_contract import ALIAS, attempts_with_fault, require_aliases, small_release

from mergegate.merge_core.errors import InvalidInput, MergegateError, Refused
from mergegate.merge_core.files import HashMemo, sha256_file
from mergegate.tasks.models.checkpoints.hub import HubAccess, hub_access
from mergegate.tasks.release.publish.content import ReleaseFile
from mergegate.tasks.release.publish.targets import PublishRequest
from mergegate.tasks.release.publish.targets.hub import HubTarget, version_on
from mergegate.tasks.release.publish.targets.hub_publication import publish_hub

MODEL = Path(__file__).resolve().parents[2] / "profiles" / "demo" / "models" / "base"
CARD = "---\nlicense: mit\n---\n# demo\n"

# Code as a user would write it, for a process with an empty cache: download a release by tag, compare and load it.
_DOWNLOAD = """
import json
from pathlib import Path
from huggingface_hub import snapshot_download
place = Path(snapshot_download("acme/demo", revision="v1"))
print(json.dumps({str(p.relative_to(place)): p.read_bytes().hex() for p in place.rglob("*") if p.is_file()}))
from transformers import AutoModelForCausalLM
AutoModelForCausalLM.from_pretrained("acme/demo", revision="v1")
"""


@dataclass(frozen=True)
class PublisherHere:
    """Publisher in this process, for tests that do not kill it."""

    memo: Path

    def publish(
        self,
        target: Mapping[str, Any],
        files: Mapping[str, Path],
        version: str,
        expected_head: str | None = None,
        sha256: Mapping[str, str] | None = None,
    ) -> dict[str, Any]:
        """Publish as ``ForkedPublishers`` does."""
        hashes = {name: sha256_file(path) for name, path in files.items()} | dict(sha256 or {})
        listed = tuple(ReleaseFile(name, path.stat().st_size, hashes[name], path) for name, path in files.items())
        request = PublishRequest(listed, "demo", version, Path(), HashMemo(self.memo), expected_head)
        access, waits = HubAccess(target["endpoint"], target["token"]), list[float]()
        try:
            done = publish_hub(request, "acme/demo", access, wait=waits.append, **target["options"])
        except MergegateError as error:
            return {"refused": str(error), "exit": error.exit_code, "waited": sum(waits)}
        return {"commit": done.commit, "new": done.new}


@dataclass
class Publication:
    """A release, and a publisher for the stand-in Hub."""

    warm: ForkedPublishers | PublisherHere
    stand_in: LookAlike
    files: dict[str, Path]

    def publish(self, version: str = "v1", token: str = WRITER, **more: Any) -> dict[str, Any]:
        options = {name: more.pop(name) for name in ("visibility", "gated") if name in more}
        target = {"endpoint": self.stand_in.url, "token": token, "options": options}
        return self.warm.publish(target, self.files, version, **more)

    def replace_weights(self) -> None:
        self.files["model.safetensors"].write_bytes(os.urandom(2000))

    @property
    def titles(self) -> list[str]:
        """Titles of the commits on main, newest first."""
        return [commit.title for commit in self.stand_in.repository.history()]


@pytest.fixture(scope="module")
def lfs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ForkedPublishers]:
    with hub_publishers(tmp_path_factory.mktemp("lfs"), xet=False) as warm:
        yield warm


@pytest.fixture(scope="module")
def xet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ForkedPublishers]:
    with hub_publishers(tmp_path_factory.mktemp("xet"), xet=True) as warm:
        yield warm


@pytest.fixture
def stand_in(tmp_path: Path) -> Iterator[LookAlike]:
    with hub(tmp_path / "hub") as server:
        yield server


@pytest.fixture
def files(tmp_path: Path) -> dict[str, Path]:
    contents = {"model.safetensors": os.urandom(2000), "README.md": CARD.encode(), "licenses/ä b.txt": b"terms"}
    for number, data in enumerate(contents.values()):
        (tmp_path / str(number)).write_bytes(data)
    return {name: tmp_path / str(number) for number, name in enumerate(contents)}


@pytest.fixture
def demo(stand_in: LookAlike, files: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Publication:
    use_hub(monkeypatch, stand_in.url, tmp_path)
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    return Publication(PublisherHere(tmp_path / "memo"), stand_in, files)


def run_with_hub(script: str, *arguments: str, **settings: str) -> str:
    """Run a script in a process whose cache of the Hub is empty, and return its output."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
    command = [sys.executable, "-c", script, *arguments]
    environment = {**clean, **settings, "PYTHONPATH": str(MODEL.parents[3])}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.story
@pytest.mark.parametrize("by", sampled(["lfs", "xet", "lfs in parts"], ["xet"], pytest.mark.proof))
def test_a_published_release_downloads_byte_for_byte_and_loads(
    tmp_path: Path, by: str, request: pytest.FixtureRequest
) -> None:
    warm: ForkedPublishers = request.getfixturevalue(by.partition(" ")[0])
    (tmp_path / "README.md").write_text(CARD)
    (tmp_path / "empty").touch()
    model = {path.name: path for path in MODEL.iterdir() if path.is_file() and path.name != "README.md"}
    files = {**model, "README.md": tmp_path / "README.md", "licenses/no terms.txt": tmp_path / "empty"}
    parts = 100_000 if "parts" in by else 0
    with hub(tmp_path / "hub", xet=by == "xet", part_size=parts, page=4) as stand_in:
        demo = Publication(warm, stand_in, files)
        assert [demo.publish()["new"], demo.publish()["new"]] == [True, False]
        assert demo.titles == ["Release v1", "initial commit"]
        assert (by == "xet") == any(file.xet for file in stand_in.repository.at("v1").tree.values())
        settings = {"HF_HOME": str(tmp_path / "cache"), "HF_ENDPOINT": stand_in.url, "HF_TOKEN": WRITER}
        output = run_with_hub(_DOWNLOAD, **settings, HF_HUB_DISABLE_XET="0" if by == "xet" else "1")
        stored = [entry for entry in stand_in.log if entry.path.startswith("/_storage")]
    found = {name: bytes.fromhex(data) for name, data in json.loads(output.splitlines()[0]).items()}
    del found[".gitattributes"]
    assert found == {name: path.read_bytes() for name, path in files.items()}
    assert bool(stored) == (by != "xet")
    assert not any(entry.authorised for entry in stored), "the token goes to the Hub, never to storage"


def test_a_public_release_is_seen_by_others_only_when_it_is_complete(demo: Publication) -> None:
    complete: list[bool] = []

    def look(_: object) -> None:
        for repository in demo.stand_in.repositories.values():
            if not repository.private:
                complete.append(set(demo.files) <= set(repository.at("main").tree) and "v1" in repository.tags)
                assert repository.gated == "manual"

    demo.stand_in.after.append(look)
    demo.publish(visibility="public", gated="manual")
    assert complete
    assert all(complete)


def test_a_version_never_changes_its_content(demo: Publication) -> None:
    demo.publish()
    assert demo.stand_in.repository.private, "a new repository is private"
    demo.replace_weights()
    assert "already published with other content (model.safetensors)" in demo.publish()["refused"]
    assert len(demo.titles) == 2


def test_a_changed_main_is_not_overwritten(demo: Publication) -> None:
    demo.publish()
    repository = demo.stand_in.repository
    judged = repository.branches["main"]
    theirs = repository.add("main", judged, "somebody else's", repository.at("main").tree | {})
    demo.replace_weights()
    answer = demo.publish("v2", expected_head=judged)
    assert f"main is at {theirs.id[:12]} now" in answer["refused"]
    assert "run again" in answer["refused"]
    assert repository.branches["main"] == theirs.id


def test_a_commit_before_the_promotion_is_not_overwritten(demo: Publication) -> None:
    def interfere(request: Request) -> None:
        if request.path.endswith("/preupload/main"):  # the last request before the promoting commit
            repository = demo.stand_in.repository
            if len(repository.history()) == 1:
                repository.add("main", repository.branches["main"], "somebody else's", repository.at("main").tree)

    demo.stand_in.after.append(interfere)
    assert "the head that this release was compared with" in demo.publish()["refused"]
    assert demo.titles == ["somebody else's", "initial commit"]


def test_altered_files_are_not_sent(demo: Publication) -> None:
    answer = demo.publish(sha256={"model.safetensors": "0" * 64})
    assert "the bytes that were evaluated and gated" in answer["refused"]
    assert not any(entry.method == "PUT" for entry in demo.stand_in.log)


def test_a_hub_that_stores_other_bytes_is_detected(demo: Publication) -> None:
    def damage(request: Request) -> None:
        if "/commit/mergegate-staging" in request.path:
            repository = demo.stand_in.repository
            tree = repository.commits[repository.branches["mergegate-staging/v1"]].tree
            assert isinstance(tree, dict)
            tree["model.safetensors"] = replace(tree["model.safetensors"], sha256="0" * 64)

    demo.stand_in.after.append(damage)
    assert "the Hub's listing differs from the files that were sent" in demo.publish()["refused"]
    assert demo.titles == ["initial commit"]
    assert sum("/commit/" in entry.path for entry in demo.stand_in.log) < 20


@pytest.mark.proof
def test_a_writer_that_undoes_every_step_ends_the_publication(demo: Publication) -> None:
    def undo(request: Request) -> None:
        if "/commit/mergegate-staging" in request.path:
            demo.stand_in.repository.branches.pop("mergegate-staging/v1", None)

    demo.stand_in.after.append(undo)
    assert "another writer undoes every step" in demo.publish()["refused"]


def test_a_rejected_card_is_detected_before_any_upload(demo: Publication) -> None:
    demo.files["README.md"].write_text("---\nlicense: mit\nbase_model_relation: mixture\n---\n")
    answer = demo.publish()
    assert "base_model_relation" in answer["refused"]
    assert answer["exit"] == 3
    assert not any("/objects/batch" in entry.path or entry.method == "PUT" for entry in demo.stand_in.log)


@pytest.mark.story
@pytest.mark.parametrize("by", ["lfs", "xet"])
def test_progress_reports_the_bytes_sent(
    tmp_path: Path, request: pytest.FixtureRequest, files: dict[str, Path], by: str
) -> None:
    total = sum(path.stat().st_size for path in files.values())
    with hub(tmp_path / "watched", xet=by == "xet") as stand_in:
        demo = Publication(request.getfixturevalue(by), stand_in, files)
        told = demo.publish(watched=True)["told"]
        assert (told[0], told[-1]) == ([0, total], [total, total])
        assert demo.publish(watched=True)["told"] == []


@pytest.mark.parametrize(
    ("path", "status"),
    sampled_rows(
        product(("", "/commit/", "/preupload/", "/tag/", "objects/batch", "/_storage/"), (503, 429)),
        [("/preupload/", 503), ("/commit/", 429)],
    ),
)
def test_an_unavailable_hub_is_refused_with_the_advice_to_run_again(demo: Publication, path: str, status: int) -> None:
    demo.stand_in.set_faults([Fault("fail", path=path, times=1 << 30, status=status)])
    answer = demo.publish()
    assert "run again later; mergegate resumes the publication" in answer["refused"]
    assert answer["exit"] == 3
    assert 60 <= answer["waited"] <= 600, "minutes, not seconds and not hours"
    demo.stand_in.set_faults([])
    assert demo.publish()["new"]


@pytest.mark.parametrize(
    ("token", "words"), [(READER, "403"), (STRANGER, "403"), ("hf_nobody_knows_this", "401 Invalid credentials")]
)
def test_a_token_without_permission_is_refused_and_never_shown(demo: Publication, token: str, words: str) -> None:
    answer = demo.publish(token=token)
    assert words in answer["refused"]
    assert token not in answer["refused"]


def test_an_error_page_that_repeats_the_token_is_not_repeated(demo: Publication) -> None:
    demo.stand_in.set_faults([Fault("fail", status=400, body=json.dumps({"error": f"bad token {WRITER}"}))])
    answer = demo.publish()
    assert "400" in answer["refused"]
    assert WRITER not in answer["refused"]


def test_staging_branches_of_interrupted_runs_are_deleted(demo: Publication) -> None:
    demo.publish()
    branches = demo.stand_in.repository.branches
    branches |= {"mergegate-staging/v0": branches["main"], "experiment": branches["main"]}
    assert demo.publish()["new"] is False
    assert set(branches) == {"main", "experiment"}


def test_the_token_comes_from_the_environment_and_shows_in_no_representation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HF_HUB_OFFLINE")
    monkeypatch.setenv("HF_TOKEN", "hf_planted_word")
    access = hub_access(writing=True)
    assert access.token == "hf_planted_word"
    assert "hf_planted_word" not in f"{access} {access!r}"
    monkeypatch.delenv("HF_TOKEN")
    with pytest.raises(InvalidInput, match="export HF_TOKEN"):
        hub_access(writing=True)


@pytest.mark.story
def test_a_token_can_come_from_a_secret_block(monkeypatch: pytest.MonkeyPatch, prefect_api: None) -> None:
    from prefect.blocks.system import Secret

    monkeypatch.delenv("HF_HUB_OFFLINE")
    monkeypatch.delenv("HF_TOKEN", raising=False)
    Secret(value="hf_from_block").save("hub-token", overwrite=True, _sync=True)  # type: ignore[call-arg]
    assert hub_access("hub-token", writing=True).token == "hf_from_block"
    with pytest.raises(InvalidInput, match="no Secret block"):
        hub_access("hub-tokne", writing=True)


def test_offline_mode_is_reported_immediately(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(InvalidInput, match="unset HF_HUB_OFFLINE"):
        hub_access(writing=True)


@pytest.fixture
def released(stand_in: LookAlike, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> LookAlike:
    """Make the stand-in this process's Hub, with ``v1``, ``spring`` and ``v2`` published."""
    use_hub(monkeypatch, stand_in.url, tmp_path, WRITER)
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    repository = stand_in.repositories["acme/demo"] = Repository("acme/demo", private=True)
    for version in ("v1", "spring", "v2"):
        files = {"README.md": plain(version.encode())}
        repository.tags[version] = repository.add("main", repository.branches["main"], f"Release {version}", files).id
    return stand_in


@pytest.mark.parametrize("kind", ["fail", "drop"])
@pytest.mark.parametrize("path", ["/tree/", "/resolve/"])
def test_a_release_is_refused_if_the_hub_is_lost_after_it_is_opened(released: LookAlike, kind: str, path: str) -> None:
    released.set_faults([Fault(kind, path=path, times=99)])
    release = HubTarget.open("acme/demo@v1")
    assert release is not None
    for read in (release.files, lambda: release.read("README.md")):
        with pytest.raises(Refused) as lost:
            read()
        assert lost.value.where == "acme/demo on the Hub"
        assert lost.value.found.startswith("the release cannot be read: ")
        assert lost.value.remedy == "run again later"
    released.set_faults([])
    assert release.read("README.md") == b"v1"
    assert set(release.files()) == {"README.md"}


@pytest.mark.parametrize("kind", ["fail", "drop"])
def test_a_head_is_refused_if_the_hub_does_not_list_its_files(released: LookAlike, kind: str) -> None:
    target = HubTarget(to="hub", repo="acme/demo")
    released.set_faults([Fault(kind, path="/tree/", times=99)])
    with pytest.raises(Refused, match="the release cannot be read"):
        target.current_head(Path())
    with pytest.raises(Refused, match="the release cannot be read"):
        target.published_file(Path(), "v1", "README.md")
    released.set_faults([])
    assert target.current_head(Path()) == released.repository.branches["main"]
    current = target.current_release(Path())
    assert current is not None
    assert (current.head, (current.directory / "README.md").read_text()) == (target.current_head(Path()), "v2")
    assert target.published_file(Path(), "v1", "README.md") == b"v1"
    assert target.published_file(Path(), "v1", "missing") is None


def test_a_full_disk_is_not_a_lost_hub(released: LookAlike, monkeypatch: pytest.MonkeyPatch) -> None:
    release = HubTarget.open("acme/demo@v1")
    assert release is not None

    def fail(*_: object, **__: object) -> str:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("huggingface_hub.HfApi.hf_hub_download", fail)
    with pytest.raises(OSError, match="No space left"):
        release.files()


def test_an_alias_is_a_tag_that_moves(released: LookAlike) -> None:
    to, there = HubTarget(to="hub", repo="acme/demo"), released.repository
    require_aliases(
        to,
        lambda: ({**there.tags, ALIAS: ""}, there.branches, list(there.commits)),
        lambda: [entry.path for entry in released.log if entry.method != "GET"],
    )
    to.set_alias(Path(), "spring", ALIAS)
    with pytest.raises(InvalidInput, match="'spring', which is a version"):
        to.set_alias(Path(), "v1", "spring")
    with pytest.raises(InvalidInput, match="no version 'v1'"):
        HubTarget(to="hub", repo="acme/other").set_alias(Path(), "v1", ALIAS)


@pytest.mark.parametrize("kind", ["fail", "drop"])
def test_an_alias_is_moved_despite_any_lost_answer(released: LookAlike, kind: str) -> None:
    to = HubTarget(to="hub", repo="acme/demo")
    to.set_alias(Path(), "v1", ALIAS)
    for path, method in (("/refs", "GET"), ("/tag/", "DELETE"), ("/tag/", "POST")):
        for version in ("v2", "v1"):
            released.set_faults([Fault(kind, method=method, path=path)])
            to.set_alias(Path(), version, ALIAS)
            assert to.resolve_alias(Path(), ALIAS) == version
    released.set_faults([Fault("fail", path="/tag/", status=403, times=9)])
    with pytest.raises(Refused, match="write access to the repository"):
        to.set_alias(Path(), "v2", ALIAS)


def test_an_alias_means_the_version_among_the_tags_of_its_commit() -> None:
    tags = {"canary": "1", "production": "1", "spring": "1", "v1": "1", "v2": "2"}
    assert version_on(tags, "production") == "v1"
    assert version_on({**tags, "v1": "3"}, "production") == "canary"
    assert version_on(tags, "v2") is None
    assert version_on(tags, "nothing") is None


@pytest.fixture(scope="module")
def transport(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Publication]:
    """Yield a publisher and a Hub that use LFS or Xet. ``main`` has a release with three shards."""
    warm, place = request.getfixturevalue(request.param), tmp_path_factory.mktemp(request.param)
    with hub(place / "hub", xet=request.param == "xet") as stand_in:
        demo = Publication(warm, stand_in, small_release(place / "old", 1, shards=3))
        demo.publish()
        yield demo


def fault_cases() -> Iterator[Any]:
    """Yield every fault on both transports, for a first release and for a replacement. The slow suite runs one case."""
    for by, first, kind in product(("lfs", "xet"), (False, True), ("503", "down", "drop", "kill")):
        often = (by, first, kind) == ("xet", False, "kill")
        marks = pytest.mark.story if often else pytest.mark.proof
        yield pytest.param(by, first, kind, id=f"{by}-{'first' if first else 'replacing'}-{kind}", marks=marks)


@pytest.mark.proof
@pytest.mark.parametrize(("transport", "first", "kind"), list(fault_cases()), indirect=["transport"])
def test_a_fault_at_any_request_is_healed_by_running_again(
    transport: Publication, kind: str, first: bool, tmp_path: Path
) -> None:
    stand_in, old = transport.stand_in, copy.deepcopy(transport.stand_in.repository)

    def attempt(nth: int, on_start: Any) -> Any:
        stand_in.repositories = {} if first else {"acme/demo": copy.deepcopy(old)}
        stand_in.listings.clear()
        transport.files = small_release(tmp_path / str(nth), 2, shards=2)
        return transport.publish("v2", on_start=on_start)

    for outcome in attempts_with_fault(stand_in, kind, 1, 20, attempt):
        assert (outcome == {"killed": True}) == (kind == "kill")
        transport.publish("v2")
        repository = stand_in.repository
        assert transport.titles == ["Release v2", *([] if first else ["Release v1"]), "initial commit"]
        assert repository.branches == {"main": repository.tags["v2"]}
        assert set(repository.at("main").tree) == {".gitattributes", *transport.files}
        trees = [{name: file.blob for name, file in commit.tree.items()} for commit in repository.history()[:2]]
        assert [listing for listing in stand_in.listings if listing not in trees] == []
        stand_in.begin()
        assert transport.publish("v2") == {"commit": repository.tags["v2"], "new": False}
        assert all(entry.method == "GET" for entry in stand_in.log)
    stand_in.repositories = {"acme/demo": old}
