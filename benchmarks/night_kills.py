"""Kill whole nightly runs again and again: the flow, the process of the models, the worker, or everything.

::

    .venv/bin/python benchmarks/night_kills.py                       # fifty kills; half an hour
    .venv/bin/python benchmarks/night_kills.py --kills 8 --seed 1 --minutes 10

``mergegate server``, ``deploy`` and ``worker`` start a server and a worker on the loopback. The script first releases
the demo undisturbed. It then starts runs from nothing, kills each one at random moments (``SIGKILL``) and triggers it
again until it has released. The release must have the bytes of the undisturbed one, no half-written file may be left,
and state must not grow with kills. Kills alternate between the flow, the process that holds the models, and the worker,
whose flow continues. Now and then, the script kills all of them together with the server. It restarts a killed worker.

Rules that ``mergegate deploy`` sets on the server end a run that died with its worker: after 90 seconds of silence, or
if a worker took the run and it never began (after ten minutes; here one, to shorten the wait).
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import cycle
from pathlib import Path
from typing import NamedTuple

from night_site import LOOK_EVERY_S, Kind, NightSite

STATE = ("store", "runs", "reports")
_SOON = "import mergegate.flows.prefect_api.automations as rules; rules.START_LIMIT_S = 60; "
_TURNS = ("flow", "models", "worker")
_MACHINE_EACH = 10  # turns between two kills of everything; each of those takes up to two minutes of silence
# States that a killed run may end in: the flow's own if it survived, or Prefect's for a dead run. If the process of the
# models dies, the run ends as if the system had killed that process for its memory.
KILLED = ("Crashed", "Invalid", "Released", "NothingNew")


class Kill(NamedTuple):
    """One kill.

    Attributes:
        whom: ``flow``, ``models``, ``worker``, or ``machine``, which means all of them and the server.
        after: Seconds since the run was triggered.
        ended: State in which the run ended.
        free: Seconds from the kill until the run had ended and its slot was free.
    """

    whom: str
    after: float
    ended: str
    free: float


@dataclass
class Nights:
    """Observations over all runs.

    Attributes:
        releases: Hash of every file, for each run that released.
        halves: Unfinished files that remained after a run had released.
        sizes: Bytes of the state after each of those runs.
    """

    kills: list[Kill] = field(default_factory=list)
    releases: list[dict[str, str]] = field(default_factory=list)
    halves: list[str] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)


def opened(site: NightSite) -> None:
    """Start the server, the deployments and the worker."""
    site.start_server()
    site.command("deploy", before=_SOON)
    site.start_worker()


def undisturbed(site: NightSite) -> tuple[dict[str, str], float, int]:
    """Release once without a kill; return the release, its seconds and the bytes of its state."""
    began = time.monotonic()
    ended = site.wait(site.trigger())
    if ended.state != "Released":
        raise RuntimeError(f"{ended}\n{site.log()}")
    return site.released(), time.monotonic() - began, site.size(*STATE)


def disturbed(
    site: NightSite,
    turns: Iterator[str],
    *,
    kills: int,
    seconds: float,
    rng: random.Random,
    until: float = float("inf"),
) -> Nights:
    """Run from nothing and kill in turn, until ``kills`` kills have happened.

    Moments of kills are drawn from ``seconds``, the duration of an undisturbed run, which shorter runs reduce. Nothing
    is killed after ``until``, a time on the monotonic clock.
    """
    seen, takes = Nights(), {"from nothing": seconds, "going on": seconds}
    while len(seen.kills) < kills and time.monotonic() < until:
        site.forget()
        ended, whom, begins = "", "", "from nothing"
        while ended not in ("Released", "NothingNew"):
            run, began = site.trigger(), time.monotonic()
            more = len(seen.kills) < kills and time.monotonic() < until
            whom = (whom or next(turns)) if more else ""  # a target that was not there in time is due again
            killed_at = _killed(site, run, whom, rng.uniform(0, takes[begins]), rng) if whom else None
            if killed_at is not None and whom in ("worker", "machine"):
                if whom == "machine":
                    site.start_server()
                site.start_worker()
            ended = site.wait(run).state
            if killed_at is None:
                takes[begins] = min(takes[begins], time.monotonic() - began)
            else:
                seen.kills.append(Kill(whom, killed_at - began, ended, time.monotonic() - killed_at))
                print(f"kill {len(seen.kills)}: {seen.kills[-1]}", file=sys.stderr, flush=True)
                whom, begins = "", "going on"  # a continued run does not repeat finished work
            if ended not in (KILLED if killed_at is not None else ("Released", "NothingNew")):
                seen.unexpected.append(
                    f"{seen.kills[-1] if killed_at is not None else 'no process killed'}: {site.state(run)}"
                )
        seen.releases.append(site.released())
        seen.halves += site.halves()
        seen.sizes.append(site.size(*STATE))
    return seen


def all_turns() -> Iterator[str]:
    """Yield the target of each kill, endlessly."""
    for number, whom in enumerate(cycle(_TURNS), start=1):
        yield "machine" if number % _MACHINE_EACH == 0 else whom


def _killed(site: NightSite, run: str, whom: str, after: float, rng: random.Random) -> float | None:
    """Kill after the run has lasted ``after`` seconds; return the moment, or None if the run had ended by then.

    The function waits for a flow or models to exist. A worker or a machine also dies before there is a flow.
    """
    due = time.monotonic() + after
    victim: Kind = "worker" if whom in ("worker", "machine") else "flow" if whom == "flow" else "models"
    while time.monotonic() < due or not site.running(victim):
        if site.state(run) is not None:
            return None
        time.sleep(LOOK_EVERY_S)
    if victim == "models":
        time.sleep(rng.uniform(0, 1))  # to hit it at a random point of its work
    kinds: tuple[Kind, ...] = ("server", "worker", "flow", "models") if whom == "machine" else (victim,)
    if not sum(site.kill(kind) for kind in kinds):
        return None
    return time.monotonic()


def told(seen: Nights, wanted: dict[str, str], size: int, left: int) -> tuple[list[tuple[str, str]], bool]:
    """Return the rows of a table, and whether all results are as expected."""
    same = sum(release == wanted for release in seen.releases)
    of = Counter(kill.whom for kill in seen.kills)
    longest = {whom: max(kill.free for kill in seen.kills if kill.whom == whom) for whom in of}
    most = max(seen.sizes, default=0)
    rows = [
        ("kills, and scheduled runs that released", f"{len(seen.kills)}, {len(seen.releases)}"),
        *(
            (f"of {whom}", f"{count}; the run has ended after at most {longest[whom]:.0f} s")
            for whom, count in of.items()
        ),
        ("releases with the bytes of the undisturbed one", f"{same} of {len(seen.releases)}"),
        ("half-written files left in store and target", str(len(seen.halves))),
        ("runs that ended in an unexpected state", str(len(seen.unexpected))),
        ("state: undisturbed, largest", f"{size / 1e6:.2f} MB, {most / 1e6:.2f} MB"),
        ("processes left after the shutdown", str(left)),
    ]
    fine = same == len(seen.releases) > 0 and not (seen.halves or seen.unexpected or left) and most <= 1.5 * size
    return rows, fine


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--minutes", type=float, default=120, help="No kill after so many.")
    parser.add_argument("--place", type=Path, help="Where the project is made, and stays; else a temporary directory.")
    given = parser.parse_args()
    until, rng = time.monotonic() + 60 * given.minutes, random.Random(given.seed)
    with (
        tempfile.TemporaryDirectory(prefix="mergegate-nights-") as temporary,
        NightSite(given.place or Path(temporary) / "project") as site,
    ):
        opened(site)
        wanted, seconds, size = undisturbed(site)
        print(f"undisturbed: {seconds:.0f} s", file=sys.stderr, flush=True)
        seen = disturbed(site, all_turns(), kills=given.kills, seconds=seconds, rng=rng, until=until)
        left = len(site.ended())
    rows, fine = told(seen, wanted, size, left)
    print("| | |\n| --- | --: |")
    for said, value in rows:
        print(f"| {said} | {value} |")
    for line in (*seen.unexpected, *seen.halves):
        print(line, file=sys.stderr)
    sys.exit(0 if fine else 1)


if __name__ == "__main__":
    main()
