"""Test keyless signatures against a sigstore instance on loopback."""

from __future__ import annotations

import base64
import json
import logging
import runpy
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import requests
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from loopback import Fault
from signing_keys import hashes, write_keys, write_model
from sigstore_stand_in import GITHUB_ISSUER, SigstoreInstance, sigstore_on_loopback

from mergegate.merge_core.errors import InvalidInput, Refused
from mergegate.tasks.release.publish import signing as keyless
from mergegate.tasks.release.publish.settings import SigstoreSettings

IDENTITY = "https://ci.example.org/acme/models/release"
CI_VARIABLES = (
    *("SIGSTORE_ID_TOKEN", "GITHUB_ACTIONS", "ACTIONS_ID_TOKEN_REQUEST_TOKEN", "ACTIONS_ID_TOKEN_REQUEST_URL"),
    *("GITHUB_WORKFLOW_REF", "GITHUB_SERVER_URL", "GITLAB_CI", "BUILDKITE", "CIRCLECI", "GOOGLE_SERVICE_ACCOUNT_NAME"),
)


@dataclass(frozen=True)
class Signing:
    """A sigstore instance, its trust configuration, and a signature by it."""

    instance: SigstoreInstance
    trust: Path
    bundle: bytes = b""

    @property
    def issuer(self) -> str:
        return self.instance.issuer

    @property
    def settings(self) -> SigstoreSettings:
        return SigstoreSettings(trust_config=self.trust)

    @property
    def policy(self) -> keyless.SignerPolicy:
        return self.policy_for(IDENTITY)

    def policy_for(self, identity: str) -> keyless.SignerPolicy:
        return keyless.SignerPolicy(keyless.Signer(identity, self.issuer), self.trust)

    def sign(self, files: dict[str, str], token: str | None = None) -> bytes:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("SIGSTORE_ID_TOKEN", self.instance.token(IDENTITY) if token is None else token)
            return keyless.sign_keyless("demo", files, self.settings, Path("/"))

    def changed(self, change: Callable[[dict[str, Any]], object]) -> bytes:
        """Return the signature after a change of its content."""
        content = json.loads(self.bundle)
        change(content)
        return json.dumps(content).encode()


@pytest.fixture(scope="module")
def signing(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Signing]:
    with sigstore_on_loopback() as instance:
        unsigned = Signing(instance, instance.write_trust_config(tmp_path_factory.mktemp("trust")))
        yield replace(unsigned, bundle=unsigned.sign({"model.safetensors": "0" * 64}))


@pytest.fixture(autouse=True)
def no_ci_and_no_faults(signing: Signing, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for variable in CI_VARIABLES:
        monkeypatch.delenv(variable, raising=False)
    yield
    signing.instance.set_faults([])


def problem_of(bundle: bytes, policy: keyless.SignerPolicy) -> str:
    """Return why a signature is refused. Empty: it is valid."""
    try:
        keyless.read_keyless(bundle).require_signer(policy)
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


@pytest.mark.story
def test_upstream_commands_and_mergegate_accept_each_others_signatures(signing: Signing, tmp_path: Path) -> None:
    model = write_model(tmp_path / "model")
    signature = model / "model.sigstore.json"
    signature.write_bytes(signing.sign(hashes(model)))
    where = (model, "--signature", signature, "--trust_config", signing.trust)
    signer = ("--identity", IDENTITY, "--identity_provider", signing.issuer)
    assert run_upstream("model_signing", "verify", "sigstore", *where, *signer) == 0

    statement = json.loads(base64.b64decode(json.loads(signature.read_bytes())["dsseEnvelope"]["payload"]))
    subject = f"sha256:{statement['subject'][0]['digest']['sha256']}"
    expected = ("--bundle", signature, "--cert-identity", IDENTITY, "--cert-oidc-issuer", signing.issuer)
    assert run_upstream("sigstore", "--trust-config", signing.trust, "verify", "identity", *expected, subject) == 0

    (model / "a.txt").write_text("other")
    assert run_upstream("model_signing", "verify", "sigstore", *where, *signer) != 0

    identity = ("--identity_token", signing.instance.token(IDENTITY), "--trust_config", signing.trust)
    assert run_upstream("model_signing", "sign", "sigstore", model, "--signature", signature, *identity) == 0
    upstream = keyless.read_keyless(signature.read_bytes())
    assert upstream.files == hashes(model)
    upstream.require_signer(signing.policy)


def test_the_signature_has_the_statement_of_a_signature_with_a_key(signing: Signing, tmp_path: Path) -> None:
    with_key = json.loads(keyless.sign("demo", {"model.safetensors": "0" * 64}, write_keys(tmp_path)[0]))
    texts = [base64.b64decode(each["dsseEnvelope"]["payload"]) for each in (with_key, json.loads(signing.bundle))]
    first, second = map(json.loads, texts)
    ignored = [each["predicate"]["serialization"].pop("ignore_paths") for each in (first, second)]
    assert first == second
    assert set(ignored[0]) - set(ignored[1]) == {"model.sig"}  # a keyless signature is last, and covers model.sig


def test_verification_makes_no_request(signing: Signing, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("a request")

    monkeypatch.setattr(requests.Session, "request", refuse)
    monkeypatch.setattr("socket.socket.connect", refuse)
    assert problem_of(signing.bundle, signing.policy) == ""


@pytest.mark.parametrize("case", ["identity", "issuer", "prefix", "instance", "offline public instance"])
def test_another_signer_or_instance_is_refused_with_what_was_found_and_expected(
    case: str, signing: Signing, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    signer = keyless.Signer(IDENTITY, signing.issuer)
    with sigstore_on_loopback() as another:
        other = another.write_trust_config(tmp_path / "other")
    google = keyless.SignerPolicy(keyless.Signer(IDENTITY, "https://accounts.google.com"), signing.trust)
    policy, expected = {
        "identity": (signing.policy_for("mallory@example.org"), "expected mallory@example"),
        "issuer": (google, "expected " + IDENTITY),
        "prefix": (signing.policy_for(IDENTITY[:-1]), "expected " + IDENTITY[:-1] + " ("),
        "instance": (keyless.SignerPolicy(signer, other), f"authority of {other}"),
        "offline public instance": (
            keyless.SignerPolicy(signer, offline=True),
            "authority of the public instance of sigstore",
        ),
    }[case]
    found = problem_of(signing.bundle, policy)
    assert expected in found
    assert (f"signed by {signer}" if case in ("identity", "issuer", "prefix") else "issued by CN=stand-in") in found


def test_a_signature_that_no_log_recorded_is_refused(signing: Signing) -> None:
    unlogged = signing.changed(lambda content: content["verificationMaterial"].update(tlogEntries=[]))
    found = problem_of(unlogged, signing.policy)
    assert found.startswith("it has no entries of a transparency log; expected one")
    entries = json.loads(signing.sign({"other": "1" * 64}))["verificationMaterial"]["tlogEntries"]
    foreign = signing.changed(lambda content: content["verificationMaterial"].update(tlogEntries=entries))
    assert "the transparency log does not confirm it" in problem_of(foreign, signing.policy)


def test_a_certificate_that_had_expired_when_the_log_recorded_the_signature_is_refused(
    signing: Signing, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(signing.instance, "log_delay", timedelta(minutes=11))
    with pytest.raises(Refused, match=r"recorded the signature at .*; expected a time at which its cert"):
        signing.sign({"a": "0" * 64})
    monkeypatch.setattr(keyless.KeylessSignature, "require_valid", lambda *_: None)
    late = signing.sign({"a": "0" * 64})
    monkeypatch.undo()
    assert "the transparency log recorded" in problem_of(late, signing.policy)


def leaves(value: Any, path: tuple[str | int, ...] = ()) -> Iterator[tuple[str | int, ...]]:
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for name, child in items:
        if isinstance(child, (dict, list)) and child:
            yield from leaves(child, (*path, name))
        else:
            yield (*path, name)


@given(data=st.data())
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=60)
def test_no_field_of_a_bundle_can_be_changed_removed_or_added(signing: Signing, data: st.DataObject) -> None:
    content = json.loads(signing.bundle)
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
    assert problem_of(json.dumps(content).encode(), signing.policy)


@settings(max_examples=40)
@given(st.binary(max_size=200) | st.from_regex(rb'\{"(mediaType|verificationMaterial|dsseEnvelope)": .{0,20}\}'))
def test_garbage_is_not_a_signature(garbage: bytes) -> None:
    with pytest.raises(ValueError, match="not a keyless signature"):
        keyless.read_keyless(garbage)


def expect(trust: Path | None) -> str:
    """Return which identity will sign."""
    return keyless.expected_signer(SigstoreSettings(trust_config=trust), Path("/"))


def test_a_job_of_github_signs_as_its_workflow(signing: Signing, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GITHUB_ACTIONS", "true")
    with pytest.raises(InvalidInput, match="id-token: write"):
        expect(signing.trust)
    monkeypatch.setenv("ACTIONS_ID_TOKEN_REQUEST_TOKEN", "request-secret")
    monkeypatch.setenv("ACTIONS_ID_TOKEN_REQUEST_URL", f"{signing.instance.url}/github/token")
    monkeypatch.setenv("GITHUB_WORKFLOW_REF", "acme/models/.github/workflows/release.yml@refs/heads/main")
    signing.instance.begin()
    told = expect(signing.trust)
    assert signing.instance.requests == []
    signature = keyless.read_keyless(keyless.sign_keyless("demo", {}, signing.settings, Path("/")))
    assert told.startswith(f"{signature.signer}, unless")
    assert signature.signer.issuer == GITHUB_ISSUER


def test_a_job_of_gitlab_signs_with_its_token(signing: Signing, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GITLAB_CI", "true")
    with pytest.raises(InvalidInput, match="GitLab CI without SIGSTORE_ID_TOKEN"):
        expect(signing.trust)
    uri = "gitlab.com/acme/models//.gitlab-ci.yml@refs/heads/main"
    token = signing.instance.token("project_path:acme/models", ci_config_ref_uri=uri)
    monkeypatch.setenv("SIGSTORE_ID_TOKEN", token)
    assert expect(signing.trust).startswith(f"https://{uri} (issuer {signing.issuer}), by the token in SIGSTORE_ID")


@pytest.mark.story
def test_a_user_at_a_terminal_logs_in_with_a_browser(signing: Signing, monkeypatch: pytest.MonkeyPatch) -> None:
    def log_in(address: str) -> bool:
        requests.get(requests.get(address, timeout=10).url, timeout=10)
        return True

    def logins() -> int:
        return signing.instance.requests.count("GET /oidc/auth")

    monkeypatch.setattr("mergegate.tasks.release.publish.signing._has_user", lambda: True)
    monkeypatch.setattr("webbrowser.open", log_in)
    assert expect(signing.trust) == "the user who logs in with a browser"
    signing.instance.begin()
    names = ("demo", "demo-GGUF", "demo-FP8")
    bundles = [keyless.sign_keyless(name, {name: "0" * 64}, signing.settings, Path("/")) for name in names]
    for name, bundle in zip(names, bundles, strict=True):
        assert keyless.read_keyless(bundle).files == {name: "0" * 64}
        assert not problem_of(bundle, signing.policy_for("alice@example.org"))
    assert logins() == 1  # one login for a release and its variants
    monkeypatch.setattr("mergegate.tasks.release.publish.signing._SIGNING_TIME", timedelta(minutes=10))
    for _ in range(2):  # The certificate is valid for 10 minutes, so it is too old for another signature.
        keyless.sign_keyless("demo", {}, signing.settings, Path("/"))
    assert logins() == 2
    # A token takes precedence over the login.
    assert keyless.read_keyless(signing.sign({})).signer.identity == IDENTITY


def test_without_an_identity_the_error_says_what_to_set(signing: Signing) -> None:
    for attempt in (lambda: expect(signing.trust), lambda: signing.sign({}, "")):
        with pytest.raises(InvalidInput, match="no terminal") as refused:
            attempt()
        assert "export SIGSTORE_ID_TOKEN" in refused.value.remedy


@pytest.mark.parametrize("claims", [{"exp": 1}, {"aud": "other"}])
def test_a_token_for_another_time_or_audience_is_refused_without_showing_it(
    claims: dict[str, object], signing: Signing, monkeypatch: pytest.MonkeyPatch
) -> None:
    token = signing.instance.token(IDENTITY, **claims)
    monkeypatch.setenv("SIGSTORE_ID_TOKEN", token)
    with pytest.raises(InvalidInput, match="audience sigstore") as refused:
        expect(signing.trust)
    assert token not in str(refused.value)


@pytest.mark.parametrize("content", ["", "{}", "[]", '{"mediaType": "x"}', '{"trustedRoot": {}}'])
def test_an_invalid_trust_configuration_is_reported_with_its_file(content: str, tmp_path: Path) -> None:
    (tmp_path / "trust.json").write_text(content)
    with pytest.raises(InvalidInput, match=r"publish\.sign\.trust_config: .*trust\.json: not a trust"):
        expect(tmp_path / "trust.json")


def test_a_missing_library_is_reported_with_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mergegate.tasks.release.publish.signing.find_spec", lambda _: None)
    with pytest.raises(InvalidInput, match=r"mergegate\[sigstore\]"):
        expect(None)


@pytest.mark.parametrize("service", ["/api/v2/signingCert", "/api/v1/log"])
def test_a_service_that_never_answers_is_an_error(
    service: str, signing: Signing, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mergegate.tasks.release.publish.signing._SIGNING_TIME", timedelta(seconds=0.3))
    signing.instance.set_faults([Fault("silence", path=service, times=99)])
    with pytest.raises(Refused, match=r"sigstore did not sign the release: no answer within 0\.3 s"):
        signing.sign({})


@pytest.mark.parametrize("service", ["/api/v2/signingCert", "/api/v1/log", "token"])
def test_no_failure_shows_the_identity_token(service: str, signing: Signing, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    token = signing.instance.token(IDENTITY)
    if service == "token":
        token = token[:-4] + "AAAA"  # the authority answers with the token
    else:
        signing.instance.set_faults([Fault("fail", path=service, times=99)])
    with pytest.raises(Refused, match="sigstore did not sign the release") as refused:
        signing.sign({}, token)
    assert token not in str(refused.value) + caplog.text
