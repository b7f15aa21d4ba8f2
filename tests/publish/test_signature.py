"""Signatures on a statement: the envelope is the one that the DSSE specification describes, and changes break it."""

from __future__ import annotations

import base64
import json
from pathlib import Path

import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from merge_core.errors import InvalidInput
from tasks.publish.signature import is_signed_by, sign, signed_statement

STATEMENT = b'{"_type": "https://in-toto.io/Statement/v1"}\n'


@pytest.fixture
def key(tmp_path: Path) -> Ed25519PrivateKey:
    made = Ed25519PrivateKey.generate()
    save(made, tmp_path / "release.key")
    (tmp_path / "release.pub").write_bytes(
        made.public_key().public_bytes(serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo)
    )
    return made


def save(key: Ed25519PrivateKey | ec.EllipticCurvePrivateKey, file: Path) -> None:
    file.write_bytes(
        key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    )


def test_the_signature_is_over_the_pre_authentication_encoding(tmp_path: Path, key: Ed25519PrivateKey) -> None:
    envelope = json.loads(sign(STATEMENT, tmp_path / "release.key"))
    kind = envelope["payloadType"]
    encoded = f"DSSEv1 {len(kind)} {kind} {len(STATEMENT)} ".encode() + STATEMENT
    key.public_key().verify(base64.b64decode(envelope["signatures"][0]["sig"]), encoded)
    assert base64.b64decode(envelope["payload"]) == STATEMENT


def test_signing_again_gives_the_same_bytes(tmp_path: Path, key: Ed25519PrivateKey) -> None:
    assert sign(STATEMENT, tmp_path / "release.key") == sign(STATEMENT, tmp_path / "release.key")


def test_only_the_key_that_signed_verifies(tmp_path: Path, key: Ed25519PrivateKey) -> None:
    envelope = sign(STATEMENT, tmp_path / "release.key").encode()
    assert is_signed_by(envelope, tmp_path / "release.pub")
    save(Ed25519PrivateKey.generate(), tmp_path / "other.key")
    assert not is_signed_by(sign(STATEMENT, tmp_path / "other.key").encode(), tmp_path / "release.pub")


def test_another_payload_under_the_same_signature_does_not_verify(tmp_path: Path, key: Ed25519PrivateKey) -> None:
    envelope = json.loads(sign(STATEMENT, tmp_path / "release.key"))
    envelope["payload"] = base64.b64encode(STATEMENT.replace(b"v1", b"v2")).decode()
    assert not is_signed_by(json.dumps(envelope).encode(), tmp_path / "release.pub")


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"payload": "?", "payloadType": "application/vnd.in-toto+json"}'])
def test_what_is_no_envelope_is_signed_by_nobody(tmp_path: Path, key: Ed25519PrivateKey, text: str) -> None:
    assert signed_statement(text.encode()) is None
    assert not is_signed_by(text.encode(), tmp_path / "release.pub")


def test_another_kind_of_key_is_named_as_such(tmp_path: Path) -> None:
    save(ec.generate_private_key(ec.SECP256R1()), tmp_path / "ec.key")
    with pytest.raises(InvalidInput, match="no Ed25519 private key"):
        sign(STATEMENT, tmp_path / "ec.key")
