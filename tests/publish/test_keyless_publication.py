"""Test keyless signatures at every target: one signing for each release, although every signing gives other bytes."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from bucket import S3OnLoopback, s3_on_loopback
from hub_look_alike import WRITER, hub, use_hub
from pydantic import TypeAdapter
from release_samples import Publishable, publishable, variant_parts
from shelf_target import ShelfTarget
from signing_keys import write_keys
from sigstore_stand_in import SigstoreInstance, sigstore_on_loopback
from small_mlflow import small_mlflow
from small_registry import small_registry

from mergegate.merge_core.errors import Refused
from mergegate.tasks.release.publish import describe_merge, pending_release, publish
from mergegate.tasks.release.publish.releases import VerifiedRelease, check_release
from mergegate.tasks.release.publish.signing import Signer, SignerPolicy
from mergegate.tasks.release.publish.targets import PublishTarget, Release, Target, find_release
from mergegate.tasks.release.publish.targets.directory import DirectoryRelease, DirectoryTarget

IDENTITY = "https://ci.example.org/acme/models/release"
REMOTE = [pytest.param(kind, marks=pytest.mark.story) for kind in ("hub", "s3", "oci")]
OTHERS = [pytest.param(kind, marks=pytest.mark.proof) for kind in ("directory", "mlflow", "shelf")]


@pytest.fixture(scope="module")
def s3() -> Iterator[S3OnLoopback]:
    with s3_on_loopback() as server:
        yield server


@dataclass(frozen=True)
class Signed:
    """A target that signs with a sigstore instance, whose trust configuration is in ``root``."""

    target: PublishTarget
    instance: SigstoreInstance
    root: Path

    def publish(self, release: Publishable, **settings: object) -> Release:
        return release.publish(self.target.model_copy(update=settings), self.root)

    def signer(self, identity: str = IDENTITY) -> SignerPolicy:
        return SignerPolicy(Signer(identity, self.instance.issuer), self.root / "trust.json")

    def verify(self, version: str, identity: str = IDENTITY) -> VerifiedRelease:
        if isinstance(self.target, DirectoryTarget):
            release: Any = DirectoryRelease(self.root / self.target.path / version)
        else:
            find = ShelfTarget.open if isinstance(self.target, ShelfTarget) else find_release
            release = find(self.target.reference_to(version))
        return check_release(release, signer=self.signer(identity))

    def signature(self, version: str) -> bytes | None:
        return self.target.published_file(self.root, version, "model.sigstore.json")


@pytest.fixture
def signed(
    request: pytest.FixtureRequest, tmp_path: Path, home: Path, prefect_api: None, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Signed]:
    """Yield an empty target of a kind, also one of another package, that signs with an instance."""
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    with sigstore_on_loopback() as instance, ExitStack() as servers:
        instance.write_trust_config(tmp_path)
        monkeypatch.setenv("SIGSTORE_ID_TOKEN", instance.token(IDENTITY))
        kind = getattr(request, "param", "directory")
        settings: dict[str, object] = {"path": "releases/demo"}
        if kind == "hub":
            stand_in = servers.enter_context(hub(tmp_path / "hub"))
            use_hub(monkeypatch, stand_in.url, tmp_path, WRITER)
            settings = {"to": "hub", "repo": "acme/demo"}
        elif kind == "s3":
            s3: S3OnLoopback = request.getfixturevalue("s3")
            s3.empty()
            servers.enter_context(s3.found_by_clients(monkeypatch))
            settings = {"to": "s3", "url": "s3://models/acme/demo"}
        elif kind == "shelf":
            monkeypatch.chdir(tmp_path)
            settings = {"to": "shelf", "place": "library"}
        elif kind in ("oci", "mlflow"):
            registry = servers.enter_context(small_registry())
            settings = {"to": "oci", "repository": f"{registry.url.removeprefix('http://')}/acme/demo"}
        if kind == "mlflow":
            mlflow = servers.enter_context(small_mlflow())
            settings = {"to": "mlflow", "model": "demo", "storage": settings, "tracking_uri": mlflow.url}
        validate = ShelfTarget.model_validate if kind == "shelf" else TypeAdapter(Target).validate_python
        yield Signed(validate({**settings, "sign": {"trust_config": "trust.json"}}), instance, tmp_path)


@pytest.fixture
def one(tmp_path: Path) -> Publishable:
    return publishable(tmp_path / "one")


@pytest.mark.story
@pytest.mark.parametrize("signed", [*REMOTE, *OTHERS], indirect=True)
def test_a_release_is_signed_once_however_often_and_wherever_it_is_published(
    signed: Signed, tmp_path: Path, home: Path, one: Publishable
) -> None:
    target, instance, two = signed.target, signed.instance, publishable(tmp_path / "two", weights=b"others")
    assert signed.signature("v1") is None
    before = pending_release(target, tmp_path, one.parts)
    first = signed.publish(one)
    assert (first.version, first.new, instance.signings) == (before.version, True, 1)
    assert not list(home.glob("signatures/*"))
    after = pending_release(target, tmp_path, one.parts)
    assert (after.version, after.digest, after.is_current) == (before.version, before.digest, True)
    current = target.current_release(tmp_path)
    assert current is not None
    assert current.name == before.version or target.current_head(tmp_path) == current.head

    original = signed.signature(first.version)
    assert original is not None
    assert not signed.publish(one).new
    shutil.rmtree(home)  # another machine publishes the same files
    assert not signed.publish(one).new
    later = signed.publish(two)
    assert (later.new, instance.signings) == (True, 2)
    if not isinstance(target, ShelfTarget):
        assert signed.publish(one).new, "it is current again"
    assert (signed.signature(first.version), instance.signings) == (original, 2)

    for version in (first.version, later.version):
        verified = signed.verify(version)
        assert verified.keyless is not None
        assert (verified.signed, verified.keyless.status, verified.version) == ("none", "valid", version)
    with pytest.raises(Refused, match=f"signed by {IDENTITY} .*; expected mallory"):
        signed.verify(first.version, "mallory@example.org")


@pytest.mark.story
@pytest.mark.parametrize("signed", ["directory", *REMOTE], indirect=True)
def test_an_interrupted_publication_uses_its_signature_again(
    signed: Signed, home: Path, one: Publishable, monkeypatch: pytest.MonkeyPatch
) -> None:
    def die(*_: object) -> None:
        raise Refused("target", found="no answer")

    with monkeypatch.context() as patch:
        patch.setattr(type(signed.target), "publish", die)
        with pytest.raises(Refused, match="no answer"):
            signed.publish(one, version="v1")
    (pending,) = home.glob("signatures/*")
    original = pending.read_bytes()
    done = signed.publish(one, version="v1")
    assert done.new
    assert (signed.signature(done.version), signed.instance.signings) == (original, 1)
    signed.verify(done.version)


@pytest.mark.story
@pytest.mark.parametrize("signed", ["directory", *REMOTE], indirect=True)
def test_of_two_publishers_at_once_the_second_takes_over_the_signature_of_the_first(
    signed: Signed, home: Path, one: Publishable, monkeypatch: pytest.MonkeyPatch
) -> None:
    kind = type(signed.target)
    real = kind.publish
    calls: list[Any] = []

    def overtaken(self: PublishTarget, request: Any) -> Any:
        calls.append(request)
        if len(calls) == 1:
            shutil.rmtree(home)
            signed.publish(one)
        return real(self, request)

    monkeypatch.setattr(kind, "publish", overtaken)
    signed.publish(one)
    assert signed.instance.signings == 2
    assert len({request.files[-1].sha256 for request in calls}) == 2
    signed.verify(calls[0].version)


@pytest.mark.story
def test_variants_are_signed_and_verified_with_their_merge(signed: Signed, tmp_path: Path, one: Publishable) -> None:
    signed.publish(one)
    parts = variant_parts(tmp_path / "variants", describe_merge(signed.target, tmp_path, one.parts), "Q8_0")
    place = signed.target.for_variants("GGUF")
    variants = publish(place, tmp_path, parts)
    assert not publish(place, tmp_path, parts).new
    assert signed.instance.signings == 2
    location = DirectoryRelease(Path(variants.location))
    verified = check_release(location, signer=signed.signer())
    assert verified.merge is not None
    assert verified.merge.problem == ""
    assert "--identity ID --issuer URL --trust-config FILE" in (location.directory / "README.md").read_text()
    (location.directory / verified.merge.address / "model.sigstore.json").unlink()
    with pytest.raises(Refused, match=r"model\.sigstore\.json: missing; expected a keyless signature by "):
        check_release(location, signer=signed.signer())


@pytest.mark.story
def test_a_key_and_an_identity_can_both_sign(signed: Signed, tmp_path: Path, one: Publishable) -> None:
    from model_signing import verifying

    key, public = write_keys(tmp_path)
    directory = Path(signed.publish(one, sign_key=key).location)
    assert not signed.publish(one, sign_key=key).new
    verified = check_release(DirectoryRelease(directory), public, signer=signed.signer())
    assert verified.keyless is not None
    assert (verified.signed, verified.keyless.status) == ("valid", "valid")
    unchecked = check_release(DirectoryRelease(directory))
    assert unchecked.keyless is not None
    assert (unchecked.signed, unchecked.keyless.status) == ("not checked", "not checked")
    assert f"a keyless signature that claims to be by {IDENTITY} (issuer {signed.instance.issuer})" in str(unchecked)
    with_key = verifying.Config().use_elliptic_key_verifier(public_key=public)
    with_key.verify(directory, directory / "model.sig")
    identity = {"identity": IDENTITY, "oidc_issuer": signed.instance.issuer}
    keyless = verifying.Config().use_sigstore_verifier(**identity, trust_config=tmp_path / "trust.json")
    keyless.verify(directory, directory / "model.sigstore.json")


def test_every_changed_file_is_refused(signed: Signed, one: Publishable) -> None:
    location = Path(signed.publish(one, version="v1").location)
    for file in sorted(path for path in location.rglob("*") if path.is_file())[::3]:
        original = file.read_bytes()
        for changed in (original[:-2] + bytes([original[-2] ^ 1]) + original[-1:], None):
            if changed is None:
                file.unlink()
            else:
                file.write_bytes(changed)
            with pytest.raises(Refused) as refused:
                check_release(DirectoryRelease(location), signer=signed.signer())
            name = file.relative_to(location).as_posix()
            assert f"{name}:" in str(refused.value) or f"{name} is missing" in str(refused.value)
        file.write_bytes(original)
    (location / "added.py").touch()
    with pytest.raises(Refused, match=r"added\.py: not listed by model\.sigstore\.json"):
        check_release(DirectoryRelease(location), signer=signed.signer())


@pytest.mark.story
def test_a_forged_signature_next_to_a_release_is_refused_even_if_no_one_checks_the_signer(
    signed: Signed, tmp_path: Path, one: Publishable
) -> None:
    location = Path(signed.publish(one).location)
    other = Path(signed.publish(publishable(tmp_path / "two", weights=b"x")).location)
    shutil.copyfile(other / "model.sigstore.json", location / "model.sigstore.json")
    with pytest.raises(Refused, match=r"model\.safetensors: sha256 is .* model\.sigstore\.json specifies"):
        check_release(DirectoryRelease(location))
    with pytest.raises(Refused, match="already published with other content"):
        signed.publish(one)
