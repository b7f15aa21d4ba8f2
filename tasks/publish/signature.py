"""Sign all files of a release with a local key, in the format of OpenSSF Model Signing 1.0, and parse signatures.

::

    openssl ecparam -name prime256v1 -genkey -noout -out release.key     # keep it; name it in publish.sign_key
    openssl ec -in release.key -pubout -out release.pub                  # give it to those who verify releases

``model.sig`` is a sigstore bundle (v0.3) that contains a DSSE envelope with an in-toto statement. The statement lists
the sha256 of all other files. mergegate can read the signatures of ``model_signing sign key``, and
``model_signing verify key`` those of mergegate. mergegate signs hashes that are already known, so hundreds of GB are
not read again, and a signature can be compared with the Hub's own listing. ECDSA is deterministic (RFC 6979): signing
again gives the same bytes.

Bundles are parsed strictly: an unknown field is an error, because it could hide a change. ``mergegate verify`` tells
without the library ``sigstore`` who claims to have signed a release.

Sources: https://github.com/sigstore/model-transparency (format), https://github.com/secure-systems-lab/dsse (envelope,
v1.0.2), in-toto attestation framework (statement, v1), sigstore bundle v0.3.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Literal, TypeVar

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError
from pydantic.alias_generators import to_camel

from mergegate.merge_core.errors import InvalidInput
from mergegate.merge_core.parsing import read_plain
from mergegate.tasks.publish.content import KEYLESS_SIGNATURE, SIGNATURE, read_document

BUNDLE_TYPE = "application/vnd.dev.sigstore.bundle.v0.3+json"
_PAYLOAD = "application/vnd.in-toto+json"
_STATEMENT = "https://in-toto.io/Statement/v1"
_PREDICATE = "https://model_signing/signature/v1.0"
# Never part of a release: files that git or a download leaves next to it.
_IGNORED = (".cache", ".git", ".gitattributes", ".github", ".gitignore")
BundlePart = TypeVar("BundlePart", bound=BaseModel)
_CURVES: Mapping[str, hashes.HashAlgorithm] = {
    "secp256r1": hashes.SHA256(),
    "secp384r1": hashes.SHA384(),
    "secp521r1": hashes.SHA512(),
}
_KEY_COMMANDS = (
    "openssl ecparam -name prime256v1 -genkey -noout -out release.key; "
    "openssl ec -in release.key -pubout -out release.pub"
)
_NOTE = re.compile(
    r"(?P<origin>\S[^\n]*)\n(?P<size>\d+)\n(?P<text>(?:[^\n]+\n)+)\n(?P<signatures>(?:[^\n ]+ [^\n ]+ [^\n ]+\n)+)"
)
_Number = Annotated[str, Field(pattern=r"^(0|[1-9][0-9]{0,18})$")]


def sign(name: str, files: Mapping[str, str], key_file: Path) -> str:
    """Return the signature bundle as JSON.

    Args:
        name: Name of the release, for display only.
        files: sha256 (64 hex digits) of every file, by name.
        key_file: Private key on the curve P-256, P-384 or P-521, in PEM, without a password.

    Raises:
        InvalidInput: ``key_file`` is not such a key.
    """
    key = private_key(key_file)
    payload = signed_statement(name, files, (SIGNATURE, KEYLESS_SIGNATURE))
    algorithm = ec.ECDSA(_CURVES[key.curve.name], deterministic_signing=True)
    bundle = {
        "mediaType": BUNDLE_TYPE,
        "verificationMaterial": {"publicKey": {"hint": _hint(key.public_key())}, "tlogEntries": []},
        "dsseEnvelope": {
            "payload": base64.b64encode(payload).decode(),
            "payloadType": _PAYLOAD,
            "signatures": [{"keyid": "", "sig": base64.b64encode(key.sign(_pae(payload), algorithm)).decode()}],
        },
    }
    return json.dumps(bundle, indent=1, sort_keys=True) + "\n"


def signed_statement(name: str, files: Mapping[str, str], signatures: Sequence[str]) -> bytes:
    """Return the in-toto statement about the files that a signature covers, as JSON.

    ``name`` and ``files`` are those of :func:`sign`. ``signatures`` names the files that the statement cannot cover,
    because they are written later.
    """
    listed = sorted(files.items(), key=lambda file: Path(file[0]))  # OpenSSF's library sorts by path, too
    statement = {
        "_type": _STATEMENT,
        "subject": [{"name": name, "digest": {"sha256": _root([sha256 for _, sha256 in listed])}}],
        "predicateType": _PREDICATE,
        "predicate": {
            "serialization": {
                "method": "files",
                "hash_type": "sha256",
                "allow_symlinks": False,
                "ignore_paths": [*_IGNORED, *signatures],
            },
            "resources": [{"name": file, "algorithm": "sha256", "digest": sha256} for file, sha256 in listed],
        },
    }
    return json.dumps(statement, sort_keys=True, ensure_ascii=False).encode()


@dataclass(frozen=True)
class Signature:
    """A parsed signature that is not verified yet (see :meth:`matches_key`)."""

    files: Mapping[str, str]  # name -> sha256, as signed
    payload: bytes
    signature: bytes  # ECDSA, DER
    hint: str  # sha256 of the public key in PEM; helps to find the key and proves nothing

    def matches_key(self, key_file: Path) -> bool:
        """Return whether the private key that belongs to the public key in ``key_file`` created the signature.

        Raise InvalidInput if ``key_file`` is not a public key on a supported curve.
        """
        key = public_key(key_file)
        try:
            key.verify(self.signature, _pae(self.payload), ec.ECDSA(_CURVES[key.curve.name]))
        except InvalidSignature:
            return False
        return self.hint == _hint(key)


def read_signature(bundle: bytes) -> Signature:
    """Parse a signature bundle.

    Raise ValueError if the bundle is not a signature of this kind, or has unknown fields, which could hide a change.
    """
    parsed = parse_bundle(_Bundle, bundle, "not a signature that mergegate can read")
    envelope = parsed.dsse_envelope
    hint = parsed.verification_material.public_key.hint
    return Signature(read_statement(envelope.payload), envelope.payload, envelope.signatures[0].sig, hint)


def read_statement(payload: bytes) -> Mapping[str, str]:
    """Return the sha256 of each file that a signed statement lists, by name.

    Raise ValueError if the statement is not such a list, or contradicts itself.
    """
    statement = parse_bundle(_Statement, payload, "the signed statement is not a list of files by sha256")
    files = {entry.name: entry.digest for entry in statement.predicate.resources}
    if len(files) < len(statement.predicate.resources):
        raise ValueError("the signed statement lists a file twice")
    if statement.subject[0].digest.sha256 != _root([entry.digest for entry in statement.predicate.resources]):
        raise ValueError("the signed digest over all files does not match the listed files")
    return files


def parse_bundle(kind: type[BundlePart], content: bytes, problem: str) -> BundlePart:
    """Parse JSON. Raise ValueError with ``problem`` and the first wrong field if it does not have the form ``kind``."""
    try:
        return kind.model_validate(read_document(content, ""))
    except InvalidInput as error:
        raise ValueError(f"{problem}: {error.found}") from None
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(map(str, first["loc"])) or "the whole document"
        raise ValueError(f"{problem}: {field}: {first['msg']}") from None


def private_key(file: Path) -> ec.EllipticCurvePrivateKey:
    """Return the private key in ``file``. Raise InvalidInput if it is not one on a supported curve."""
    key = _load_key(file, "private", lambda data: serialization.load_pem_private_key(data, password=None))
    if not isinstance(key, ec.EllipticCurvePrivateKey) or key.curve.name not in _CURVES:
        raise _wrong_key(file, "private")
    return key


def public_key(file: Path) -> ec.EllipticCurvePublicKey:
    """Return the public key in ``file``. Raise InvalidInput if it is not one on a supported curve."""
    key = _load_key(file, "public", serialization.load_pem_public_key)
    if not isinstance(key, ec.EllipticCurvePublicKey) or key.curve.name not in _CURVES:
        raise _wrong_key(file, "public")
    return key


def _load_key(file: Path, kind: str, load: Callable[[bytes], object]) -> object:
    wrong_key = _wrong_key(file, kind)
    try:
        return load(read_plain(file, 1 << 20, expected=wrong_key.expected, remedy=wrong_key.remedy))
    except (ValueError, TypeError):
        raise wrong_key from None


def _wrong_key(file: Path, kind: str) -> InvalidInput:
    return InvalidInput(
        str(file),
        found=f"not a {kind} ECDSA key",
        expected=f"a {kind} key on the curve P-256, P-384 or P-521 in PEM, without a password",
        remedy=_KEY_COMMANDS,
    )


def _root(digests: list[str]) -> str:
    """Return the sha256 over the concatenated digests of the files, which represents the release."""
    return hashlib.sha256(b"".join(bytes.fromhex(digest) for digest in digests)).hexdigest()


def _pae(payload: bytes) -> bytes:
    """Return DSSE's pre-authentication encoding: type and content, each preceded by its length."""
    kind = _PAYLOAD.encode()
    return b"DSSEv1 %d %s %d %s" % (len(kind), kind, len(payload), payload)


def _hint(key: ec.EllipticCurvePublicKey) -> str:
    pem = key.public_bytes(serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo)
    return hashlib.sha256(pem).hexdigest()


def decode_base64(value: object) -> bytes:
    """Decode base64 in canonical form only. Otherwise, unused bits could be changed unnoticed."""
    if not isinstance(value, str):
        raise ValueError("not base64")
    data = base64.b64decode(value, validate=True)
    if base64.b64encode(data).decode() != value:
        raise ValueError("not canonical base64")
    return data


Base64 = Annotated[bytes, BeforeValidator(decode_base64)]
_Sha256 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]


class StrictBundle(BaseModel):
    """Base of the parts of a bundle. An unknown field is an error, because it could hide a change."""

    model_config = ConfigDict(frozen=True, extra="forbid", alias_generator=to_camel)


class _PublicKey(StrictBundle):
    hint: str


class _Material(StrictBundle):
    public_key: _PublicKey
    tlog_entries: tuple[()] = ()


class _EnvelopeSignature(StrictBundle):
    sig: Base64
    keyid: Literal[""] = ""


class Envelope(StrictBundle):
    """DSSE envelope with an in-toto statement and exactly one signature."""

    payload: Base64
    payload_type: Literal["application/vnd.in-toto+json"]
    signatures: tuple[_EnvelopeSignature]


class _Bundle(StrictBundle):
    media_type: Literal["application/vnd.dev.sigstore.bundle.v0.3+json"]
    verification_material: _Material
    dsse_envelope: Envelope


class _SnakeCase(BaseModel):
    """Base of models with snake-case field names. Later versions of the format may add fields."""

    model_config = ConfigDict(frozen=True)


class _Resource(_SnakeCase):
    name: str
    algorithm: Literal["sha256"]
    digest: _Sha256


class _Serialization(_SnakeCase):
    method: Literal["files"]
    hash_type: Literal["sha256"]


class _Predicate(_SnakeCase):
    serialization: _Serialization
    resources: tuple[_Resource, ...]


class _Digest(_SnakeCase):
    sha256: _Sha256


class _Subject(_SnakeCase):
    digest: _Digest


class _Statement(_SnakeCase):
    type: Literal["https://in-toto.io/Statement/v1"] = Field(alias="_type")
    predicate_type: Literal["https://model_signing/signature/v1.0"] = Field(alias="predicateType")
    subject: tuple[_Subject]
    predicate: _Predicate


class _Certificate(StrictBundle):
    raw_bytes: Base64

    def x509(self) -> x509.Certificate:
        """Return the certificate. Raise ValueError if it is malformed."""
        try:
            return x509.load_der_x509_certificate(self.raw_bytes)
        except (ValueError, x509.InvalidVersion) as error:
            raise ValueError(f"its certificate is malformed: {str(error)[:200]}") from None


class _LogId(StrictBundle):
    key_id: Base64


class _KindVersion(StrictBundle):
    kind: str
    version: str


class _Promise(StrictBundle):
    signed_entry_timestamp: Base64


class _Checkpoint(StrictBundle):
    envelope: str


class _Proof(StrictBundle):
    log_index: _Number
    root_hash: Base64
    tree_size: _Number
    hashes: tuple[Base64, ...]
    checkpoint: _Checkpoint


class _LogEntry(StrictBundle):
    log_index: _Number
    log_id: _LogId
    kind_version: _KindVersion
    integrated_time: _Number | None = None
    inclusion_promise: _Promise | None = None
    inclusion_proof: _Proof
    canonicalized_body: Base64

    @property
    def time(self) -> datetime | None:
        """Time at which the log recorded the entry, if it states one."""
        try:
            return datetime.fromtimestamp(int(self.integrated_time), UTC) if self.integrated_time else None
        except (ValueError, OverflowError, OSError):
            return None

    def require_consistent(self) -> None:
        """Raise ValueError if statements disagree that the library does not compare with signed ones."""
        proof = self.inclusion_proof
        note = _NOTE.fullmatch(proof.checkpoint.envelope)
        if note is None:
            raise ValueError("its checkpoint is not a signed note; expected one of the transparency log")
        if note["size"] != proof.tree_size:
            raise ValueError(f"its proof is for a log of {proof.tree_size} entries; expected {note['size']}, as signed")
        own = [
            signature
            for dash, name, signature in (line.split(" ") for line in note["signatures"].splitlines())
            if dash == "\N{EM DASH}" and name == note["origin"].split(" ")[0]
        ]
        if not any(decode_base64(signature)[:4] == self.log_id.key_id[:4] for signature in own):
            raise ValueError("its checkpoint is not signed by the log of the entry; expected a signature of that log")
        if (self.integrated_time is None) != (self.inclusion_promise is None):
            raise ValueError("its log entry has a time without a promise; expected both or neither")
        if self.inclusion_promise is None and self.log_index != proof.log_index:
            raise ValueError(f"its log entry is number {self.log_index}; expected {proof.log_index}, as proven")


class _Timestamp(StrictBundle):
    signed_timestamp: Base64


class _Timestamps(StrictBundle):
    rfc3161_timestamps: tuple[_Timestamp, ...] = ()


class _CertifiedMaterial(StrictBundle):
    certificate: _Certificate
    tlog_entries: tuple[_LogEntry, ...] = ()
    timestamp_verification_data: _Timestamps | None = None


class SigstoreBundle(StrictBundle):
    """Bundle with a certificate, the entry of a transparency log, and a signed statement."""

    media_type: Literal["application/vnd.dev.sigstore.bundle.v0.3+json"]
    verification_material: _CertifiedMaterial
    dsse_envelope: Envelope
