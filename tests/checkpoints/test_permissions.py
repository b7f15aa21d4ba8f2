"""The preflight finds out whether a token has write access before anything is merged."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hub_look_alike import NARROW, NARROW_READER, READER, STRANGER, WRITER, Fault, LookAlike

from mergegate.merge_core.errors import InvalidInput, Refused
from mergegate.tasks.models.checkpoints.hub.permissions import Account, find_write_refusal, parse_account
from mergegate.tasks.release.publish.targets.contract import check_target
from mergegate.tasks.release.publish.targets.directory import DirectoryTarget
from mergegate.tasks.release.publish.targets.hub import HubTarget

HUB = "https://hub.example"


def fine(**scopes: list[str]) -> dict[str, Any]:
    scoped = [
        {"entity": {"type": "org", "name": name.replace("__", "/")}, "permissions": p} for name, p in scopes.items()
    ]
    return {"role": "fineGrained", "fineGrained": {"canReadGatedRepos": False, "global": [], "scoped": scoped}}


def whoami(token: dict[str, Any] | None = None, role: str = "write") -> dict[str, Any]:
    return {
        "name": "ann",
        "orgs": [{"name": "acme", "roleInOrg": role}],
        "auth": {"type": "access_token", "accessToken": token or {"role": "write"}},
    }


@pytest.mark.parametrize(
    ("answer", "repo", "words"),
    [
        (whoami(), "acme/demo", None), (whoami(), "ann/demo", None), (whoami(role="admin"), "acme/demo", None),
        (whoami(role="contributor"), "acme/demo", None), (whoami(), "acne/demo", "not a member of"),
        (whoami(role="read"), "acme/demo", "has read access only in acme"), (whoami(role="read"), "ann/demo", None),
        (whoami({"role": "read"}), "acme/demo", "the token has read access only"),
        (whoami(fine(acme=["repo.content.read", "repo.write"])), "acme/demo", None),
        (whoami(fine(acme=["repo.content.read"])), "acme/demo", "fine-grained token has no write access"),
        (whoami(fine(ann=["repo.write"])), "acme/demo", "fine-grained token has no write access"),
        (whoami(fine(acme__demo=["repo.write"])), "acme/demo", None),
        (whoami(fine(acme__other=["repo.write"])), "acme/demo", "fine-grained token has no write access"),
        ({"name": "ann", "orgs": [{"name": "acme"}]}, "acme/demo", None),  # An older Hub sends no more than this.
    ],
)  # fmt: skip
def test_write_access_follows_from_the_account(answer: dict[str, Any], repo: str, words: str | None) -> None:
    no = find_write_refusal(parse_account(answer), repo, HUB)
    assert (no is None) == (words is None)
    if no and words:
        assert words in no.found
        assert no.where == f"publish.repo: {repo}"
        assert no.remedy


def test_a_similar_namespace_is_suggested() -> None:
    assert "did you mean 'acme'?" in find_write_refusal(parse_account(whoami()), "acne/demo", HUB).remedy


def test_an_empty_answer_gives_no_write_access() -> None:
    assert parse_account({}) == Account(name="", organizations={})
    assert find_write_refusal(parse_account({}), "acme/demo", HUB)


def failure(path: str, status: int) -> Fault:
    return Fault("fail", path=path, status=status, times=1000)


@pytest.mark.parametrize(
    ("token", "repo", "fault", "words"),
    [
        (WRITER, "acme/base", None, ""), (WRITER, "acme/new", None, ""), (NARROW, "acme/base", None, ""),
        (NARROW, "acme/new", None, ""),
        (WRITER, "acme/base", failure("/api/whoami-v2", 404), ""),  # A Hub without accounts.
        (READER, "acme/demo", None, "the token has read access only"),
        (NARROW_READER, "acme/demo", None, "the fine-grained token has no write access"),
        (STRANGER, "acme/demo", None, "not a member of"), ("hf_expired", "acme/demo", None, "does not know this token"),
        (WRITER, "acme/base", failure("/auth-check", 403), "does not let the token write: 403"),
        (WRITER, "acme/base", failure("/api/whoami-v2", 503), "did not answer"),
        (WRITER, "acme/base", failure("/auth-check", 503), "did not answer"),
    ],
)  # fmt: skip
def test_only_a_token_with_write_access_passes(
    online: LookAlike, monkeypatch: pytest.MonkeyPatch, token: str, repo: str, fault: Fault | None, words: str
) -> None:
    monkeypatch.setenv("HF_TOKEN", token)
    online.set_faults([fault] if fault else [])
    if not words:
        check_target(HubTarget(to="hub", repo=repo), Path())
        return
    with pytest.raises(InvalidInput if token == "hf_expired" else Refused, match=words) as caught:
        check_target(HubTarget(to="hub", repo=repo), Path())
    assert token not in str(caught.value)
    assert words != "did not answer" or "run again" in caught.value.remedy
    assert not any(entry.method in ("POST", "PUT") for entry in online.log)


def test_a_directory_that_cannot_be_created_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(InvalidInput, match="file is not a directory"):
        check_target(DirectoryTarget(path=Path("file/releases")), tmp_path)


def test_a_read_only_directory_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.access", lambda path, mode: False)  # Root may write anywhere.
    with pytest.raises(Refused, match="is not writable"):
        check_target(DirectoryTarget(path=Path("releases")), tmp_path)


def test_a_directory_that_can_be_created_passes_and_is_not_created(tmp_path: Path) -> None:
    check_target(DirectoryTarget(path=Path("releases/demo")), tmp_path)
    assert list(tmp_path.iterdir()) == []
