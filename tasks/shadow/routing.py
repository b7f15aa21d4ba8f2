# stand-in of h-G
"""Where requests go now: one small file that the proxy follows and whoever decides writes."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict

from merge_core.store import Damaged, read_state, state_directory, write_state


class Routing(BaseModel):
    """Where requests go now, of which candidate, since when and why."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    candidate: str
    mode: Literal["mirror", "split"] = "mirror"
    share: float = 0.1
    serving: Literal["watch", "promoted", "rolled back", "killed"] = "watch"
    since: float
    why: str = ""


def read_routing(file: Path) -> Routing | None:
    """What the file says; None where there is none that can be believed."""
    found = read_state(file, Routing.model_validate_json)
    return None if isinstance(found, Damaged) else found


def write_routing(file: Path, routing: Routing) -> None:
    """Put it there in one step."""
    state_directory(file.parent, private=True)
    write_state(file, routing.model_dump_json().encode())
