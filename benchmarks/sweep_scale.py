"""Estimate the duration and the cost of a sweep by its number of workers.

::

    .venv/bin/python benchmarks/sweep_scale.py measure --work WORK [--workers 1,2]   # demo-sweep, each from nothing
    .venv/bin/python benchmarks/sweep_scale.py simulate --home HOME [--home HOME]    # trials of sweeps that ran
    .venv/bin/python benchmarks/sweep_scale.py price --home HOME --trial-minutes 7.2 --per-hour 2.5

The simulation covers time alone. The product's own search and sampler decide the candidates of a generation. The
duration of each trial is drawn from the trials in a ledger. The time until a worker is ready (libraries, the first
network, documents as tokens) comes from its first trial. Each worker takes the next trial. A generation begins when the
previous one is over. The hand-written recipe comes first, alone, and the two trials of the confirmation last.
"""

from __future__ import annotations

import argparse
import heapq
import json
import os
import random
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

PROJECT = Path(__file__).resolve().parents[1]
START = "from mergegate.flows.cli import main; main()"
FIRST = ("write", "questions")  # parts of a worker's first trial that no other trial of the search has
WORKERS = (1, 2, 4, 8, 16, 32, 64)
REPEATS = 200


class Measured(NamedTuple):
    """Wall-clock seconds of a sweep's trials.

    Args:
        trials: Trials of the search, except each worker's first.
        ready: Extra seconds of a worker's first trial.
        confirmation: Trials of the confirmation.
        overhead: Share of the time of trials outside of plan, merge, load, questions and score.
    """

    trials: tuple[float, ...]
    ready: float
    confirmation: tuple[float, ...]
    overhead: float


def measured_in(home: Path) -> Measured:
    """Return the measurements in the ledger below ``home``."""
    (journal,) = home.glob("sweeps/*/trials.journal")
    records = []
    for line in journal.read_text(errors="replace").splitlines():
        if '"seconds"' in line:
            found = json.loads(line[line.index("{") : line.rindex("}") + 1])
            records.append(found.get("record", found))
    usual = statistics.median(len(one["sheet"][0][-1]) for one in records if one["sheet"] and not one["dropped"])
    larger = [one for one in records if one["sheet"] and len(one["sheet"][0][-1]) > usual]
    search = [one["seconds"] for one in records if one not in larger]
    later = [one for one in search if "write" not in one]
    trials = [sum(one.values()) for one in later]
    first = [sum(one.values()) for one in search if "write" in one]
    again = [sum(spent for part, spent in one["seconds"].items() if part not in FIRST) for one in larger]
    overhead = sum(one.get("overhead", 0.0) for one in later) / sum(trials)
    ready = statistics.mean(first) - statistics.mean(trials)
    return Measured(tuple(trials), ready, tuple(again) or (4 * max(trials),) * 2, overhead)


def generations(sampler: str, dimensions: int, trials: int, population: int | None) -> list[int]:
    """Return how many candidates the product's search issues at a time, with the hand-written recipe first."""
    from mergegate.merge_core.files import RecordJournal
    from mergegate.tasks.sweep import (
        HandWritten,
        Ledger,
        MetricKey,
        SearchProblem,
        SweepSettings,
        TrialRequest,
        TrialScores,
        make_objective,
        make_space,
        search,
    )

    names = [f"weight{number}" for number in range(dimensions)]
    models = [{"model": f"m{i}", "parameters": {"weight": f"${name}"}} for i, name in enumerate(names)]
    settings = SweepSettings.model_validate(
        {
            "parameters": {name: {"low": 0.0, "high": 2.0, "start": 1.0} for name in names},
            "objective": [{"task": "task"}],
            "budget": {"trials": trials},
            "sampler": sampler,
            **({"population": population} if population else {}),
        }
    )
    handed: list[int] = []

    def score_all(requests: Sequence[TrialRequest]) -> Iterator[tuple[int, TrialScores | Exception]]:
        handed.append(len(requests))
        for number, request in enumerate(requests):
            weights = [float(model["parameters"]["weight"]) for model in request.recipe["models"]]
            score = -sum((weight - 0.7) ** 2 for weight in weights)
            yield number, TrialScores({MetricKey("task", "log_likelihood"): np.full(20, score)})

    space = make_space({"merge_method": "linear", "models": models}, settings, None, "scale.yaml")
    objective = make_objective(settings, {"task": "task"})
    ledger = Ledger(RecordJournal(None), "")
    by_hand = HandWritten("by hand", space.fill_recipe(space.start))
    search(SearchProblem(space, settings, objective, (by_hand,)), score_all, ledger)
    return handed


def time_of(sizes: Sequence[int], workers: int, measured: Measured, rng: random.Random, scale: float = 1.0) -> float:
    """Draw the wall-clock seconds of one sweep; trials last ``scale`` times as long, but workers start as quickly."""
    ready = [False] * workers
    now = 0.0
    for last, size in [*((False, size) for size in sizes), (True, 2)]:
        free = [(now, number) for number in range(workers)]
        heapq.heapify(free)
        ends = []
        for _ in range(size):
            begins, number = heapq.heappop(free)
            took = scale * rng.choice(measured.confirmation if last else measured.trials)
            ends.append(begins + took + (0.0 if ready[number] else measured.ready))
            ready[number] = True
            heapq.heappush(free, (ends[-1], number))
        now = max(ends)
    return now


def simulated(sizes: Sequence[int], workers: int, measured: Measured, scale: float = 1.0) -> float:
    """Return the mean seconds of many simulated sweeps."""
    rng = random.Random(0)
    return statistics.mean(time_of(sizes, workers, measured, rng, scale) for _ in range(REPEATS))


def show_simulation(homes: Sequence[Path], trials: int, dimensions: int) -> None:
    for home in homes:
        measured = measured_in(home)
        spread = statistics.stdev(measured.trials) / statistics.mean(measured.trials)
        mean = statistics.mean(measured.trials)
        print(f"\n{home.name}: {len(measured.trials)} trials of {mean:.2f} s (spread {100 * spread:.0f} %), ", end="")
        print(f"a worker ready after {measured.ready:.1f} s, overhead {100 * measured.overhead:.1f} %\n")
        print(f"| sampler | population | {' | '.join(map(str, WORKERS))} |")
        print(f"| --- | --- {'| --: ' * len(WORKERS)}|")
        for sampler, population in [
            ("cma", None),
            ("cma", 16),
            ("cma", 32),
            ("random", None),
            ("random", 32),
            ("random", trials),
        ]:
            sizes = generations(sampler, dimensions, trials, population)
            times = [simulated(sizes, workers, measured) for workers in WORKERS]
            cells = [f"{span(times[0])}", *(f"{span(one)} ({times[0] / one:.1f} times)" for one in times[1:])]
            usual = f"{max(sizes[1:-1] or sizes)} a generation"
            print(f"| `{sampler}` | {population or 'as it is'}: {usual} | {' | '.join(cells)} |")


def show_price(home: Path, minutes: float, per_hour: float, trials: int, dimensions: int, ready: float) -> None:
    measured = measured_in(home)
    scale = 60 * minutes / statistics.mean(measured.trials)
    own = measured._replace(ready=ready)
    print(f"\n{trials} trials of {minutes:g} min, {dimensions} coordinates, a worker ready after {ready:g} s:\n")
    print("| sampler | population | workers | hours | worker hours | money | busy |")
    print("| --- | --: | --: | --: | --: | --: | --: |")
    for sampler, population in (("cma", None), ("cma", 16), ("random", None), ("random", trials)):
        sizes = generations(sampler, dimensions, trials, population)
        work = (sum(sizes) * statistics.mean(own.trials) + 2 * statistics.mean(own.confirmation)) * scale
        for workers in (1, 4, 8, 16):
            hours = simulated(sizes, workers, own, scale) / 3600
            held = hours * workers
            print(
                f"| `{sampler}` | {population or 'as it is'} | {workers} | {hours:.1f} | {held:.1f} | "
                f"{held * per_hour:.0f} | {100 * work / 3600 / held:.0f} % |"
            )


def measure(work: Path, workers: Sequence[int]) -> None:
    """Run the demo's sweep from scratch, once for each number of workers."""
    from mergegate.flows.profile import load_profile

    own = PROJECT / "profiles"
    print("| workers | wall time of the sweep | CPU time of all processes | trials | of them scoring, together |")
    print("| --: | --: | --: | --: | --: |")
    for number in workers:
        home = work / f"workers-{number}"
        shutil.rmtree(home, ignore_errors=True)
        home.mkdir(parents=True)
        text = (own / "demo-sweep.yaml").read_text() + f"runner: {{workers: {number}}}\n"
        profile = own / f"scale-{os.getpid()}.yaml"
        profile.write_text(text)
        try:
            load_profile(profile)
            before, began = os.times(), time.monotonic()
            environment = {**os.environ, "MERGEGATE_HOME": str(home), "PYTHONPATH": str(PROJECT)}
            command = [sys.executable, "-c", START, "sweep", str(profile), "--no-release"]
            subprocess.run(command, env=environment, cwd=PROJECT, stdout=subprocess.DEVNULL, check=True)
            wall, after = time.monotonic() - began, os.times()
        finally:
            profile.unlink()
        cpu = sum(after[2:4]) - sum(before[2:4])
        found = measured_in(home)
        spent = f"{sum(found.trials):.1f} s"
        print(f"| {number} | {wall:.0f} s | {cpu:.0f} s | {len(found.trials)} | {spent} |", flush=True)


def span(seconds: float) -> str:
    """Format seconds as ``45 s``, ``3.2 min`` or ``1.4 h``."""
    if seconds < 100:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.1f} min" if seconds < 6000 else f"{seconds / 3600:.1f} h"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("measure", "simulate", "price"))
    parser.add_argument("--work", type=Path, default=Path("/tmp/sweep-scale"))
    parser.add_argument("--home", type=Path, action="append", default=[], help="MERGEGATE_HOME of a sweep that ran")
    parser.add_argument("--workers", default="1,2")
    parser.add_argument("--trials", type=int, default=100)
    parser.add_argument("--dimensions", type=int, default=14)
    parser.add_argument("--trial-minutes", type=float, default=7.2)
    parser.add_argument("--per-hour", type=float, default=2.5)
    parser.add_argument("--ready", type=float, default=120.0, help="seconds until a worker can score, when priced")
    given: Any = parser.parse_args()
    if given.what == "measure":
        measure(given.work.resolve(), [int(number) for number in given.workers.split(",")])
    elif given.what == "simulate":
        show_simulation(given.home, given.trials, given.dimensions)
    else:
        show_price(given.home[0], given.trial_minutes, given.per_hour, given.trials, given.dimensions, given.ready)


if __name__ == "__main__":
    main()
