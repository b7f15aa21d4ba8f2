"""What a person has to say yes to before it is published: the settings, and what exactly is asked.

::

    publish: {to: hub, repo: acme/support, approval: true}                    # within three days
    publish: {to: hub, repo: acme/support, approval: {timeout: 12 h}}

What is asked names the release by the digest of everything that it consists of. An answer counts for that digest and
for nothing else, and ``publish`` compares it once more with what it is about to publish.
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
    """How a person is asked before a release is published."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    timeout: TimeSpan = Field(default="3 d", description="After which silence is a no: 12 h, 3 d.")

    @property
    def timeout_s(self) -> float:
        """The same in seconds."""
        return parse_duration(self.timeout, "timeout")


@dataclass(frozen=True)
class PendingRelease:
    """A release as it would be published.

    Attributes:
        version: What people will call it.
        digest: 64 hex digits over the name, size and sha256 of every file of it.
        stands: It is what is published there today: nothing would change.
    """

    version: str
    digest: str
    stands: bool


def release_digest(files: tuple[ReleaseFile, ...]) -> str:
    """64 hex digits over everything that a release consists of."""
    return merkle({file.name: (file.size, file.sha256) for file in files})


def stands_in(directory: Path, files: tuple[ReleaseFile, ...]) -> bool:
    """Whether the release in ``directory`` lists the very same files with the same hashes."""
    ours = next((file.read() for file in files if file.name == SUMS), b"")
    place = directory / SUMS
    try:
        return bool(ours) and place.stat().st_size == len(ours) and place.read_bytes() == ours
    except OSError:
        return False
