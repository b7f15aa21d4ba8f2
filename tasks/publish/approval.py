"""Define manual approval of a release: its settings, and the content that is approved.

::

    publish: {to: hub, repo: acme/support, approval: true}                    # within three days
    publish: {to: hub, repo: acme/support, approval: {timeout: 12 h}}

The question to the reviewer names the release by the digest of all its files. The answer is valid for that digest only,
and ``publish`` compares the digest with the release again before it publishes.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field

from mergegate.merge_core.wording import parse_duration
from mergegate.tasks.publish.content import SUMS, ReleaseFile
from mergegate.tasks.stage import TimeSpan
from mergegate.tasks.store import merkle


class ApprovalSettings(BaseModel):
    """Manual approval before a release is published."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    timeout: TimeSpan = Field(default="3 d", description="After which silence is a no: 12 h, 3 d.")

    @property
    def timeout_s(self) -> float:
        """Timeout in seconds."""
        return parse_duration(self.timeout, "timeout")


@dataclass(frozen=True)
class PendingRelease:
    """A release that is ready to be published.

    Attributes:
        version: Version name.
        digest: 64 hex digits over the name, size and sha256 of every file.
        is_current: Whether exactly this release is already the published one, so that nothing would change.
    """

    version: str
    digest: str
    is_current: bool


def release_digest(files: tuple[ReleaseFile, ...]) -> str:
    """Return a digest (64 hex digits) of all files of a release."""
    return merkle({file.name: (file.size, file.sha256) for file in files})


def is_published_in(directory: Path, files: tuple[ReleaseFile, ...]) -> bool:
    """Return whether the release in ``directory`` has the same files with the same hashes."""
    expected = next((file.read() for file in files if file.name == SUMS), b"")
    path = directory / SUMS
    try:
        return bool(expected) and path.stat().st_size == len(expected) and path.read_bytes() == expected
    except OSError:
        return False
