"""Test keyless signatures against a sigstore instance on loopback.

Three independent verifiers check every signature: mergegate, OpenSSF's ``model_signing``, and the ``sigstore`` client.
"""

from __future__ import annotations

import base64
import hashlib
import json
import logging
import runpy
import sys
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from threading import Event
from typing import Any

import pytest
import requests
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sigstore_stand_in import GITHUB_ISSUER, SigstoreInstance, sigstore_on_loopback

from mergegate.merge_core.errors import InvalidInput, Refused
from mergegate.tasks.publish.keyless import (
    KeylessSignature,
    Signer,
    SignerPolicy,
    expected_signer,
    read_keyless,
    sign_keyless,
)
from mergegate.tasks.publish.settings import SigstoreSettings

IDENTITY = "https://ci.example.org/acme/models/release"
CI_VARIABLES = (
    *("SIGSTORE_ID_TOKEN", "GITHUB_ACTIONS", "ACTIONS_ID_TOKEN_REQUEST_TOKEN", "ACTIONS_ID_TOKEN_REQUEST_URL"),
    *("GITHUB_WORKFLOW_REF", "GITHUB_SERVER_URL", "GITLAB_CI", "BUILDKITE", "CIRCLECI", "GOOGLE_SERVICE_ACCOUNT_NAME"),
)


@pytest.fixture(scope="module")
def instance() -> Iterator[SigstoreInstance]:
    with sigstore_on_loopback() as running:
        yield running


@pytest.fixture(scope="module")
def trust(instance: SigstoreInstance, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return instance.write_trust_config(tmp_path_factory.mktemp("trust"))


@pytest.fixture(autouse=True)
def no_ci(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in CI_VARIABLES:
        monkeypatch.delenv(variable, raising=False)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """Return a directory whose file names sort differently as text and as paths."""
    place = tmp_path / "model"
    for name in ("a/z.safetensors", "a b/x.json", "a.txt", "ä.md", ".eval_results/gsm8k.yaml"):
        (place / name).parent.mkdir(parents=True, exist_ok=True)
        (place / name).write_text(name)
    return place


def hashes(model: Path) -> dict[str, str]:
    return {
        path.relative_to(model).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in model.rglob("*")
        if path.is_file() and path.name != "model.sigstore.json"
    }


def sign_as(token: str, trust: Path, files: dict[str, str]) -> bytes:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SIGSTORE_ID_TOKEN", token)
        return sign_keyless("demo", files, SigstoreSettings(trust_config=trust), Path("/"))


@pytest.fixture(scope="module")
def bundle(instance: SigstoreInstance, trust: Path) -> bytes:
    return sign_as(instance.token(IDENTITY), trust, {"model.safetensors": "0" * 64})


def problem_of(bundle: bytes, policy: SignerPolicy) -> str:
    """Return why a signature is refused. Empty: it is valid."""
    try:
        read_keyless(bundle).require_signer(policy)
    except ValueError as error:
        return str(error)
    return ""


def run_upstream(command: str, *arguments: str | Path) -> int:
    """Run ``python -m COMMAND`` in this process, because its imports take several seconds. Return the exit code."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", [command, *map(str, arguments)])
        try:
            runpy.run_module(command, run_name="__main__", alter_sys=False)
        except SystemExit as end:
            return int(end.code or 0)
    return 0


def test_upstream_commands_and_mergegate_accept_each_others_signatures(
    instance: SigstoreInstance, trust: Path, model: Path
) -> None:
    signature = model / "model.sigstore.json"
    signature.write_bytes(sign_as(instance.token(IDENTITY), trust, hashes(model)))
    where = (model, "--signature", signature, "--trust_config", trust)
    signer = ("--identity", IDENTITY, "--identity_provider", instance.issuer)
    assert run_upstream("model_signing", "verify", "sigstore", *where, *signer) == 0

    statement = json.loads(base64.b64decode(json.loads(signature.read_bytes())["dsseEnvelope"]["payload"]))
    subject = f"sha256:{statement['subject'][0]['digest']['sha256']}"
    expected = ("--bundle", signature, "--cert-identity", IDENTITY, "--cert-oidc-issuer", instance.issuer)
    assert run_upstream("sigstore", "--trust-config", trust, "verify", "identity", *expected, subject) == 0

    (model / "a.txt").write_text("other")
    assert run_upstream("model_signing", "verify", "sigstore", *where, *signer) != 0

    policy = SignerPolicy(Signer(IDENTITY, instance.issuer), trust)
    signing = ("--identity_token", instance.token(IDENTITY), "--trust_config", trust)
    assert run_upstream("model_signing", "sign", "sigstore", model, "--signature", signature, *signing) == 0
    upstream = read_keyless(signature.read_bytes())
    assert upstream.files == hashes(model)
    upstream.require_signer(policy)


def test_the_signature_has_the_statement_of_a_signature_with_a_key(key_file: Path, bundle: bytes) -> None:
    from mergegate.tasks.publish.signature import sign

    with_key = json.loads(sign("demo", {"model.safetensors": "0" * 64}, key_file))
    texts = [base64.b64decode(each["dsseEnvelope"]["payload"]) for each in (with_key, json.loads(bundle))]
    first, second = map(json.loads, texts)
    ignored = [each["predicate"]["serialization"].pop("ignore_paths") for each in (first, second)]
    assert first == second
    assert set(ignored[0]) - set(ignored[1]) == {"model.sig"}  # a keyless signature is last, and covers model.sig


@pytest.fixture
def key_file(tmp_path: Path) -> Path:
    from signing_keys import write_keys

    return write_keys(tmp_path)[0]


def test_verification_makes_no_request(
    instance: SigstoreInstance, trust: Path, bundle: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("a request")

    monkeypatch.setattr(requests.Session, "request", refuse)
    monkeypatch.setattr("socket.socket.connect", refuse)
    before = len(instance.requests)
    assert problem_of(bundle, SignerPolicy(Signer(IDENTITY, instance.issuer), trust)) == ""
    assert len(instance.requests) == before


@pytest.mark.parametrize("case", ["identity", "issuer", "prefix", "instance", "offline public instance"])
def test_another_signer_or_instance_is_refused_with_what_was_found_and_expected(
    case: str, instance: SigstoreInstance, trust: Path, bundle: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    signer = Signer(IDENTITY, instance.issuer)
    other = SigstoreInstance("http://127.0.0.1:1").write_trust_config(tmp_path / "other")
    policy, expected = {
        "identity": (SignerPolicy(Signer("mallory@example.org", instance.issuer), trust), "expected mallory@example"),
        "issuer": (SignerPolicy(Signer(IDENTITY, "https://accounts.google.com"), trust), "expected " + IDENTITY),
        "prefix": (SignerPolicy(Signer(IDENTITY[:-1], instance.issuer), trust), "expected " + IDENTITY[:-1] + " ("),
        "instance": (SignerPolicy(signer, other), f"authority of {other}"),
        "offline public instance": (SignerPolicy(signer, offline=True), "authority of the public instance of sigstore"),
    }[case]
    found = problem_of(bundle, policy)
    assert expected in found
    assert (f"signed by {signer}" if case in ("identity", "issuer", "prefix") else "issued by CN=stand-in") in found


def with_change(bundle: bytes, change: Callable[[dict[str, Any]], object]) -> bytes:
    content = json.loads(bundle)
    change(content)
    return json.dumps(content).encode()


def test_a_signature_that_no_log_recorded_is_refused(instance: SigstoreInstance, trust: Path, bundle: bytes) -> None:
    policy = SignerPolicy(Signer(IDENTITY, instance.issuer), trust)
    unlogged = with_change(bundle, lambda content: content["verificationMaterial"].update(tlogEntries=[]))
    assert problem_of(unlogged, policy).startswith("it has no entries of a transparency log; expected one")
    other = json.loads(sign_as(instance.token(IDENTITY), trust, {"other": "1" * 64}))
    entries = other["verificationMaterial"]["tlogEntries"]
    foreign = with_change(bundle, lambda content: content["verificationMaterial"].update(tlogEntries=entries))
    assert "the transparency log does not confirm it" in problem_of(foreign, policy)


def test_a_certificate_that_had_expired_when_the_log_recorded_the_signature_is_refused(
    instance: SigstoreInstance, trust: Path, bundle: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(instance, "log_delay", timedelta(minutes=11))
    with pytest.raises(Refused, match=r"recorded the signature at .*; expected a time at which its cert"):
        sign_as(instance.token(IDENTITY), trust, {"a": "0" * 64})
    monkeypatch.setattr(KeylessSignature, "require_valid", lambda *_: None)
    late = sign_as(instance.token(IDENTITY), trust, {"a": "0" * 64})
    monkeypatch.undo()
    assert "the transparency log recorded" in problem_of(late, SignerPolicy(Signer(IDENTITY, instance.issuer), trust))


def leaves(value: Any, path: tuple[str | int, ...] = ()) -> Iterator[tuple[str | int, ...]]:
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for name, child in items:
        if isinstance(child, (dict, list)) and child:
            yield from leaves(child, (*path, name))
        else:
            yield (*path, name)


@given(data=st.data())
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=150, deadline=None)
def test_no_field_of_a_bundle_can_be_changed_removed_or_added(
    instance: SigstoreInstance, trust: Path, bundle: bytes, data: st.DataObject
) -> None:
    policy = SignerPolicy(Signer(IDENTITY, instance.issuer), trust)
    content = json.loads(bundle)
    path = data.draw(st.sampled_from(list(leaves(content))))
    parent = content
    for step in path[:-1]:
        parent = parent[step]
    name, value = path[-1], parent[path[-1]]
    kind = data.draw(st.sampled_from(["change", "remove", "add"]))
    if kind == "remove" and value != []:  # an absent list and an empty one are the same
        del parent[name]
    elif kind == "add" and isinstance(parent, dict):
        parent[data.draw(st.sampled_from(["keyid", "more", "publicKey", "integratedTime "]))] = "x"
    elif isinstance(value, str):
        place = data.draw(st.integers(0, len(value) - 1))
        replacement = data.draw(st.sampled_from([each for each in "A1+= " if each != value[place]]))
        parent[name] = value[:place] + replacement + value[place + 1 :]
    else:
        parent[name] = [{}]
    assert problem_of(json.dumps(content).encode(), policy)


@pytest.mark.story
def test_no_bit_of_a_bundle_can_be_changed_unnoticed(instance: SigstoreInstance, trust: Path, bundle: bytes) -> None:
    policy = SignerPolicy(Signer(IDENTITY, instance.issuer), trust)
    assert problem_of(bundle, policy) == ""
    for place in range(len(bundle) - 1):  # the last byte is a newline, which may be any white space
        damaged = bytearray(bundle)
        damaged[place] ^= (1, 4)[place % 2]
        assert problem_of(bytes(damaged), policy), (place, bundle[place - 20 : place + 20])


@given(st.binary(max_size=200) | st.from_regex(rb'\{"(mediaType|verificationMaterial|dsseEnvelope)": .{0,20}\}'))
def test_garbage_is_not_a_signature(garbage: bytes) -> None:
    with pytest.raises(ValueError, match="not a keyless signature"):
        read_keyless(garbage)


class TestIdentity:
    """Which identity signs, and what happens without one."""

    def expect(self, trust: Path | None) -> str:
        return expected_signer(SigstoreSettings(trust_config=trust), Path("/"))

    def test_a_job_of_github_signs_as_its_workflow(
        self, instance: SigstoreInstance, trust: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("GITHUB_ACTIONS", "true")
        with pytest.raises(InvalidInput, match="id-token: write"):
            self.expect(trust)
        monkeypatch.setenv("ACTIONS_ID_TOKEN_REQUEST_TOKEN", "request-secret")
        monkeypatch.setenv("ACTIONS_ID_TOKEN_REQUEST_URL", f"{instance.url}/github/token")
        monkeypatch.setenv("GITHUB_WORKFLOW_REF", "acme/models/.github/workflows/release.yml@refs/heads/main")
        before = len(instance.requests)
        told = self.expect(trust)
        assert len(instance.requests) == before
        signature = read_keyless(sign_keyless("demo", {}, SigstoreSettings(trust_config=trust), Path("/")))
        assert told.startswith(f"{signature.signer}, unless")
        assert signature.signer.issuer == GITHUB_ISSUER

    def test_a_job_of_gitlab_signs_with_its_token(
        self, instance: SigstoreInstance, trust: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("GITLAB_CI", "true")
        with pytest.raises(InvalidInput, match="GitLab CI without SIGSTORE_ID_TOKEN"):
            self.expect(trust)
        uri = "gitlab.com/acme/models//.gitlab-ci.yml@refs/heads/main"
        monkeypatch.setenv("SIGSTORE_ID_TOKEN", instance.token("project_path:acme/models", ci_config_ref_uri=uri))
        assert self.expect(trust).startswith(f"https://{uri} (issuer {instance.issuer}), by the token in SIGSTORE_ID")

    def test_a_user_at_a_terminal_logs_in_with_a_browser(
        self, instance: SigstoreInstance, trust: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def log_in(address: str) -> bool:
            requests.get(requests.get(address, timeout=10).url, timeout=10)
            return True

        monkeypatch.setattr("mergegate.tasks.publish.keyless._has_user", lambda: True)
        monkeypatch.setattr("webbrowser.open", log_in)
        assert self.expect(trust) == "the user who logs in with a browser"
        names, before = ("demo", "demo-GGUF", "demo-FP8"), instance.requests.count("GET /oidc/auth")
        settings = SigstoreSettings(trust_config=trust)
        bundles = [sign_keyless(name, {name: "0" * 64}, settings, Path("/")) for name in names]
        for name, bundle in zip(names, bundles, strict=True):
            assert read_keyless(bundle).files == {name: "0" * 64}
            assert not problem_of(bundle, SignerPolicy(Signer("alice@example.org", instance.issuer), trust))
        assert instance.requests.count("GET /oidc/auth") == before + 1  # one login for a release and its variants
        monkeypatch.setattr("mergegate.tasks.publish.keyless._SIGNING_TIME", timedelta(minutes=10))
        for _ in range(2):  # The certificate is valid for 10 minutes, so it is too old for another signature.
            sign_keyless("demo", {}, settings, Path("/"))
        assert instance.requests.count("GET /oidc/auth") == before + 2
        signature = sign_as(instance.token(IDENTITY), trust, {})
        assert read_keyless(signature).signer.identity == IDENTITY  # a token takes precedence over the login

    def test_without_an_identity_the_error_says_what_to_set(self, trust: Path) -> None:
        for attempt in (self.expect, lambda trust: sign_as("", trust, {})):
            with pytest.raises(InvalidInput, match="no terminal") as refused:
                attempt(trust)
            assert "export SIGSTORE_ID_TOKEN" in refused.value.remedy

    @pytest.mark.parametrize("claims", [{"exp": 1}, {"aud": "other"}])
    def test_a_token_for_another_time_or_audience_is_refused_without_showing_it(
        self, claims: dict[str, object], instance: SigstoreInstance, trust: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        token = instance.token(IDENTITY, **claims)
        monkeypatch.setenv("SIGSTORE_ID_TOKEN", token)
        with pytest.raises(InvalidInput, match="audience sigstore") as refused:
            self.expect(trust)
        assert token not in str(refused.value)

    @pytest.mark.parametrize("content", ["", "{}", "[]", '{"mediaType": "x"}', '{"trustedRoot": {}}'])
    def test_an_invalid_trust_configuration_is_reported_with_its_file(self, content: str, tmp_path: Path) -> None:
        (tmp_path / "trust.json").write_text(content)
        with pytest.raises(InvalidInput, match=r"publish\.sign\.trust_config: .*trust\.json: not a trust"):
            self.expect(tmp_path / "trust.json")

    def test_a_missing_library_is_reported_with_its_extra(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("mergegate.tasks.publish.keyless.find_spec", lambda _: None)
        with pytest.raises(InvalidInput, match=r"mergegate\[sigstore\]"):
            self.expect(None)


@pytest.mark.parametrize("service", ["/api/v2/signingCert", "/api/v1/log"])
def test_a_service_that_never_answers_is_an_error(
    service: str, instance: SigstoreInstance, trust: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mergegate.tasks.publish.keyless._SIGNING_TIME", timedelta(seconds=0.3))
    monkeypatch.setattr(instance, "silence", service)
    monkeypatch.setattr(instance, "answers", Event())
    try:
        with pytest.raises(Refused, match=r"sigstore did not sign the release: no answer within 0\.3 s"):
            sign_as(instance.token(IDENTITY), trust, {})
    finally:
        instance.answers.set()


@pytest.mark.parametrize("service", ["/api/v2/signingCert", "/api/v1/log", "token"])
def test_no_failure_shows_the_identity_token(
    service: str,
    instance: SigstoreInstance,
    trust: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    caplog.set_level(logging.DEBUG)
    token = instance.token(IDENTITY)
    if service == "token":
        token = token[:-4] + "AAAA"  # the authority answers with the token
    else:
        monkeypatch.setattr(instance, "outage", service)
    with pytest.raises(Refused, match="sigstore did not sign the release") as refused:
        sign_as(token, trust, {})
    assert token not in str(refused.value) + caplog.text
