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
from mergegate.tasks.shadow.recorded_traffic import RecordedPair, ShadowRecord  # noqa: E402
from mergegate.tasks.shadow.records import open_records  # noqa: E402

VERSION = "1a2b3c4d5e6f"
HOUR = 3600.0


@dataclass
class WatchedProject:
    """A project whose profile ``watched`` has a section ``shadow``."""

    project: Project
    began: float

    @property
    def routing_file(self) -> Path:
        return self.project.home / "shadow" / "watched.json"

    @property
    def routing(self) -> Routing:
        routing = read_routing(self.routing_file)
        assert routing is not None
        return routing

    def watch(self, **changes: Any) -> None:
        """Write the initial routing, as a proxy does at its start."""
        defaults = {"candidate": VERSION, "mode": "mirror", "share": 0.1, "serving": "watch", "why": ""}
        write_routing(self.routing_file, Routing(**{**defaults, "since": self.began, **changes}))

    def record(self, pairs: Sequence[RecordedPair], rows: Sequence[ArmRow] = ()) -> None:
        """Write records, as the proxy does."""
        records = []
        for pair in pairs:
            common = {"exchange": pair.request_id, "candidate": VERSION, "request_id": "r", "session": pair.session}
            common |= {"at": pair.at, "path": pair.path}
            for arm, role, answer in (("parent", "answer", pair.parent), ("candidate", "copy", pair.candidate)):
                fields = {"arm": arm, "role": role, "request": pair.request if role == "answer" else b""}
                fields |= {"status": answer.status, "response": answer.body, "error": answer.error}
                fields |= {"seconds": answer.seconds, "first_byte": answer.first_byte}
                records.append(ShadowRecord(**common, **fields))
        for number, row in enumerate(rows):
            common = {"exchange": f"row-{number}-{row.at}", "candidate": VERSION, "request_id": "r", "session": "s"}
            records.append(ShadowRecord(**common, path="/v1/chat/completions", request=b"", **row._asdict()))
        with open_records(f"sqlite:///{self.project.home / 'shadow' / 'watched.sqlite'}") as database:
            database.write(records)

    def look(self, *arguments: str) -> Any:
        return self.project.mergegate("shadow", "evaluate", "profiles/watched.yaml", *arguments)

    def decide(self, command: str, *arguments: str) -> Any:
        return self.project.mergegate("shadow", command, "profiles/watched.yaml", *arguments)


def watched(directory: Path, url: str, *, hours: float = 30.0, **shadow: Any) -> WatchedProject:
    """Create a project that has shadowed a release for `hours`, with a judge at `url`.

    ``shadow`` holds keys that override the ``shadow`` section.
    """
    project = make_project(directory)
    content = yaml.safe_load((project.root / "profiles" / "demo.yaml").read_text())
    servers = {name: {"url": "http://127.0.0.1:1/v1"} for name in ("parent", "candidate")}
    judge = {"url": url, "model": "judge-1", "attempts": 1}
    content |= {"name": "watched", "shadow": {**servers, "judge": judge, "alias": None, **shadow}}
    (project.root / "profiles" / "watched.yaml").write_text(yaml.safe_dump(content))
    watched_project = WatchedProject(project, time.time() - hours * HOUR)
    watched_project.watch()
    return watched_project


def rows(began: float, count: int, *, hours: float = 30.0, failing: float = 0.0, first: float = 0.02) -> list[ArmRow]:
    """Return requests of both arms, spread over `hours`.

    ``failing`` is the share of requests that the candidate fails, and ``first`` its time to the first byte in seconds.
    """
    result = []
    for number in range(count):
        at = began + hours * HOUR * (number + 1) / count
        fails = failing > 0 and number % round(1 / failing) == 0
        result.append(ArmRow(at, "parent", "answer", 200, "", False, 0.02 + 0.0001 * (number % 50), 0.3))
        result.append(
            ArmRow(at, "candidate", "copy", 503 if fails else 200, "", False, first + 0.0001 * (number % 50), 0.3)
        )
    return result
