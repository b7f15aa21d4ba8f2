"""Parse sigstore bundles strictly: an unknown field is an error, because it could hide a change.

``mergegate verify`` tells without the library ``sigstore`` who claims to have signed a release.
"""

from __future__ import annotations

import re
from datetime import UTC, datetime
from typing import Annotated, Literal

from cryptography import x509
from pydantic import Field

from mergegate.tasks.publish.signature import Base64, Envelope, StrictBundle, decode_base64

_NOTE = re.compile(
    r"(?P<origin>\S[^\n]*)\n(?P<size>\d+)\n(?P<text>(?:[^\n]+\n)+)\n(?P<signatures>(?:[^\n ]+ [^\n ]+ [^\n ]+\n)+)"
)
_Number = Annotated[str, Field(pattern=r"^(0|[1-9][0-9]{0,18})$")]


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


class _Material(StrictBundle):
    certificate: _Certificate
    tlog_entries: tuple[_LogEntry, ...] = ()
    timestamp_verification_data: _Timestamps | None = None


class SigstoreBundle(StrictBundle):
    """Bundle with a certificate, the entry of a transparency log, and a signed statement."""

    media_type: Literal["application/vnd.dev.sigstore.bundle.v0.3+json"]
    verification_material: _Material
    dsse_envelope: Envelope
