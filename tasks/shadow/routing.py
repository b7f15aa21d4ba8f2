"""Where requests go now: one small file that the proxy follows, and that whoever decides writes."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict

from mergegate.merge_core.files import Damaged, read_state, state_directory, write_state

Serving = Literal["watch", "promoted", "rolled back", "killed"]
_LOOK_EVERY_S = 1.0


class Routing(BaseModel):
    """Where requests go now, of which candidate, since when and why."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    candidate: str  # its version, and the salt of who is on its arm
    mode: Literal["mirror", "split"] = "mirror"
    share: float = 0.1
    serving: Serving = "watch"
    since: float  # Unix time since which it is watched, or was decided
    why: str = ""

    @property
    def watching(self) -> bool:
        """Whether the candidate sees a share of the traffic and nothing is decided."""
        return self.serving == "watch"


def read_routing(file: Path) -> Routing | None:
    """What the file says; None where there is none that can be believed."""
    found = read_state(file, Routing.model_validate_json)
    return None if isinstance(found, Damaged) else found


def write_routing(file: Path, routing: Routing) -> None:
    """Put it there in one step."""
    state_directory(file.parent, private=True)
    write_state(file, routing.model_dump_json(indent=1).encode())


class FollowedRouting:
    """The routing as a running proxy has it: the file is looked at once a second at most.

    Args:
        file: That others write.
        first: What holds until the file says something.
    """

    def __init__(self, file: Path, first: Routing) -> None:
        self._file, self._now, self._looked = file, first, 0.0
        self._seen: tuple[int, int] | None = None

    def now(self) -> Routing:
        """What holds now."""
        if time.monotonic() - self._looked >= _LOOK_EVERY_S:
            self._looked = time.monotonic()
            if (seen := self._identity()) != self._seen:
                self._seen = seen
                self._now = read_routing(self._file) or self._now
        return self._now

    def decide(self, serving: Serving, why: str) -> None:
        """Change it here and for everybody who follows. Where the disk refuses, it holds here all the same."""
        self._now = self._now.model_copy(update={"serving": serving, "why": why, "since": time.time()})
        try:
            write_routing(self._file, self._now)
            self._seen = self._identity()
        except OSError:
            self._seen = self._identity()

    def _identity(self) -> tuple[int, int] | None:
        try:
            status = self._file.stat()
        except OSError:
            return None
        return status.st_ino, status.st_mtime_ns
