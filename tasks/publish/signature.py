"""A signature on the provenance with a local Ed25519 key: a DSSE envelope (Dead Simple Signing Envelope, v1.0.2).

::

    openssl genpkey -algorithm ed25519 -out release.key        # keep it; name it in publish.sign_key
    openssl pkey -in release.key -pubout -out release.pub      # give it to whoever verifies

What is signed is ``provenance.json`` itself, and that lists the sha256 of every other file. Ed25519 signatures are the
same every time, so a signed release is as reproducible as an unsigned one.
"""

from __future__ import annotations

import base64
import hashlib
import json
from pathlib import Path

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from merge_core.errors import InvalidInput

_PAYLOAD_TYPE = "application/vnd.in-toto+json"
_HOW = "openssl genpkey -algorithm ed25519 -out release.key; openssl pkey -in release.key -pubout -out release.pub"


def sign(statement: bytes, key_file: Path) -> str:
    """The envelope around ``statement``, as JSON text.

    Raises:
        InvalidInput: when ``key_file`` is no Ed25519 private key.
    """
    try:
        key = serialization.load_pem_private_key(key_file.read_bytes(), password=None)
    except (OSError, ValueError, TypeError) as error:
        raise _no_key(key_file, "private", error) from None
    if not isinstance(key, Ed25519PrivateKey):
        raise _no_key(key_file, "private", None)
    envelope = {
        "payload": base64.b64encode(statement).decode(),
        "payloadType": _PAYLOAD_TYPE,
        "signatures": [
            {"keyid": _key_id(key.public_key()), "sig": base64.b64encode(key.sign(_pae(statement))).decode()}
        ],
    }
    return json.dumps(envelope, indent=1, sort_keys=True) + "\n"


def signed_statement(envelope: bytes) -> bytes | None:
    """What an envelope is around; None when it is none."""
    try:
        content = json.loads(envelope)
        return base64.b64decode(content["payload"], validate=True) if content["payloadType"] == _PAYLOAD_TYPE else None
    except (ValueError, KeyError, TypeError):
        return None


def is_signed_by(envelope: bytes, key_file: Path) -> bool:
    """Whether one of the envelope's signatures is of this key.

    Raises:
        InvalidInput: when ``key_file`` is no Ed25519 public key.
    """
    try:
        key = serialization.load_pem_public_key(key_file.read_bytes())
    except (OSError, ValueError) as error:
        raise _no_key(key_file, "public", error) from None
    if not isinstance(key, Ed25519PublicKey):
        raise _no_key(key_file, "public", None)
    statement = signed_statement(envelope)
    if statement is None:
        return False
    for signature in json.loads(envelope).get("signatures", []):
        try:
            key.verify(base64.b64decode(signature["sig"], validate=True), _pae(statement))
        except (InvalidSignature, ValueError, KeyError, TypeError):
            continue
        return True
    return False


def _pae(statement: bytes) -> bytes:
    """Pre-authentication encoding: type and content with their lengths, so that neither can pass for the other."""
    kind = _PAYLOAD_TYPE.encode()
    return b"DSSEv1 %d %s %d %s" % (len(kind), kind, len(statement), statement)


def _key_id(key: Ed25519PublicKey) -> str:
    data = key.public_bytes(serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo)
    return hashlib.sha256(data).hexdigest()


def _no_key(file: Path, kind: str, error: Exception | None) -> InvalidInput:
    found = error.strerror if isinstance(error, OSError) and error.strerror else f"no Ed25519 {kind} key"
    return InvalidInput(str(file), found=found, expected=f"an Ed25519 {kind} key in PEM, without password", remedy=_HOW)
