"""Test keyless signatures at every target: one signing for each release, although every signing gives other bytes."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
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
from mergegate.tasks.publish import describe_merge, pending_release, publish
from mergegate.tasks.publish.keyless import Signer, SignerPolicy
from mergegate.tasks.publish.releases import VerifiedRelease, check_release
from mergegate.tasks.publish.targets import PublishTarget, Target, find_release
from mergegate.tasks.publish.targets.directory import DirectoryRelease, DirectoryTarget

IDENTITY = "https://ci.example.org/acme/models/release"
REMOTE = [pytest.param(kind, marks=pytest.mark.story) for kind in ("hub", "s3", "oci")]


@pytest.fixture(scope="module")
def s3() -> Iterator[S3OnLoopback]:
    with s3_on_loopback() as server:
        yield server


@pytest.fixture
def instance(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[SigstoreInstance]:
    with sigstore_on_loopback() as running:
        running.write_trust_config(tmp_path)
        monkeypatch.setenv("SIGSTORE_ID_TOKEN", running.token(IDENTITY))
        yield running


def built(settings: dict[str, object]) -> PublishTarget:
    return TypeAdapter[PublishTarget](Target).validate_python({**settings, "sign": {"trust_config": "trust.json"}})


@pytest.fixture(params=["directory", "hub", "s3", "oci", "mlflow", "shelf"])
def target(
    request: pytest.FixtureRequest,
    tmp_path: Path,
    home: Path,
    prefect_api: None,
    instance: SigstoreInstance,
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[PublishTarget]:
    """Yield an empty target of each kind, also one of another package, that signs with the instance."""
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    kind = request.param
    if kind == "directory":
        yield built({"path": "releases/demo"})
    elif kind == "hub":
        with hub(tmp_path / "hub") as stand_in:
            use_hub(monkeypatch, stand_in.url, tmp_path, WRITER)
            yield built({"to": "hub", "repo": "acme/demo"})
    elif kind == "s3":
        s3: S3OnLoopback = request.getfixturevalue("s3")
        s3.empty()
        with s3.found_by_clients(monkeypatch):
            yield built({"to": "s3", "url": "s3://models/acme/demo"})
    elif kind == "shelf":
        monkeypatch.chdir(tmp_path)
        trust = {"trust_config": "trust.json"}
        yield ShelfTarget.model_validate({"to": "shelf", "place": "library", "sign": trust})
    else:
        with small_registry() as registry, small_mlflow() as mlflow:
            oci = {"to": "oci", "repository": f"{registry.url.removeprefix('http://')}/acme/demo"}
            tracking = {"tracking_uri": mlflow.url} if kind == "mlflow" else {}
            yield built({"to": "mlflow", "model": "demo", "storage": oci, **tracking} if kind == "mlflow" else oci)


def signed_by(instance: SigstoreInstance, root: Path, identity: str = IDENTITY) -> SignerPolicy:
    return SignerPolicy(Signer(identity, instance.issuer), root / "trust.json")


def verify(target: PublishTarget, version: str, signer: SignerPolicy) -> VerifiedRelease:
    """Verify a published version, from the directory of the trust configuration."""
    assert signer.trust_config
    root = signer.trust_config.parent
    if isinstance(target, DirectoryTarget):
        return check_release(DirectoryRelease(root / target.path / version), signer=signer)
    find = ShelfTarget.open if isinstance(target, ShelfTarget) else find_release
    return check_release(find(target.reference_to(version)), signer=signer)


def signature_of(target: PublishTarget, root: Path, version: str) -> bytes:
    content = target.published_file(root, version, "model.sigstore.json")
    assert content is not None
    return content


@pytest.mark.story
def test_a_release_is_signed_once_however_often_and_wherever_it_is_published(
    target: PublishTarget, tmp_path: Path, home: Path, instance: SigstoreInstance
) -> None:
    one, two = publishable(tmp_path / "one"), publishable(tmp_path / "two", weights=b"others")
    assert target.published_file(tmp_path, "v1", "model.sigstore.json") is None
    before = pending_release(target, tmp_path, one.parts)
    first = one.publish(target, tmp_path)
    assert (first.version, first.new, instance.signings) == (before.version, True, 1)
    assert not list(home.glob("signatures/*"))
    after = pending_release(target, tmp_path, one.parts)
    assert (after.version, after.digest, after.is_current) == (before.version, before.digest, True)
    current = target.current_release(tmp_path)
    assert current is not None
    assert current.name == before.version or target.current_head(tmp_path) == current.head

    original = signature_of(target, tmp_path, first.version)
    assert not one.publish(target, tmp_path).new
    shutil.rmtree(home)  # another machine publishes the same files
    assert not one.publish(target, tmp_path).new
    later = two.publish(target, tmp_path)
    assert (later.new, instance.signings) == (True, 2)
    if not isinstance(target, ShelfTarget):
        assert one.publish(target, tmp_path).new, "it is current again"
    assert (signature_of(target, tmp_path, first.version), instance.signings) == (original, 2)

    for version in (first.version, later.version):
        verified = verify(target, version, signed_by(instance, tmp_path))
        assert verified.keyless is not None
        assert (verified.signed, verified.keyless.status, verified.version) == ("none", "valid", version)
    with pytest.raises(Refused, match=f"signed by {IDENTITY} .*; expected mallory"):
        verify(target, first.version, signed_by(instance, tmp_path, "mallory@example.org"))


@pytest.mark.parametrize("target", ["directory", *REMOTE], indirect=True)
def test_an_interrupted_publication_uses_its_signature_again(
    target: PublishTarget, tmp_path: Path, home: Path, instance: SigstoreInstance, monkeypatch: pytest.MonkeyPatch
) -> None:
    named = target.model_copy(update={"version": "v1"})
    release = publishable(tmp_path / "one")
    with monkeypatch.context() as patch:

        def die(*_: object) -> None:
            raise Refused("target", found="no answer")

        patch.setattr(type(target), "publish", die)
        with pytest.raises(Refused, match="no answer"):
            release.publish(named, tmp_path)
    (pending,) = home.glob("signatures/*")
    original = pending.read_bytes()
    done = release.publish(named, tmp_path)
    assert done.new
    assert (signature_of(named, tmp_path, done.version), instance.signings) == (original, 1)
    verify(named, done.version, signed_by(instance, tmp_path))


@pytest.mark.parametrize("target", ["directory", *REMOTE], indirect=True)
def test_of_two_publishers_at_once_the_second_takes_over_the_signature_of_the_first(
    target: PublishTarget, tmp_path: Path, home: Path, instance: SigstoreInstance, monkeypatch: pytest.MonkeyPatch
) -> None:
    release, kind = publishable(tmp_path / "one"), type(target)
    real = kind.publish
    calls: list[Any] = []

    def overtaken(self: PublishTarget, request: Any) -> Any:
        calls.append(request)
        if len(calls) == 1:
            shutil.rmtree(home)
            release.publish(target, tmp_path)
        return real(self, request)

    monkeypatch.setattr(kind, "publish", overtaken)
    release.publish(target, tmp_path)
    assert instance.signings == 2
    assert len({request.files[-1].sha256 for request in calls}) == 2
    verify(target, calls[0].version, signed_by(instance, tmp_path))


@pytest.fixture
def directory(tmp_path: Path, home: Path, prefect_api: None, instance: SigstoreInstance) -> PublishTarget:
    return built({"path": "releases/demo"})


def test_variants_are_signed_too_and_verified_with_their_merge(
    directory: PublishTarget, tmp_path: Path, instance: SigstoreInstance
) -> None:
    merge = publishable(tmp_path / "merge")
    merge.publish(directory, tmp_path)
    parts = variant_parts(tmp_path / "variants", describe_merge(directory, tmp_path, merge.parts), "Q8_0")
    place = directory.for_variants("GGUF")
    variants = publish(place, tmp_path, parts)
    assert not publish(place, tmp_path, parts).new
    assert instance.signings == 2
    location = DirectoryRelease(Path(variants.location))
    verified = check_release(location, signer=signed_by(instance, tmp_path))
    assert verified.merge is not None
    assert verified.merge.problem == ""
    assert "--identity ID --issuer URL --trust-config FILE" in (location.directory / "README.md").read_text()
    link = Path(variants.location) / verified.merge.address
    (link / "model.sigstore.json").unlink()
    with pytest.raises(Refused, match=r"model\.sigstore\.json: missing; expected a keyless signature by "):
        check_release(location, signer=signed_by(instance, tmp_path))


def test_a_key_and_an_identity_can_both_sign(
    directory: PublishTarget, tmp_path: Path, instance: SigstoreInstance, released: Publishable
) -> None:
    key, public = write_keys(tmp_path)
    place = directory.model_copy(update={"sign_key": key})
    location = DirectoryRelease(Path(released.publish(place, tmp_path).location))
    assert not released.publish(place, tmp_path).new
    verified = check_release(location, public, signer=signed_by(instance, tmp_path))
    assert verified.keyless is not None
    assert (verified.signed, verified.keyless.status) == ("valid", "valid")
    unchecked = check_release(location)
    assert unchecked.keyless is not None
    assert (unchecked.signed, unchecked.keyless.status) == ("not checked", "not checked")
    assert f"a keyless signature that claims to be by {IDENTITY} (issuer {instance.issuer})" in str(unchecked)

    from model_signing import verifying

    verifying.Config().use_elliptic_key_verifier(public_key=public).verify(
        location.directory, location.directory / "model.sig"
    )
    verifying.Config().use_sigstore_verifier(
        identity=IDENTITY, oidc_issuer=instance.issuer, trust_config=tmp_path / "trust.json"
    ).verify(location.directory, location.directory / "model.sigstore.json")


@pytest.fixture
def released(tmp_path: Path) -> Publishable:
    return publishable(tmp_path / "one")


def test_every_changed_file_is_refused(
    directory: PublishTarget, tmp_path: Path, instance: SigstoreInstance, released: Publishable
) -> None:
    location = Path(released.publish(directory.model_copy(update={"version": "v1"}), tmp_path).location)
    policy = signed_by(instance, tmp_path)
    for file in [path for path in location.rglob("*") if path.is_file()]:
        original = file.read_bytes()
        for changed in (original[:-2] + bytes([original[-2] ^ 1]) + original[-1:], None):
            if changed is None:
                file.unlink()
            else:
                file.write_bytes(changed)
            with pytest.raises(Refused) as refused:
                check_release(DirectoryRelease(location), signer=policy)
            name = file.relative_to(location).as_posix()
            assert f"{name}:" in str(refused.value) or f"{name} is missing" in str(refused.value)
        file.write_bytes(original)
    (location / "added.py").touch()
    with pytest.raises(Refused, match=r"added\.py: not listed by model\.sigstore\.json"):
        check_release(DirectoryRelease(location), signer=policy)


def test_a_forged_signature_next_to_a_release_is_refused_even_if_no_one_checks_the_signer(
    directory: PublishTarget, tmp_path: Path, instance: SigstoreInstance, released: Publishable
) -> None:
    location = Path(released.publish(directory, tmp_path).location)
    other = Path(publishable(tmp_path / "two", weights=b"x").publish(directory, tmp_path).location)
    shutil.copyfile(other / "model.sigstore.json", location / "model.sigstore.json")
    with pytest.raises(Refused, match=r"model\.safetensors: sha256 is .* model\.sigstore\.json specifies"):
        check_release(DirectoryRelease(location))
    with pytest.raises(Refused, match="already published with other content"):
        released.publish(directory, tmp_path)
