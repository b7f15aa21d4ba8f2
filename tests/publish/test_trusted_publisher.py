"""Test publishing to the Hub with the OIDC identity of a CI job instead of a stored token."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator, Mapping
from hashlib import sha256
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
from hub_look_alike import READER, WRITER, Fault, LookAlike, hub, use_hub
from look_alike_repository import Repository, plain
from loopback import Request
from oidc_look_alike import CLAIMS, GITHUB, PublisherEntry, job_environment
from samples import sampled
from typer.testing import CliRunner

from mergegate.flows.cli.app import app
from mergegate.merge_core.errors import InvalidInput, MergegateError, Refused
from mergegate.merge_core.files import HashMemo
from mergegate.tasks.models.checkpoints.hub import access as trusted_publisher
from mergegate.tasks.models.checkpoints.hub import hub_access
from mergegate.tasks.release.publish.content import ReleaseFile, written_file
from mergegate.tasks.release.publish.targets import PublishRequest, check_target
from mergegate.tasks.release.publish.targets.hub import HubTarget
from mergegate.tasks.release.publish.targets.hub_publication import PublishedCommit, publish_hub

DEMO = HubTarget(to="hub", repo="acme/demo")
MODELS = Path(__file__).resolve().parents[2] / "profiles" / "demo"
PROFILE = f"""\
name: demo
recipe: {MODELS}/recipes/ties.yaml
perplexity: {{documents: {MODELS}/data/held-out.jsonl, max_increase: 5%}}
publish: {{to: hub, repo: acme/demo}}
variants: [{{format: gguf, types: [Q8_0]}}]
"""


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[LookAlike]:
    """Make the stand-in this process's Hub, with an empty private repository for the demo and one for its variants."""
    with hub(tmp_path / "hub") as stand_in:
        for name in ("acme/demo", "acme/demo-GGUF"):
            stand_in.repositories[name] = Repository(name, private=True)
            stand_in.oidc.publishers.append(PublisherEntry(name))
        use_hub(monkeypatch, stand_in.url, tmp_path)
        monkeypatch.delenv("GITHUB_ACTIONS", raising=False)
        # The client's clock is that of the stand-in, and nothing waits.
        clock = SimpleNamespace(time=stand_in.oidc.now, sleep=lambda seconds: None)
        monkeypatch.setattr(trusted_publisher, "time", clock)
        monkeypatch.setattr("time.sleep", lambda seconds: None)
        trusted_publisher._publisher.cache_clear()
        yield stand_in


@pytest.fixture
def job(server: LookAlike, monkeypatch: pytest.MonkeyPatch) -> LookAlike:
    """Make this process a job of GitHub Actions that may request id tokens."""
    for name, value in job_environment(server.url).items():
        monkeypatch.setenv(name, value)
    return server


def test_every_repository_is_written_with_a_token_of_its_own_and_the_check_says_whose(job: LookAlike) -> None:
    credentials = check_target(DEMO, Path(), ["GGUF"])
    identity = {"kind": "oidc", "name": CLAIMS["sub"], "issuer": GITHUB, "can_write": True, "renewable": True}
    places = ("acme/demo", "acme/demo-GGUF")
    assert [use.model_dump() for use in credentials] == [{"place": place, **identity} for place in places]
    assert credentials[0].summary() == (
        f"publish: acme/demo with the OIDC identity {CLAIMS['sub']} of {GITHUB}, which may write"
    )
    tokens = {hub_access(writing=True, repo=use.place).token for use in credentials}
    assert len(tokens) == 2
    assert job.oidc.exchanges == ["acme/demo", "acme/demo-GGUF"], "operations share the token of a repository"
    assert not any("whoami" in entry.path for entry in job.log)


def test_the_credential_is_the_block_or_the_explicit_identity_or_the_token_or_any_identity(
    job: LookAlike, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", WRITER)
    assert DEMO.check(Path()).summary() == "publish: acme/demo with the token of HF_TOKEN, which may write"
    assert job.oidc.exchanges == []
    monkeypatch.setenv("HF_OIDC_RESOURCE", "alice")  # A user publisher only reads, so the token writes.
    assert DEMO.check(Path()).kind == "token"
    monkeypatch.setenv("HF_OIDC_RESOURCE", "acme/demo")
    assert DEMO.check(Path()).kind == "oidc"
    assert hub_access(writing=False, repo="acme/demo").token == WRITER, "for reading, the token suffices"


@pytest.mark.story
def test_check_and_dry_run_name_the_credential_of_every_repository(
    job: LookAlike, tmp_path: Path, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job.oidc.publishers[1] = PublisherEntry("acme/demo-GGUF", read_only=True)
    (tmp_path / "demo.yaml").write_text(PROFILE)

    def answer(*arguments: str) -> Any:
        return json.loads(CliRunner().invoke(app, [*arguments, str(tmp_path / "demo.yaml"), "--json"]).stdout)

    for command in (["check"], ["run", "--dry-run"]):
        found = answer(*command)
        (use,) = found["credentials"]
        assert (use["place"], use["kind"], use["name"], use["can_write"]) == ("acme/demo", "oidc", CLAIMS["sub"], True)
        refused = [one["found"] for one in found["findings"] if one["where"] == "publish.repo: acme/demo-GGUF"]
        assert len(refused) == 1
        assert "the trusted publisher may not write" in refused[0]
    shown = CliRunner().invoke(app, ["check", str(tmp_path / "demo.yaml")], env={"COLUMNS": "1000"}).output
    assert f"publish: acme/demo with the OIDC identity {CLAIMS['sub']} of {GITHUB}, which may write" in shown
    monkeypatch.delenv("GITHUB_ACTIONS")
    found = answer("check")
    assert (found["status"], found["credentials"]) == ("invalid", [])


class Refusal(NamedTuple):
    """What is wrong in a job, and the refusal that says so."""

    words: list[str]
    kind: type[MergegateError] = Refused
    environment: Mapping[str, str] = {}
    in_job: bool = True  # whether the job is one of GitHub Actions that may request id tokens
    id_token: Callable[[LookAlike], str] | None = None
    change: Callable[[LookAlike], object] = lambda server: None
    fault: Fault | None = None


def remove_repository(server: LookAlike) -> None:
    del server.repositories["acme/demo"]


def publish_from_elsewhere(server: LookAlike) -> None:
    server.repositories["acme/demo"].private = False
    server.oidc.claims["repository"] = "mallory/models"


def failing_exchange(**more: Any) -> Fault:
    return Fault("fail", path="/oauth/token", times=99, **more)


REFUSALS = {
    "no credential": Refusal(
        ["export HF_TOKEN", "publish.token_block", "trusted publisher on"], InvalidInput, in_job=False
    ),
    "permission": Refusal(
        ["id-token: write", "HF_TOKEN", "token_block"], InvalidInput, {"GITHUB_ACTIONS": "true"}, in_job=False
    ),
    "resource": Refusal(
        ["HF_OIDC_RESOURCE: acme/other", "published to acme/demo"], InvalidInput, {"HF_OIDC_RESOURCE": "acme/other"}
    ),
    "identity": Refusal(
        ["no OIDC identity", "HF_OIDC_ID_TOKEN"], InvalidInput, {"HF_OIDC_RESOURCE": "acme/demo"}, in_job=False
    ),
    "expiry": Refusal(
        ["HF_OIDC_ID_TOKEN: the id token expired", "10 min ago", "cannot be renewed"],
        InvalidInput,
        in_job=False,
        id_token=lambda server: server.oidc.issue(server.url, seconds=-600),
    ),
    "form": Refusal(
        ["HF_OIDC_ID_TOKEN: it is not a JSON Web Token"],
        InvalidInput,
        in_job=False,
        id_token=lambda server: "$HF_ID_TOKEN",
    ),
    "audience": Refusal(
        ["400 invalid_grant", "aud=https://gitlab.example", "request the id token with"],
        in_job=False,
        id_token=lambda server: server.oidc.issue("https://gitlab.example"),
    ),
    "claims": Refusal(
        ["repository=mallory/models", "add a trusted publisher", "/acme/demo/settings"], change=publish_from_elsewhere
    ),
    "repository": Refusal(
        ["invalid_grant", "create the repository if it does not exist"],
        change=lambda server: (remove_repository(server), server.oidc.publishers.clear()),
    ),
    "read only": Refusal(
        ["the trusted publisher may not write: 403", "'Read-only'"],
        change=lambda server: server.oidc.publishers.insert(0, PublisherEntry("acme/demo", read_only=True)),
    ),
    "lost repository": Refusal(["the repository does not exist", "cannot create one"], change=remove_repository),
    "busy Hub": Refusal(["503", "run again later"], fault=failing_exchange()),
    "old Hub": Refusal(["does not exchange id tokens: 404", "export HF_TOKEN"], fault=failing_exchange(status=404)),
    "page": Refusal(["not the expected JSON"], fault=failing_exchange(status=200, body="<html>")),
    "connection": Refusal(
        ["check HF_ENDPOINT and the network"],
        environment={"HF_ENDPOINT": "http://127.0.0.1:9"},
        in_job=False,
        id_token=lambda server: server.oidc.issue("http://127.0.0.1:9"),
    ),
    "GitHub": Refusal(
        ["GitHub Actions does not issue it: 403", "run the job again"],
        environment={"ACTIONS_ID_TOKEN_REQUEST_TOKEN": "ghs_of_an_ended_job"},
    ),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_the_check_refuses_what_a_publication_would_fail_on(
    server: LookAlike, monkeypatch: pytest.MonkeyPatch, case: str
) -> None:
    refusal = REFUSALS[case]
    environment = {**(job_environment(server.url) if refusal.in_job else {}), **refusal.environment}
    if refusal.id_token:
        environment["HF_OIDC_ID_TOKEN"] = refusal.id_token(server)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    refusal.change(server)
    server.set_faults([refusal.fault] if refusal.fault else [])
    with pytest.raises(refusal.kind) as caught:
        check_target(DEMO, Path())
    message = str(caught.value)
    assert [word for word in refusal.words if word not in message] == [], message
    assert caught.value.remedy
    assert [secret for secret in [*server.oidc.secrets(), "ghs_of_an_ended_job"] if secret in message] == []
    assert not any("/commit/" in entry.path or "repos/create" in entry.path for entry in server.log)


@pytest.mark.parametrize("status", [401, 404])
def test_a_hub_that_does_not_say_whether_the_publisher_may_write_passes(job: LookAlike, status: int) -> None:
    job.set_faults([Fault("fail", path="/auth-check", status=status)])
    (use,) = check_target(DEMO, Path())
    assert use.can_write is None
    assert "does not confirm" in use.summary()


def test_the_token_is_renewed_before_it_expires(job: LookAlike) -> None:
    access = hub_access(writing=True, repo="acme/demo")
    first = access.token
    job.oidc.offset = 29 * 60
    assert access.token == first
    job.oidc.offset = 31 * 60
    job.set_faults([Fault("fail", path="/oauth/token", times=4)])
    assert access.token == first, "while the Hub exchanges nothing, the present token is still valid"
    job.oidc.offset += 61
    second = access.token
    assert second not in (first, None)
    job.oidc.offset += 3 * 3600
    third = hub_access(writing=True, repo="acme/demo").token
    assert third not in (first, second), "hours may pass between the check and the publication"
    assert len({token.rpartition(".")[0] for token in job.oidc.id_tokens}) == len(job.oidc.id_tokens) >= 3
    assert access.mask(f"{first} {second} {third}") == "*** *** ***"


def test_an_id_token_issued_in_advance_is_used_until_the_hub_token_expires(
    server: LookAlike, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_OIDC_ID_TOKEN", server.oidc.issue(server.url, seconds=2000))
    (use,) = check_target(DEMO, Path())
    assert use.summary().endswith("which may write; it cannot be renewed after its id token expires")
    access = hub_access(writing=True, repo="acme/demo")
    first = access.token
    server.oidc.offset = 1900
    second = access.token
    assert second != first, "the id token can still be exchanged"
    server.oidc.offset = 1900 + 3500
    assert access.token == second
    server.oidc.offset = 1900 + 3700
    with pytest.raises(InvalidInput, match="cannot be renewed"):
        _ = access.token


def publish(tmp_path: Path) -> PublishedCommit:
    (tmp_path / "w").write_bytes(b"\0" * 3000)
    weights = ReleaseFile("model.safetensors", 3000, sha256(b"\0" * 3000).hexdigest(), tmp_path / "w")
    files = (written_file("README.md", "---\nlicense: mit\n---\n# demo\n"), weights)
    request = PublishRequest(files, "demo", "v1", tmp_path, HashMemo(tmp_path / "memo"))
    access = hub_access(writing=True, repo="acme/demo")
    return publish_hub(request, "acme/demo", access, wait=lambda seconds: None)


STEPS = ("/branch/", "/preupload/", "/commit/mergegate", "/commit/main", "/tag/", "batch")


@pytest.mark.parametrize("path", sampled(STEPS, ["/commit/mergegate", "/tag/"]))
def test_a_token_that_expires_at_any_step_of_the_publication_is_replaced(
    job: LookAlike, tmp_path: Path, path: str
) -> None:
    """The Hub revokes the token just after a request, so the next one is denied."""
    revoked: list[str] = []

    def revoke(request: Request) -> None:
        if path in request.path and not revoked:
            revoked.extend(job.oidc.tokens)
            job.oidc.tokens.clear()

    job.after.append(revoke)
    assert publish(tmp_path).new
    repository = job.repositories["acme/demo"]
    assert [commit.title for commit in repository.history()] == ["Release v1", "initial commit"]
    assert repository.tags == {"v1": repository.branches["main"]}
    assert len(revoked) == 1
    assert job.oidc.exchanges == ["acme/demo"] * 2
    assert any(entry.status == 401 for entry in job.log)


def test_a_publication_that_loses_its_only_token_is_refused_and_can_be_completed(
    server: LookAlike, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_OIDC_ID_TOKEN", server.oidc.issue(server.url))

    def expire(request: Request) -> None:
        if "/preupload/" in request.path:
            server.oidc.offset = 2 * 3600

    server.after.append(expire)
    with pytest.raises(MergegateError, match="the id token expired") as caught:
        publish(tmp_path)
    server.after.clear()
    assert [secret for secret in server.oidc.secrets() if secret in str(caught.value)] == []
    monkeypatch.setenv("HF_OIDC_ID_TOKEN", server.oidc.issue(server.url))
    assert publish(tmp_path).new


def test_reading_uses_an_identity_only_for_its_own_resource(job: LookAlike, monkeypatch: pytest.MonkeyPatch) -> None:
    for repository in (Repository("acme/x", True), Repository("meta/g", False, "auto"), Repository("a/b", False)):
        repository.add("main", repository.branches["main"], "files", {"config.json": plain(b"{}")})
        job.repositories[repository.id] = repository
    job.oidc.publishers.append(PublisherEntry("alice"))
    assert hub_access(writing=False, repo="acme/demo").token is None, "no resource is named"
    monkeypatch.setenv("HF_OIDC_RESOURCE", "acme/demo")
    assert hub_access(writing=False, repo="acme/demo").api().model_info("acme/demo").private
    other = hub_access(writing=False, repo="a/b")
    assert (other.token, other.api().model_info("a/b").id) == (None, "a/b")
    monkeypatch.setenv("HF_OIDC_RESOURCE", "alice")
    access = hub_access(writing=False)
    access.api().auth_check("meta/g")
    assert job.oidc.exchanges == ["acme/demo", "alice"]
    monkeypatch.setenv("HF_TOKEN", READER)
    assert hub_access(writing=False).token == READER


def test_no_representation_and_no_log_shows_a_token(
    job: LookAlike, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_DEBUG", True)  # The client then logs requests with their bodies.
    job.oidc.claims["job_workflow_ref"] = "x" * 2000  # The client cuts bodies of this length before it redacts them.
    monkeypatch.setattr(logging.getLogger("huggingface_hub"), "propagate", True)
    with caplog.at_level(logging.DEBUG), caplog.at_level(logging.DEBUG, "huggingface_hub"):
        access = hub_access(writing=True, repo="acme/demo")
        assert access.api().model_info("acme/demo").private
    shown = json.dumps([f"{access} {access!r} {access.publisher!r}", DEMO.check(Path()).model_dump_json(), caplog.text])
    assert "/oauth/token" in shown
    assert "Send: curl" in shown
    heads = [token[:200] for token in job.oidc.id_tokens]
    assert [secret for secret in [*job.oidc.secrets(), *heads] if secret in shown] == []
