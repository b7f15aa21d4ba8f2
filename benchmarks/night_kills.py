"""Pulling the plug on whole nights: flow, process of the models, worker, or everything, again and again.

::

    .venv/bin/python benchmarks/night_kills.py                       # fifty kills; half an hour
    .venv/bin/python benchmarks/night_kills.py --kills 8 --seed 1 --minutes 10

A server and a worker stand on the loopback, as ``mergegate server``, ``deploy`` and ``worker`` start them. The demo is
released once undisturbed. Then nights begin from nothing, each is killed at random moments (``SIGKILL``) and triggered
again until it has released; the release must have the bytes of the undisturbed one, nothing half-written may be left,
and state must not grow with kills. In turn are killed: the flow, the process that holds the models, the worker (whose
flow goes on), now and then all of them and the server at once. The worker is started again each time.

A run that died with its worker is ended by the rules that ``mergegate deploy`` keeps on the server: after 90 seconds of
silence, or when it was taken and never began (ten minutes; here one, so that nobody waits).
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
_SOON = "import mergegate.flows.prefect_api.automations as rules; rules.BEGIN_S = 60; "
_TURNS = ("flow", "models", "worker")
_MACHINE_EACH = 10  # turns between two of everything at once: each of those takes up to two minutes of silence
# What a run that was killed may end in: the flow's own word where it lived on, or what Prefect says of the dead. A
# models' process that is gone is told like one that the system ended for its memory.
KILLED = ("Crashed", "Invalid", "Released", "NothingNew")


class Kill(NamedTuple):
    """One kill.

    Attributes:
        whom: ``flow``, ``models``, ``worker``, or ``machine``: all of them and the server.
        after: Seconds since the run had been triggered.
        ended: State in which that run ended.
        free: Seconds from the kill until the run had ended, and its slot was free.
    """

    whom: str
    after: float
    ended: str
    free: float


@dataclass
class Nights:
    """What was seen.

    Attributes:
        releases: Of each night that released: every file's hash.
        halves: What was unfinished although a night had released.
        sizes: Bytes of the state after each of those nights.
    """

    kills: list[Kill] = field(default_factory=list)
    releases: list[dict[str, str]] = field(default_factory=list)
    halves: list[str] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)


def opened(site: NightSite) -> None:
    """Server, deployments, worker."""
    site.start_server()
    site.command("deploy", before=_SOON)
    site.start_worker()


def undisturbed(site: NightSite) -> tuple[dict[str, str], float, int]:
    """A night that nobody kills: its release, its seconds, bytes of its state."""
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
    """Nights from nothing, killed in turn, as often as it takes to have killed ``kills`` times.

    Args:
        seconds: That an undisturbed night takes: moments are drawn from these, and from fewer where one took fewer.
        until: On the monotonic clock; no kill after it.
    """
    seen, takes = Nights(), {"from nothing": seconds, "going on": seconds}
    while len(seen.kills) < kills and time.monotonic() < until:
        site.forget()
        ended, whom, begins = "", "", "from nothing"
        while ended not in ("Released", "NothingNew"):
            run, began = site.trigger(), time.monotonic()
            more = len(seen.kills) < kills and time.monotonic() < until
            whom = (whom or next(turns)) if more else ""  # who has not been there in time is due again
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
                whom, begins = "", "going on"  # what is made already is not made again
            if ended not in (KILLED if killed_at is not None else ("Released", "NothingNew")):
                seen.unexpected.append(
                    f"{seen.kills[-1] if killed_at is not None else 'nobody killed'}: {site.state(run)}"
                )
        seen.releases.append(site.released())
        seen.halves += site.halves()
        seen.sizes.append(site.size(*STATE))
    return seen


def all_turns() -> Iterator[str]:
    """Whom, for ever."""
    for number, whom in enumerate(cycle(_TURNS), start=1):
        yield "machine" if number % _MACHINE_EACH == 0 else whom


def _killed(site: NightSite, run: str, whom: str, after: float, rng: random.Random) -> float | None:
    """Kill when the run has been going on for ``after`` seconds; the moment, None when it had ended before.

    Flow and models are waited for to exist. A worker or a machine also dies before there is a flow.
    """
    due = time.monotonic() + after
    victim: Kind = "worker" if whom in ("worker", "machine") else "flow" if whom == "flow" else "models"
    while time.monotonic() < due or not site.running(victim):
        if site.state(run) is not None:
            return None
        time.sleep(LOOK_EVERY_S)
    if victim == "models":
        time.sleep(rng.uniform(0, 1))  # into whatever it does then
    kinds: tuple[Kind, ...] = ("server", "worker", "flow", "models") if whom == "machine" else (victim,)
    if not sum(site.kill(kind) for kind in kinds):
        return None
    return time.monotonic()


def told(seen: Nights, wanted: dict[str, str], size: int, left: int) -> tuple[list[tuple[str, str]], bool]:
    """Rows of a table, and whether all is as it should be."""
    same = sum(release == wanted for release in seen.releases)
    of = Counter(kill.whom for kill in seen.kills)
    longest = {whom: max(kill.free for kill in seen.kills if kill.whom == whom) for whom in of}
    most = max(seen.sizes, default=0)
    rows = [
        ("kills, over nights that released", f"{len(seen.kills)}, over {len(seen.releases)}"),
        *(
            (f"of {whom}", f"{count}; the run has ended after at most {longest[whom]:.0f} s")
            for whom, count in of.items()
        ),
        ("releases with the bytes of the undisturbed one", f"{same} of {len(seen.releases)}"),
        ("half-written things left in store and target", str(len(seen.halves))),
        ("runs that ended in a state that nobody expects", str(len(seen.unexpected))),
        ("state: undisturbed, largest", f"{size / 1e6:.2f} MB, {most / 1e6:.2f} MB"),
        ("processes left when all were told to end", str(left)),
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
