"""Test the lookup of a model's ancestors on the Hub, with the real client and a stand-in on loopback."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
from hub_look_alike import STRANGER, Fault, LookAlike, hub, use_hub
from look_alike_repository import Repository, plain

from mergegate.tasks.base.store.manifest import stage_key
from mergegate.tasks.models.checkpoints.pin import ResolvedCheckpoint
from mergegate.tasks.preflight.licenses.check import Declared, LicenseVerdict, check_licenses, read_licenses
from mergegate.tasks.preflight.licenses.resolve import CardSource, NotRead, hub_ancestors
from mergegate.tasks.preflight.licenses.table import load_table
from mergegate.tasks.preflight.settings import LicenseSettings

TABLE = load_table()
TEXTS = Path(__file__).resolve().parents[2] / "tasks" / "preflight" / "licenses" / "texts"
APACHE = (TEXTS / "apache-2.0.txt").read_bytes()


@pytest.fixture
def stand_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[LookAlike]:
    with hub(tmp_path / "hub") as server:
        use_hub(monkeypatch, server.url, tmp_path, STRANGER)
        yield server


@pytest.fixture
def waited(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Replace `time.sleep` and record the requested seconds, so that tests do not depend on the machine's speed."""
    seconds: list[float] = []
    monkeypatch.setattr("time.sleep", seconds.append)
    return seconds


def _add(stand_in: LookAlike, name: str, card: str, **files: bytes) -> str:
    """Commit this card to a public repository and return the commit ID."""
    repository = stand_in.repositories.setdefault(name, Repository(name, private=False))
    content = {"README.md": f"---\n{card}\n---\n".encode(), "config.json": b"{}", **files}
    head = repository.branches["main"]
    return repository.add("main", head, "edit", {key: plain(data) for key, data in content.items()}).id


def _local(place: Path, card: str) -> ResolvedCheckpoint:
    """Return a local model with this card as a parent of a recipe."""
    place.mkdir()
    (place / "README.md").write_text(f"---\n{card}\n---\n")
    return ResolvedCheckpoint(name=place.name, ref=f"../{place.name}", directory=place)


def _judge(declared: Declared) -> LicenseVerdict:
    return check_licenses.work(declared, LicenseSettings().use("acme/Llama-mix"), TABLE, {})


def _judge_chat(tmp_path: Path, card: str) -> LicenseVerdict:
    """Return the verdict for one local model with this card."""
    return _judge(read_licenses([_local(tmp_path / "chat", card)], TABLE))


def _key(declared: Declared) -> str:
    return stage_key("licenses", check_licenses.version, {"declared": declared})


def test_a_grandparent_on_the_hub_that_its_descendants_drop_goes_to_review(stand_in: LookAlike, tmp_path: Path) -> None:
    llama = _add(stand_in, "meta/llama", "license: llama3.1")
    tune = _add(stand_in, "acme/tune", "license: apache-2.0\nbase_model: meta/llama")
    verdict = _judge_chat(tmp_path, "license: apache-2.0\nbase_model: acme/tune")
    assert verdict.combination.status == "review"
    reviews = "\n".join(reason.sentence for reason in verdict.combination.reasons if reason.status == "review")
    assert "chat declares apache-2.0, but was derived from meta/llama under llama3.1, which it drops" in reviews
    assert "acme/tune declares apache-2.0, but was derived from meta/llama" in reviews
    assert [(one.name, one.license, one.revision) for one in verdict.ancestors] == [
        ("acme/tune", "apache-2.0", tune),
        ("meta/llama", "llama3.1", llama),
    ]


def test_only_cards_and_license_files_are_downloaded(stand_in: LookAlike, tmp_path: Path) -> None:
    _add(stand_in, "acme/base", "tags: []", **{"LICENSE": APACHE, "model.txt": b"no", "licenses/x.txt": b"no"})
    (ancestor,) = _judge_chat(tmp_path, "license: apache-2.0\nbase_model: acme/base").ancestors
    assert (ancestor.license, ancestor.own_text) == ("apache-2.0", APACHE.decode())
    fetched = {entry.path.rpartition("/")[2] for entry in stand_in.log if "/resolve/" in entry.path}
    assert fetched == {"README.md", "LICENSE"}


@pytest.mark.parametrize("address", ["acme/base", "https://huggingface.co/acme/base"])
def test_each_ancestor_is_asked_for_once_in_a_run(stand_in: LookAlike, tmp_path: Path, address: str) -> None:
    _add(stand_in, "acme/base", "license: mit")
    family = [_local(tmp_path / name, f"license: mit\nbase_model: {address}") for name in ("chat", "code", "maths")]
    assert _judge(read_licenses(family, TABLE)).combination.status == "allowed"
    assert sum(entry.path == "/api/models/acme/base" for entry in stand_in.log) == 1


def test_a_cycle_of_cards_ends(stand_in: LookAlike, tmp_path: Path) -> None:
    _add(stand_in, "acme/a", "license: mit\nbase_model: acme/b")
    _add(stand_in, "acme/b", "license: mit\nbase_model: [acme/a, acme/b]")
    verdict = _judge_chat(tmp_path, "license: mit\nbase_model: acme/a")
    assert [one.name for one in verdict.ancestors] == ["acme/a", "acme/b"]
    assert verdict.combination.status == "allowed"


def test_a_card_on_the_hub_names_no_directory_of_this_machine(stand_in: LookAlike, tmp_path: Path) -> None:
    _add(stand_in, "acme/base", "license: mit\nbase_model: ../../blobs")
    assert list(_judge_chat(tmp_path, "license: mit\nbase_model: acme/base").unread) == ["../../blobs"]


def test_a_gated_ancestor_is_unread_and_reviewed(stand_in: LookAlike, tmp_path: Path) -> None:
    _add(stand_in, "meta/llama", "license: llama3.1")
    stand_in.repositories["meta/llama"].gated = "manual"
    verdict = _judge_chat(tmp_path, "license: llama3.1\nbase_model: meta/llama")
    assert verdict.unread == {"meta/llama": "it is gated; request access and set HF_TOKEN"}
    assert verdict.combination.reasons[0].sentence == (
        "chat was derived from meta/llama, whose license could not be read "
        "(it is gated; request access and set HF_TOKEN)"
    )


def test_the_hubs_summary_of_a_gated_card_suffices(stand_in: LookAlike, tmp_path: Path) -> None:
    commit = _add(stand_in, "meta/llama", "license: llama3.1")
    repository = stand_in.repositories["meta/llama"]
    repository.gated, repository.card_data = "auto", {"license": "llama3.1", "base_model": "meta/root"}
    verdict = _judge_chat(tmp_path, "license: llama3.1\nbase_model: meta/llama")
    assert [(one.name, one.license, one.revision) for one in verdict.ancestors] == [("meta/llama", "llama3.1", commit)]
    assert list(verdict.unread) == ["meta/root"]


@pytest.mark.parametrize("entry", ["acme/gone", "acme/hidden", "../nowhere", "a b/c", "https://example.org/x", "x"])
def test_a_missing_ancestor_is_unread(stand_in: LookAlike, tmp_path: Path, entry: str) -> None:
    stand_in.repositories["acme/hidden"] = Repository("acme/hidden", private=True)
    verdict = _judge_chat(tmp_path, f"license: mit\nbase_model: {entry}")
    assert list(verdict.unread) == [entry]
    assert verdict.combination.status == "review"


def test_more_ancestors_than_any_model_has_are_not_asked_for(stand_in: LookAlike) -> None:
    for number in range(4):
        _add(stand_in, f"acme/m{number}", "license: mit")
    ask = hub_ancestors(limit=3)
    found = [ask(f"acme/m{number}") for number in range(4)]
    assert [type(one) for one in found] == [CardSource, CardSource, CardSource, NotRead]
    assert found[3] == NotRead("it has more than 3 ancestors on the Hub")
    assert not any("m3" in entry.path for entry in stand_in.log)


def test_a_failing_hub_is_queried_once(stand_in: LookAlike, tmp_path: Path, waited: list[float]) -> None:
    stand_in.set_faults([Fault("fail", times=1000)])
    bases = "\n".join(f"- acme/base{number}" for number in range(20))
    verdict = _judge_chat(tmp_path, f"license: mit\nbase_model:\n{bases}")
    assert sum(waited) < 5
    assert len(stand_in.log) == 1
    assert set(verdict.unread.values()) == {"the Hub responded with status 503"}


@pytest.mark.parametrize("answer", ["<html>log in</html>", "{}", "[]", '{"id": 3, "siblings": 4}'])
def test_an_answer_that_is_not_the_hubs_raises_nothing(stand_in: LookAlike, tmp_path: Path, answer: str) -> None:
    stand_in.set_faults([Fault("fail", status=200, body=answer, times=1000)])
    verdict = _judge_chat(tmp_path, "license: mit\nbase_model: acme/base")
    assert list(verdict.unread) == ["acme/base"]


def test_a_hub_that_fails_between_two_requests_is_not_awaited(
    stand_in: LookAlike, tmp_path: Path, waited: list[float]
) -> None:
    _add(stand_in, "acme/base", "license: mit")
    stand_in.set_faults([Fault("fail", path="/resolve/", times=1000)])
    verdict = _judge_chat(tmp_path, "license: mit\nbase_model: acme/base")
    assert sum(waited) < 5
    assert verdict.unread == {"acme/base": "the Hub responded with status 503"}


def test_without_a_network_the_run_goes_on(
    tmp_path: Path, waited: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.socket() as closed:  # a port without a listener
        closed.bind(("127.0.0.1", 0))
        use_hub(monkeypatch, f"http://127.0.0.1:{closed.getsockname()[1]}", tmp_path, STRANGER)
        verdict = _judge_chat(tmp_path, "license: mit\nbase_model: [acme/a, acme/b]")
    assert sum(waited) < 5
    assert set(verdict.unread) == {"acme/a", "acme/b"}
    assert verdict.combination.status == "review"


def test_offline_no_request_is_sent_and_cached_cards_count(
    stand_in: LookAlike, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commit = _add(stand_in, "acme/base", "license: mit\nbase_model: acme/root")
    chat = _local(tmp_path / "chat", "license: mit\nbase_model: acme/base")
    before = read_licenses([chat], TABLE)
    stand_in.log.clear()
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    verdict = _judge(read_licenses([chat], TABLE))
    assert stand_in.log == []
    assert [(one.name, one.license, one.revision) for one in verdict.ancestors] == [("acme/base", "mit", commit)]
    assert verdict.unread == {"acme/root": "HF_HUB_OFFLINE is set"}
    assert _key(read_licenses([chat], TABLE)) == _key(before)


def test_the_key_changes_with_what_an_ancestor_declares_and_not_with_its_commit(
    stand_in: LookAlike, tmp_path: Path
) -> None:
    chat = _local(tmp_path / "chat", "license: mit\nbase_model: acme/base")
    first = _add(stand_in, "acme/base", "license: mit")
    before = read_licenses([chat], TABLE)
    second = _add(stand_in, "acme/base", "license: mit\ntags: [new]")
    same = read_licenses([chat], TABLE)
    _add(stand_in, "acme/base", "license: gemma")
    other = read_licenses([chat], TABLE)
    assert [_judge(one).ancestors[0].revision for one in (before, same)] == [first, second]
    assert _key(before) == _key(same) != _key(other)


def test_a_parent_from_the_hub_is_read_where_it_was_downloaded(stand_in: LookAlike, tmp_path: Path) -> None:
    base = _local(tmp_path / "base", "license: gemma").model_copy(
        update={"name": "base", "ref": "acme/base@v1", "revision": "c" * 40}
    )
    chat = _local(tmp_path / "chat", "license: mit\nbase_model: acme/base")
    verdict = _judge(read_licenses([base, chat], TABLE))
    assert stand_in.log == []
    assert verdict.ancestors == ()  # base is a parent of the merge, so it is not listed as an ancestor
    sentences = "\n".join(reason.sentence for reason in verdict.combination.reasons)
    assert "chat declares mit, but was derived from base under gemma" in sentences


def test_a_hub_that_never_answers_is_waited_for_once_and_not_long(monkeypatch: pytest.MonkeyPatch) -> None:
    from threading import Event

    from mergegate.tasks.preflight.licenses import resolve

    asked: list[str] = []

    def silent(access: object, repository: str) -> NotRead:
        asked.append(repository)
        Event().wait()  # hang like a name lookup that never returns
        return NotRead("never")

    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    monkeypatch.setattr(resolve, "_TOTAL_TIMEOUT_S", 0.05)
    monkeypatch.setattr(resolve, "_read_repository", silent)
    find = hub_ancestors()
    answers = [find(name) for name in ("acme/a", "acme/b", "acme/c")]
    assert asked == ["acme/a"]
    assert answers == [NotRead("the Hub did not respond within 0.05 s")] * 3
