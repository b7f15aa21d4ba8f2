"""Test release signatures: we verify those of OpenSSF's own library, it verifies ours, and changes break both."""

from __future__ import annotations

import base64
import json
from pathlib import Path

import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.hashes import SHA256
from hypothesis import given, settings
from hypothesis import strategies as st
from signing_keys import hashes, write_keys, write_model

from mergegate.merge_core.errors import InvalidInput
from mergegate.tasks.release.publish.signing import private_key, public_key, read_signature, sign

CURVES = [ec.SECP256R1(), ec.SECP384R1(), ec.SECP521R1()]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_model(tmp_path / "model")


def library_verifies(model: Path, public: Path) -> bool:
    """Return whether the signature is valid, as ``model_signing verify key`` checks it."""
    from model_signing import verifying

    try:
        verifying.Config().use_elliptic_key_verifier(public_key=public).verify(model, model / "model.sig")
    except Exception:
        return False
    return True


@pytest.mark.parametrize("curve", CURVES, ids=lambda curve: curve.name)
def test_the_library_verifies_what_we_sign_and_notices_every_change(
    tmp_path: Path, model: Path, curve: ec.EllipticCurve
) -> None:
    private, public = write_keys(tmp_path, curve)
    signature = sign("demo", hashes(model), private)
    assert signature == sign("demo", hashes(model), private)
    (model / "model.sig").write_text(signature)
    assert library_verifies(model, public)
    (model / ".cache").mkdir()
    (model / ".cache" / "left-by-a-download").touch()
    (model / ".gitattributes").touch()
    assert library_verifies(model, public)
    _, stranger = write_keys(tmp_path, curve, "stranger")
    assert not library_verifies(model, stranger)
    (model / "a.txt").write_text("other")
    assert not library_verifies(model, public)
    (model / "a.txt").write_text("a.txt")
    (model / "added.py").touch()
    assert not library_verifies(model, public)


@pytest.mark.parametrize("curve", CURVES, ids=lambda curve: curve.name)
def test_we_verify_what_the_library_signs(tmp_path: Path, model: Path, curve: ec.EllipticCurve) -> None:
    from model_signing import hashing, signing

    private, public = write_keys(tmp_path, curve)
    ignoring = hashing.Config().set_ignored_paths(paths=["model.sig"])
    signer = signing.Config().use_elliptic_key_signer(private_key=private).set_hashing_config(ignoring)
    signer.sign(model, model / "model.sig")
    signature = read_signature((model / "model.sig").read_bytes())
    assert signature.files == hashes(model)
    assert signature.matches_key(public)
    _, stranger = write_keys(tmp_path, curve, "stranger")
    assert not signature.matches_key(stranger)


def test_the_signature_is_over_the_pre_authentication_encoding(tmp_path: Path) -> None:
    private, public = write_keys(tmp_path)
    envelope = json.loads(sign("demo", {"a": "0" * 64}, private))["dsseEnvelope"]
    payload, kind = base64.b64decode(envelope["payload"]), envelope["payloadType"]
    encoded = f"DSSEv1 {len(kind)} {kind} {len(payload)} ".encode() + payload
    signature = base64.b64decode(envelope["signatures"][0]["sig"])
    public_key(public).verify(signature, encoded, ec.ECDSA(SHA256()))


@settings(max_examples=30)
@given(st.dictionaries(st.text(min_size=1, max_size=5), st.binary(min_size=32, max_size=32), max_size=4))
def test_a_signature_lists_the_signed_files(key_file: Path, listed: dict[str, bytes]) -> None:
    files = {name: digest.hex() for name, digest in listed.items()}
    assert read_signature(sign("demo", files, key_file).encode()).files == files


@pytest.fixture(scope="module")
def key_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_keys(tmp_path_factory.mktemp("key"))[0]


def test_no_byte_of_a_signature_can_be_changed_unnoticed(tmp_path: Path) -> None:
    private, public = write_keys(tmp_path)
    original = sign("demo", {"model.safetensors": "0" * 64}, private).encode()
    assert read_signature(original).matches_key(public)
    for place in range(0, len(original) - 1, 3):  # the last byte is a newline, which may be any white space
        for bit in (1, 4):
            damaged = bytearray(original)
            damaged[place] ^= bit
            try:
                assert not read_signature(bytes(damaged)).matches_key(public), (place, original[place : place + 20])
            except ValueError:
                continue


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda b: b.update(mediaType="application/json"), "mediaType"),
        (lambda b: b.update(more=1), "more"),
        (lambda b: b["dsseEnvelope"].update(payloadType="text/plain"), "payloadType"),
        (lambda b: b["dsseEnvelope"]["signatures"].append(b["dsseEnvelope"]["signatures"][0]), "signatures"),
        (lambda b: b["dsseEnvelope"].update(payload="?"), "payload"),
    ],
)
def test_a_bundle_of_another_form_is_rejected(tmp_path: Path, change, why: str) -> None:
    bundle = json.loads(sign("demo", {"a": "0" * 64}, write_keys(tmp_path)[0]))
    change(bundle)
    with pytest.raises(ValueError, match=why):
        read_signature(json.dumps(bundle).encode())


def test_files_signed_in_shards_are_rejected_with_a_reason(tmp_path: Path, model: Path) -> None:
    from model_signing import hashing, signing

    private, _ = write_keys(tmp_path)
    shards = hashing.Config().use_shard_serialization(shard_size=3).set_ignored_paths(paths=["model.sig"])
    signing.Config().use_elliptic_key_signer(private_key=private).set_hashing_config(shards).sign(
        model, model / "model.sig"
    )
    with pytest.raises(ValueError, match="not a list of files by sha256"):
        read_signature((model / "model.sig").read_bytes())


@pytest.mark.parametrize("text", ["", "[]", "{}", "null", "\ud800", '{"mediaType": 3}'])
def test_an_invalid_bundle_is_rejected_with_a_reason(text: str) -> None:
    with pytest.raises(ValueError, match="not a signature"):
        read_signature(text.encode(errors="surrogatepass"))


def test_a_wrong_digest_over_all_files_is_reported(tmp_path: Path) -> None:
    bundle = json.loads(sign("demo", {"a": "0" * 64}, write_keys(tmp_path)[0]))
    statement = json.loads(base64.b64decode(bundle["dsseEnvelope"]["payload"]))
    statement["subject"][0]["digest"]["sha256"] = "1" * 64
    bundle["dsseEnvelope"]["payload"] = base64.b64encode(json.dumps(statement).encode()).decode()
    with pytest.raises(ValueError, match="the signed digest over all files"):
        read_signature(json.dumps(bundle).encode())


def test_another_kind_of_key_is_rejected(tmp_path: Path) -> None:
    other = Ed25519PrivateKey.generate()
    (tmp_path / "ed.key").write_bytes(
        other.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    )
    (tmp_path / "ed.pub").write_bytes(
        other.public_key().public_bytes(serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo)
    )
    koblitz, _ = write_keys(tmp_path, ec.SECP256K1(), "koblitz")
    for file in (tmp_path / "ed.key", koblitz, tmp_path / "ed.pub"):
        with pytest.raises(InvalidInput, match="openssl ecparam"):
            private_key(file)
    for file in (tmp_path / "ed.pub", koblitz, tmp_path / "nowhere"):
        with pytest.raises(InvalidInput, match="openssl ecparam"):
            public_key(file)
