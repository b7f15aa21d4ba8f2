"""Build a project that shadows a release, with the records that its proxy would have written."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

TESTS = Path(__file__).resolve().parents[1]
sys.path.append(str(TESTS / "flows"))

from demo_project import Project, make_project  # noqa: E402  # from the tests of flows

from mergegate.tasks.shadow import ArmRow, Routing, read_routing, write_routing  # noqa: E402
from mergegate.tasks.shadow.recorded_traffic import RecordedPair, ShadowRecord  # noqa: E402  # noqa: E402
from mergegate.tasks.shadow.records import open_records  # noqa: E402

VERSION = "1a2b3c4d5e6f"
HOUR = 3600.0


@dataclass
class Watched:
    """A project whose profile ``watched`` has a section ``shadow``."""

    project: Project
    began: float

    @property
    def routing_file(self) -> Path:
        return self.project.home / "shadow" / "watched.json"

    @property
    def routing(self) -> Routing:
        found = read_routing(self.routing_file)
        assert found is not None
        return found

    def watch(self, **otherwise: Any) -> None:
        """Write the initial routing, as a proxy does at its start."""
        said = {"candidate": VERSION, "mode": "mirror", "share": 0.1, "serving": "watch", "why": ""}
        write_routing(self.routing_file, Routing(**{**said, "since": self.began, **otherwise}))

    def record(self, pairs: Sequence[RecordedPair], rows: Sequence[ArmRow] = ()) -> None:
        """Write records, as the proxy does."""
        found = []
        for one in pairs:
            kept = {"exchange": one.request_id, "candidate": VERSION, "request_id": "r", "session": one.session}
            kept |= {"at": one.at, "path": one.path}
            for arm, role, said in (("parent", "answer", one.parent), ("candidate", "copy", one.candidate)):
                asked = one.request if role == "answer" else b""
                how = {"status": said.status, "response": said.body, "error": said.error, "seconds": said.seconds}
                found.append(ShadowRecord(**kept, arm=arm, role=role, request=asked, first_byte=said.first_byte, **how))
        for number, row in enumerate(rows):
            kept = {"exchange": f"row-{number}-{row.at}", "candidate": VERSION, "request_id": "r", "session": "s"}
            found.append(ShadowRecord(**kept, path="/v1/chat/completions", request=b"", **row._asdict()))
        with open_records(f"sqlite:///{self.project.home / 'shadow' / 'watched.sqlite'}") as records:
            records.write(found)

    def look(self, *arguments: str) -> Any:
        return self.project.mergegate("shadow", "evaluate", "profiles/watched.yaml", *arguments)

    def by_hand(self, say: str, *arguments: str) -> Any:
        return self.project.mergegate("shadow", say, "profiles/watched.yaml", *arguments)


def watched(place: Path, url: str, *, hours: float = 30.0, **shadow: Any) -> Watched:
    """Create a project that has shadowed a release for `hours`, with a judge at `url`.

    Args:
        shadow: Keys that override the ``shadow`` section.
    """
    project = make_project(place)
    content = yaml.safe_load((project.root / "profiles" / "demo.yaml").read_text())
    servers = {name: {"url": "http://127.0.0.1:1/v1"} for name in ("parent", "candidate")}
    judge = {"url": url, "model": "judge-1", "attempts": 1}
    content |= {"name": "watched", "shadow": {**servers, "judge": judge, "alias": None, **shadow}}
    (project.root / "profiles" / "watched.yaml").write_text(yaml.safe_dump(content))
    made = Watched(project, time.time() - hours * HOUR)
    made.watch()
    return made


def rows(began: float, count: int, *, hours: float = 30.0, failing: float = 0.0, first: float = 0.02) -> list[ArmRow]:
    """Return requests of both arms, spread over `hours`.

    Args:
        failing: Share of requests that the candidate fails.
        first: Time to the candidate's first byte, in seconds.
    """
    found = []
    for number in range(count):
        at = began + hours * HOUR * (number + 1) / count
        fails = failing > 0 and number % round(1 / failing) == 0
        found.append(ArmRow(at, "parent", "answer", 200, "", False, 0.02 + 0.0001 * (number % 50), 0.3))
        found.append(
            ArmRow(at, "candidate", "copy", 503 if fails else 200, "", False, first + 0.0001 * (number % 50), 0.3)
        )
    return found
