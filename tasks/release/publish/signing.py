"""Sign all files of a release, with a local key or with sigstore, and parse and verify signatures.

::

    openssl ecparam -name prime256v1 -genkey -noout -out release.key     # keep it; name it in publish.sign_key
    openssl ec -in release.key -pubout -out release.pub                  # give it to those who verify releases

    publish: {to: hub, repo: acme/demo, sign: sigstore}                  # in a profile: sign without a key
    mergegate verify acme/demo --identity ID --issuer URL

Both signatures are sigstore bundles (v0.3) with a DSSE envelope around the same in-toto statement, in the format of
OpenSSF Model Signing 1.0. The statement lists the sha256 of all other files. mergegate can read the signatures of
``model_signing sign key``, and ``model_signing verify`` those of mergegate. mergegate signs hashes that are already
known, so hundreds of GB are not read again, and a signature can be compared with the Hub's own listing.

* ``model.sig`` is signed with a key. ECDSA is deterministic (RFC 6979): signing again gives the same bytes.
* ``model.sigstore.json`` is keyless: an OIDC identity takes the place of a key. A certificate authority (Fulcio)
  certifies a new key for the identity, and a transparency log (Rekor) records the signature while the certificate is
  valid. The bytes differ at every signing. So no other file lists it, and ``content.content_digest`` ignores it.
  ``stage.publish`` uses a signature of the same files again, because a version never changes its content.

Bundles are parsed strictly: an unknown field is an error, because it could hide a change. ``mergegate verify`` tells
without the library ``sigstore`` who claims to have signed a release.

Sources: https://github.com/sigstore/model-transparency (format), https://github.com/secure-systems-lab/dsse (envelope,
v1.0.2), in-toto attestation framework (statement, v1), sigstore bundle v0.3.
"""

from __future__ import annotations

import base64
import hashlib
import json
import logging
import os
import re
import shutil
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from threading import Thread
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError
from pydantic.alias_generators import to_camel

from mergegate.merge_core.errors import InvalidInput, Refused, pip_command
from mergegate.merge_core.parsing import read_plain, read_text
from mergegate.merge_core.system import product_name
from mergegate.merge_core.wording import format_duration
from mergegate.tasks.base.http import token_claims
from mergegate.tasks.release.publish.content import KEYLESS_SIGNATURE, SIGNATURE, read_document
from mergegate.tasks.release.publish.settings import SigstoreSettings

if TYPE_CHECKING:
    from sigstore.models import ClientTrustConfig
    from sigstore.oidc import IdentityToken
    from sigstore.sign import Signer as CertifiedSigner

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
TOKEN_VARIABLE = "SIGSTORE_ID_TOKEN"
_GITHUB_ISSUER = "https://token.actions.githubusercontent.com"
_ISSUER = x509.ObjectIdentifier("1.3.6.1.4.1.57264.1.1")
_SETTING = "publish.sign"
_HOW_TO = "docs/how-to/sign-and-verify.md"
_SIGNING_TIME = timedelta(minutes=2)  # longest time until all services have answered
_Result = TypeVar("_Result")


def sign(name: str, files: Mapping[str, str], key_file: Path) -> str:
    """Return the signature bundle as JSON. ``files`` holds the sha256 of every file, and ``name`` is only displayed."""
    key = private_key(key_file)
    payload = _signed_statement(name, files, (SIGNATURE, KEYLESS_SIGNATURE))
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


def _signed_statement(name: str, files: Mapping[str, str], signatures: Sequence[str]) -> bytes:
    """Return the in-toto statement about ``files`` as JSON. ``signatures`` are later, so it cannot cover them."""
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
        """Return whether the private key that belongs to the public key in ``key_file`` created the signature."""
        key = public_key(key_file)
        try:
            key.verify(self.signature, _pae(self.payload), ec.ECDSA(_CURVES[key.curve.name]))
        except InvalidSignature:
            return False
        return self.hint == _hint(key)


def read_signature(bundle: bytes) -> Signature:
    """Parse a signature bundle. Raise ValueError if it is not a signature of this kind, or has unknown fields."""
    parsed = _parse_bundle(_Bundle, bundle, "not a signature that mergegate can read")
    envelope = parsed.dsse_envelope
    hint = parsed.verification_material.public_key.hint
    return Signature(_read_statement(envelope.payload), envelope.payload, envelope.signatures[0].sig, hint)


def _read_statement(payload: bytes) -> Mapping[str, str]:
    """Return the sha256 of each file that a signed statement lists, by name."""
    statement = _parse_bundle(_Statement, payload, "the signed statement is not a list of files by sha256")
    files = {entry.name: entry.digest for entry in statement.predicate.resources}
    if len(files) < len(statement.predicate.resources):
        raise ValueError("the signed statement lists a file twice")
    if statement.subject[0].digest.sha256 != _root([entry.digest for entry in statement.predicate.resources]):
        raise ValueError("the signed digest over all files does not match the listed files")
    return files


def _parse_bundle(kind: type[BundlePart], content: bytes, problem: str) -> BundlePart:
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
    key = _load_key(file, "private", partial(serialization.load_pem_private_key, password=None))
    assert isinstance(key, ec.EllipticCurvePrivateKey)
    return key


def public_key(file: Path) -> ec.EllipticCurvePublicKey:
    """Return the public key in ``file``. Raise InvalidInput if it is not one on a supported curve."""
    key = _load_key(file, "public", serialization.load_pem_public_key)
    assert isinstance(key, ec.EllipticCurvePublicKey)
    return key


def _load_key(file: Path, kind: str, load: Callable[[bytes], object]) -> object:
    expected = f"a {kind} key on the curve P-256, P-384 or P-521 in PEM, without a password"
    content, key = read_plain(file, 1 << 20, expected=expected, remedy=_KEY_COMMANDS), None
    with suppress(ValueError, TypeError):
        key = load(content)
    if not isinstance(key, ec.EllipticCurvePrivateKey | ec.EllipticCurvePublicKey) or key.curve.name not in _CURVES:
        raise InvalidInput(str(file), found=f"not a {kind} ECDSA key", expected=expected, remedy=_KEY_COMMANDS)
    return key


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


def _decode_base64(value: object) -> bytes:
    """Decode base64 in canonical form only. Otherwise, unused bits could be changed unnoticed."""
    if not isinstance(value, str):
        raise ValueError("not base64")
    data = base64.b64decode(value, validate=True)
    if base64.b64encode(data).decode() != value:
        raise ValueError("not canonical base64")
    return data


_Base64 = Annotated[bytes, BeforeValidator(_decode_base64)]
_Sha256 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]


class _Strict(BaseModel):
    """Base of the parts of a bundle. An unknown field is an error, because it could hide a change."""

    model_config = ConfigDict(frozen=True, extra="forbid", alias_generator=to_camel)


class _PublicKey(_Strict):
    hint: str


class _Material(_Strict):
    public_key: _PublicKey
    tlog_entries: tuple[()] = ()


class _EnvelopeSignature(_Strict):
    sig: _Base64
    keyid: Literal[""] = ""


class _Envelope(_Strict):
    """DSSE envelope with an in-toto statement and exactly one signature."""

    payload: _Base64
    payload_type: Literal["application/vnd.in-toto+json"]
    signatures: tuple[_EnvelopeSignature]


class _Bundle(_Strict):
    media_type: Literal["application/vnd.dev.sigstore.bundle.v0.3+json"]
    verification_material: _Material
    dsse_envelope: _Envelope


class _Lenient(BaseModel):
    """Base of the parts of a statement. Later versions of the format may add fields."""

    model_config = ConfigDict(frozen=True)


class _Resource(_Lenient):
    name: str
    algorithm: Literal["sha256"]
    digest: _Sha256


class _Serialization(_Lenient):
    method: Literal["files"]
    hash_type: Literal["sha256"]


class _Predicate(_Lenient):
    serialization: _Serialization
    resources: tuple[_Resource, ...]


class _Digest(_Lenient):
    sha256: _Sha256


class _Subject(_Lenient):
    digest: _Digest


class _Statement(_Lenient):
    type: Literal["https://in-toto.io/Statement/v1"] = Field(alias="_type")
    predicate_type: Literal["https://model_signing/signature/v1.0"] = Field(alias="predicateType")
    subject: tuple[_Subject]
    predicate: _Predicate


class _Certificate(_Strict):
    raw_bytes: _Base64

    def x509(self) -> x509.Certificate:
        try:
            return x509.load_der_x509_certificate(self.raw_bytes)
        except (ValueError, x509.InvalidVersion) as error:
            raise ValueError(f"its certificate is malformed: {str(error)[:200]}") from None


class _LogId(_Strict):
    key_id: _Base64


class _KindVersion(_Strict):
    kind: str
    version: str


class _Promise(_Strict):
    signed_entry_timestamp: _Base64


class _Checkpoint(_Strict):
    envelope: str


class _Proof(_Strict):
    log_index: _Number
    root_hash: _Base64
    tree_size: _Number
    hashes: tuple[_Base64, ...]
    checkpoint: _Checkpoint


class _LogEntry(_Strict):
    log_index: _Number
    log_id: _LogId
    kind_version: _KindVersion
    integrated_time: _Number | None = None
    inclusion_promise: _Promise | None = None
    inclusion_proof: _Proof
    canonicalized_body: _Base64

    @property
    def time(self) -> datetime | None:
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
        if not any(_decode_base64(signature)[:4] == self.log_id.key_id[:4] for signature in own):
            raise ValueError("its checkpoint is not signed by the log of the entry; expected a signature of that log")
        if (self.integrated_time is None) != (self.inclusion_promise is None):
            raise ValueError("its log entry has a time without a promise; expected both or neither")
        if self.inclusion_promise is None and self.log_index != proof.log_index:
            raise ValueError(f"its log entry is number {self.log_index}; expected {proof.log_index}, as proven")


class _Timestamp(_Strict):
    signed_timestamp: _Base64


class _Timestamps(_Strict):
    rfc3161_timestamps: tuple[_Timestamp, ...] = ()


class _CertifiedMaterial(_Strict):
    certificate: _Certificate
    tlog_entries: tuple[_LogEntry, ...] = ()
    timestamp_verification_data: _Timestamps | None = None


class SigstoreBundle(_Strict):
    """Bundle with a certificate, the entry of a transparency log, and a signed statement."""

    media_type: Literal["application/vnd.dev.sigstore.bundle.v0.3+json"]
    verification_material: _CertifiedMaterial
    dsse_envelope: _Envelope


# Certificate of a user who logged in with a browser, and the end of the time in which it can sign, by the trust
# configuration. It signs all releases of a run, such as those of variants.
_logins: dict[Path | None, tuple[CertifiedSigner, datetime]] = {}


@dataclass(frozen=True)
class Signer:
    """Identity in a certificate, and the OIDC provider that confirmed it."""

    identity: str
    issuer: str

    def __str__(self) -> str:
        return f"{self.identity} (issuer {self.issuer})"


@dataclass(frozen=True)
class SignerPolicy:
    """Signer that must have signed a release."""

    signer: Signer  # identity and issuer, compared exactly
    # Sigstore's client trust configuration of a private instance. None: the public instance.
    trust_config: Path | None = None
    offline: bool = False  # whether to use the stored trusted root of the public instance without a network request


@dataclass(frozen=True)
class KeylessSignature:
    """A parsed keyless signature that is not verified yet (see :meth:`require_signer`)."""

    files: Mapping[str, str]  # name -> sha256, as signed
    signer: Signer  # as claimed by the certificate
    bundle: bytes
    parsed: SigstoreBundle

    def require_signer(self, policy: SignerPolicy) -> None:
        """Verify the certificate chain, its SCT, the log entry, the signature, and who signed."""
        if self.signer != policy.signer:
            raise ValueError(f"signed by {self.signer}; expected {policy.signer}")
        location = "--trust-config" if policy.trust_config else "--identity"
        trust = _trust_config(policy.trust_config, location, offline=policy.offline)
        instance = str(policy.trust_config) if policy.trust_config else "the public instance of sigstore"
        self.require_valid(trust, instance)

    def require_valid(self, trust: ClientTrustConfig, instance: str) -> None:
        """Verify the signature with the trust configuration of an ``instance``, for the signer that it claims."""
        from sigstore.models import Bundle
        from sigstore.verify import Verifier

        material = self.parsed.verification_material
        if len(material.tlog_entries) != 1:
            count = len(material.tlog_entries) or "no"
            raise ValueError(f"it has {count} entries of a transparency log; expected one, which records the signature")
        material.tlog_entries[0].require_consistent()
        try:
            verifier = Verifier(trusted_root=trust.trusted_root)
            _, payload = verifier.verify_dsse(Bundle.from_json(self.bundle), _CertificateOf(self.signer))
        except Exception as error:  # the library has no common base for the errors that a damaged bundle can cause
            raise ValueError(self._explain(error, instance)) from None
        if payload != self.parsed.dsse_envelope.payload:
            raise ValueError("the verified statement is not the one that lists the files")

    def _explain(self, error: Exception, instance: str) -> str:
        """Return what is wrong, and what was expected, for an error of the library."""
        text = " ".join(str(error).split()) or type(error).__name__
        if "certificate chain" in text:
            certificate = self.parsed.verification_material.certificate.x509()
            start, end = certificate.not_valid_before_utc, certificate.not_valid_after_utc
            recorded = self.parsed.verification_material.tlog_entries[0].time
            if recorded and not start <= recorded <= end:
                return (
                    f"the transparency log recorded the signature at {recorded:%Y-%m-%d %H:%M:%S} UTC; expected a time "
                    f"at which its certificate was valid, {start:%Y-%m-%d %H:%M:%S} to {end:%H:%M:%S} UTC"
                )
            return (
                f"its certificate was issued by {certificate.issuer.rfc4514_string() or 'an unknown authority'} and is "
                f"not from the expected instance; expected an authority of {instance}"
            )
        causes = {
            "SCT": f"its certificate is not in the expected CT log; expected a log of {instance}",
            "DSSE: invalid": "the signature does not match the statement; expected the statement as it was signed",
        }
        default = f"the transparency log does not confirm it; expected an entry in a log of {instance}"
        return f"{next((cause for fragment, cause in causes.items() if fragment in text), default)} ({text[:200]})"


def read_keyless(bundle: bytes) -> KeylessSignature:
    """Parse a keyless signature. Raise ValueError if it is not one, or has unknown fields."""
    parsed = _parse_bundle(SigstoreBundle, bundle, "not a keyless signature that mergegate can read")
    files = _read_statement(parsed.dsse_envelope.payload)
    return KeylessSignature(files, _certified_signer(parsed.verification_material.certificate.x509()), bundle, parsed)


def sign_keyless(name: str, files: Mapping[str, str], settings: SigstoreSettings, root: Path) -> bytes:
    """Sign a release with the identity of the CI job or user, and return the bundle as JSON.

    ``name`` and ``files`` are those of :func:`sign`. A relative path in ``settings`` starts at ``root``.
    """
    from sigstore.dsse import Statement
    from sigstore.sign import Signer as CertifiedSigner
    from sigstore.sign import SigningContext

    file, setting = _location(settings, root)
    trust = _trust_config(file, setting)
    token, login = _job_token(), None
    if is_user := token is None:
        login = _logins.pop(file, None)
        if login is None or login[1] < datetime.now(UTC):
            token = _user_token(trust)
    statement = Statement(_signed_statement(name, files, (KEYLESS_SIGNATURE,)))

    def sign() -> tuple[CertifiedSigner, str]:
        if token:
            signer = CertifiedSigner(token, SigningContext.from_trust_config(trust))
        else:
            assert login
            signer = login[0]
        return signer, signer.sign_dsse(statement).to_json()

    try:
        signer, bundle = _in_time(sign)
        data = (json.dumps(json.loads(bundle), indent=1, sort_keys=True) + "\n").encode()
        # A release cannot be signed again, so it must not be published with an answer that no one can verify.
        signature = read_keyless(data)
        signature.require_valid(trust, "the instance that answered")
    except Exception as error:  # the library and its HTTP client have no common base for their errors
        problem = " ".join(str(error).split()).replace(str(token), "TOKEN") or type(error).__name__
        raise Refused(
            _SETTING,
            found=f"sigstore did not sign the release: {problem[:400]}",
            expected="a certificate for the identity, and an entry in the transparency log",
            remedy="run again; mergegate publishes nothing before it has the signature",
        ) from None
    if is_user:
        certificate = signature.parsed.verification_material.certificate.x509()
        _logins[file] = signer, certificate.not_valid_after_utc - _SIGNING_TIME
    return data


def _in_time(work: Callable[[], _Result]) -> _Result:
    """Return the result of ``work``. It runs in a thread, because the library's HTTP client has no time limit."""
    result: Future[_Result] = Future()

    def run() -> None:
        try:
            result.set_result(work())
        except BaseException as error:
            result.set_exception(error)

    thread = Thread(target=run, daemon=True)
    thread.start()
    thread.join(seconds := _SIGNING_TIME.total_seconds())
    if not result.done():
        raise TimeoutError(f"no answer within {format_duration(seconds)}")
    return result.result()


def expected_signer(settings: SigstoreSettings, root: Path) -> str:
    """Return who will sign a release, as far as it can be determined without a network request.

    Raise InvalidInput if a keyless signature will not be possible: the library is missing, the trust configuration is
    not valid, or there is neither an identity of a CI job nor a user at a terminal.
    """
    if settings.trust_config:
        _trust_config(*_location(settings, root))
    else:
        _require_library()
    environment = os.environ
    if token := environment.get(TOKEN_VARIABLE):
        _require_token(token)
        claims = token_claims(token)
        left = format_duration(max(0.0, float(claims["exp"]) - time.time()))
        return f"{_token_signer(claims)}, by the token in {TOKEN_VARIABLE}, which is valid for {left}"
    if environment.get("GITHUB_ACTIONS"):
        if not (environment.get("ACTIONS_ID_TOKEN_REQUEST_TOKEN") and environment.get("ACTIONS_ID_TOKEN_REQUEST_URL")):
            raise _no_identity("a job of GitHub Actions without the permission to request an identity")
        workflow = environment.get("GITHUB_WORKFLOW_REF", "")
        if not workflow:
            return "the workflow of this job in GitHub Actions"
        server = environment.get("GITHUB_SERVER_URL", "https://github.com")
        return f"{Signer(f'{server}/{workflow}', _GITHUB_ISSUER)}, unless the job runs a reusable workflow"
    if account := environment.get("GOOGLE_SERVICE_ACCOUNT_NAME"):
        return str(Signer(account, "https://accounts.google.com"))
    if product_name() in ("Google", "Google Compute Engine"):
        return "the service account of this virtual machine (issuer https://accounts.google.com)"
    for variable, program, service in (
        ("BUILDKITE", "buildkite-agent", "Buildkite"),
        ("CIRCLECI", "circleci", "CircleCI"),
    ):
        if environment.get(variable):
            if shutil.which(program) is None:
                raise _no_identity(f"a job of {service} without the program {program}")
            return f"the identity of this job in {service}"
    if environment.get("GITLAB_CI"):
        raise _no_identity(f"a job of GitLab CI without {TOKEN_VARIABLE}")
    if _has_user():
        return "the user who logs in with a browser"
    raise _no_identity("no identity of a CI job, and no terminal for a login with a browser")


def _job_token() -> IdentityToken | None:
    """Return the identity of the CI job, or None if there is none."""
    from sigstore.oidc import IdentityError, detect_credential

    if token := os.environ.get(TOKEN_VARIABLE):
        return _require_token(token)
    try:
        token = detect_credential()
    except IdentityError as error:
        raise _no_identity(" ".join(str(error).split())) from None
    return _require_token(token) if token else None


def _user_token(trust: ClientTrustConfig) -> IdentityToken:
    """Let a user at the terminal log in with a browser."""
    from sigstore.oidc import Issuer

    if not _has_user():
        raise _no_identity("no identity of a CI job, and no terminal for a login with a browser")
    try:
        return Issuer(trust.signing_config.get_oidc_url()).identity_token()
    except Exception as error:  # the library and its HTTP client have no common base for their errors
        raise Refused(
            _SETTING,
            found=f"the login failed: {' '.join(str(error).split())[:400] or type(error).__name__}",
            expected="a login at the identity provider",
            remedy="run again; mergegate publishes nothing before it has the signature",
        ) from None


def _require_token(token: str) -> IdentityToken:
    from sigstore.oidc import IdentityError, IdentityToken

    try:
        return IdentityToken(token)
    except IdentityError as error:
        reasons = f"{error}: {error.__cause__}" if error.__cause__ else str(error)
        raise InvalidInput(
            f"{_SETTING}: identity token",
            found=" ".join(reasons.split()).replace(token, "TOKEN"),
            expected="an OIDC token with the audience sigstore that has not expired",
            remedy=f"request a new token with this audience, and set {TOKEN_VARIABLE} or let the job request it",
        ) from None


def _token_signer(claims: Mapping[str, Any]) -> Signer:
    """Return the signer that Fulcio is expected to certify for a token.

    Certificates of CI jobs name the workflow or the configuration that ran, not the subject of the token.
    """
    issuer = str(claims["iss"])
    if issuer == _GITHUB_ISSUER and "job_workflow_ref" in claims:
        return Signer(f"https://github.com/{claims['job_workflow_ref']}", issuer)
    if "ci_config_ref_uri" in claims:
        return Signer(f"https://{claims['ci_config_ref_uri']}", issuer)
    return Signer(str(claims.get("email") or claims["sub"]), issuer)


def _has_user() -> bool:
    return all(stream is not None and stream.isatty() for stream in (sys.stdin, sys.stderr))


def _no_identity(found: str) -> InvalidInput:
    return InvalidInput(
        _SETTING,
        found=found,
        expected="an OIDC identity that signs the release",
        remedy=f"GitHub Actions: set 'permissions: id-token: write'; GitLab CI: set 'id_tokens: {TOKEN_VARIABLE}: aud: "
        f"sigstore'; elsewhere: export {TOKEN_VARIABLE}, or run at a terminal (see {_HOW_TO})",
    )


def _location(settings: SigstoreSettings, root: Path) -> tuple[Path | None, str]:
    file = settings.trust_config
    return (root / file, f"{_SETTING}.trust_config") if file else (None, _SETTING)


def _require_library() -> None:
    if find_spec("sigstore") is None:
        raise InvalidInput(
            _SETTING,
            found="the library sigstore is not installed",
            expected="sigstore, which signs and verifies without a key",
            remedy=pip_command("mergegate[sigstore]"),
        )


def _trust_config(file: Path | None, setting: str, *, offline: bool = False) -> ClientTrustConfig:
    """Return the services and the trusted keys of an instance."""
    _require_library()
    from sigstore.models import ClientTrustConfig
    from sigstore.verify import Verifier

    if file is None:
        logging.getLogger("sigstore._internal.tuf").setLevel(logging.ERROR)  # it warns about every offline use
        try:
            return ClientTrustConfig.production(offline=offline)
        except Exception as error:  # the library has no common base for its errors
            cause = error.__cause__ or error
            reason = str(cause)[:200] or type(cause).__name__
            raise Refused(
                setting,
                found=f"the trusted root of the public instance of sigstore cannot be updated: {reason}",
                expected="an answer from sigstore's TUF repository",
                remedy="run again later; to verify without a network, pass --offline or --trust-config",
            ) from None
    expected = "sigstore's client trust configuration (JSON), with a trusted root and a signing configuration"
    text = read_text(file, 16 << 20, expected=expected)
    try:
        trust = ClientTrustConfig.from_json(text)
        Verifier(trusted_root=trust.trusted_root)
        _ = trust.signing_config
    except Exception as error:  # the library has no common base for its errors
        raise InvalidInput(
            f"{setting}: {file}",
            found=f"not a trust configuration: {' '.join(str(error).split())[:300]}",
            expected=expected,
            remedy="get the file from the operator of the instance",
        ) from None
    return trust


@dataclass(frozen=True)
class _CertificateOf:
    """Policy of the library: the verified certificate is one of ``signer``."""

    signer: Signer

    def verify(self, cert: x509.Certificate) -> None:
        if (certified := _certified_signer(cert)) != self.signer:
            raise ValueError(f"the certificate is for {certified}; expected {self.signer}")


def _certified_signer(certificate: x509.Certificate) -> Signer:
    """Return the identity and the issuer in a certificate. Raise ValueError if it does not name exactly one."""
    try:
        extensions = certificate.extensions
        names = extensions.get_extension_for_class(x509.SubjectAlternativeName).value
        issuer = extensions.get_extension_for_oid(_ISSUER).value
        identities = [
            *names.get_values_for_type(x509.RFC822Name),
            *names.get_values_for_type(x509.UniformResourceIdentifier),
        ]
        if len(identities) != 1 or len(names) != 1 or not isinstance(issuer, x509.UnrecognizedExtension):
            raise ValueError(f"it names {len(names)} identities")
        return Signer(identities[0], issuer.value.decode())
    except (ValueError, x509.ExtensionNotFound, x509.DuplicateExtension, x509.UnsupportedGeneralNameType) as error:
        raise ValueError(f"its certificate does not name one identity and its issuer: {str(error)[:200]}") from None
