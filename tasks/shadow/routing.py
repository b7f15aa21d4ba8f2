"""Tell a running proxy where to send requests: the routing file, and the arm of each session."""

from __future__ import annotations

import hashlib
import time
from contextlib import suppress
from pathlib import Path
from typing import Literal

from mergegate.merge_core.files import Damaged, read_state, state_directory, write_state
from mergegate.tasks.base.stage import home
from mergegate.tasks.shadow.settings import FrozenModel, ShadowSettings

Serving = Literal["watch", "promoted", "rolled back", "killed"]
_LOOK_EVERY_S = 1.0


class Routing(FrozenModel):
    """Destination of user requests, and the reason for it."""

    candidate: str  # candidate version; also the salt that assigns sessions to arms
    mode: Literal["mirror", "split"] = "mirror"
    share: float = 0.1
    serving: Serving = "watch"
    since: float  # Unix time at which watching began, or of the decision
    why: str = ""

    @property
    def watching(self) -> bool:
        """Whether the candidate receives traffic and no decision has been made."""
        return self.serving == "watch"


def routing_file(profile: str) -> Path:
    """Return the path of the profile's routing file."""
    return home() / "shadow" / f"{profile}.json"


def records_url(profile: str, settings: ShadowSettings) -> str:
    """Return the URL of the database for the profile's records. Default: a SQLite file in the home directory."""
    return settings.records or f"sqlite:///{home() / 'shadow' / f'{profile}.sqlite'}"


def read_routing(file: Path) -> Routing | None:
    """Return the routing in the file, or None if the file is missing or damaged."""
    routing = read_state(file, Routing.model_validate_json)
    return None if isinstance(routing, Damaged) else routing


def write_routing(file: Path, routing: Routing) -> None:
    state_directory(file.parent, private=True)
    write_state(file, routing.model_dump_json(indent=1).encode())


def goes_to_candidate(key: str, salt: str, share: float) -> bool:
    """Return whether a session is assigned to the candidate, which gets ``share`` (0 to 1) of all sessions.

    The assignment is sticky: the same key always gets the same arm. A larger share only adds sessions to the candidate.
    ``salt`` is the version of the candidate, so that each candidate gets different users.
    """
    position = hashlib.blake2b(f"{salt}:{key}".encode(errors="surrogatepass"), digest_size=8).digest()
    return int.from_bytes(position, "big") / 2**64 < share


class FollowedRouting:
    """Current routing of a running proxy, kept up to date with the routing file.

    Other processes may write the file, so it is checked for changes at most once per second. ``first`` applies until
    the file contains a valid routing.
    """

    def __init__(self, file: Path, first: Routing) -> None:
        self._file, self._now, self._looked = file, first, 0.0
        self._seen: tuple[int, int] | None = None

    def now(self) -> Routing:
        """Return the current routing, read from the file if it has changed."""
        if time.monotonic() - self._looked >= _LOOK_EVERY_S:
            self._looked = time.monotonic()
            if (identity := self._identity()) != self._seen:
                self._seen = identity
                self._now = read_routing(self._file) or self._now
        return self._now

    def decide(self, serving: Serving, reason: str) -> None:
        """Change the routing in this process, and write it to the file for all other processes.

        If the file cannot be written, the change still applies to this process.
        """
        self._now = self._now.model_copy(update={"serving": serving, "why": reason, "since": time.time()})
        with suppress(OSError):
            write_routing(self._file, self._now)
        self._seen = self._identity()

    def _identity(self) -> tuple[int, int] | None:
        with suppress(OSError):
            status = self._file.stat()
            return status.st_ino, status.st_mtime_ns
        return None
