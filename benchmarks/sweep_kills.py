"""Kill a sweep at random moments, a given number of times, and restart it until it ends.

::

    .venv/bin/python benchmarks/sweep_kills.py                      # the demo's sweep, killed twenty times
    .venv/bin/python benchmarks/sweep_kills.py --runner dask        # on two workers of Dask
    .venv/bin/python benchmarks/sweep_kills.py --kills 3 --seed 1 --trials 20

The script sweeps the demo once undisturbed. It then sweeps it in another project, where it sends ``SIGKILL`` to the
process of the command: one time in five during startup, else during the trials. Trials (points and scores, bit for
bit), the winner's file and the content of the ledger must be the same, and no process may be left running. Notes of
every trial that a model process began and ended show which trials were scored more than once.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from kills import watched_environment

PROJECT = Path(__file__).resolve().parent.parent
RUNNERS = {"local": "", "dask": "runner: {kind: dask, workers: 2}\n", "ray": "runner: {kind: ray, workers: 2}\n"}
SWEPT = "profiles/demo-sweep.yaml"
GONE_WITHIN_S = 120.0
_LOOK_EVERY = 0.01  # seconds
_IN_STARTING = 0.2  # share of the kills during startup
_START = "from mergegate.flows.cli import main; main()"

# Imported by every Python process that finds it. It notes the start and end of each trial and its scores.
SPY = """
import fcntl, functools, importlib.abc, importlib.util, json, os, signal, sys, threading

NOTES = os.environ.get("MERGEGATE_KILLS_NOTES")
DEATHS = os.environ.get("MERGEGATE_KILLS_WORKERS")  # a file with a byte for each worker that is to die

def note(*words):
    descriptor = os.open(NOTES, os.O_WRONLY | os.O_APPEND)
    os.write(descriptor, (" ".join(map(str, words)) + "\\n").encode())
    os.close(descriptor)

def worker_dies(score_trial):
    @functools.wraps(score_trial)
    def deadly(setting, request):
        descriptor = os.open(DEATHS, os.O_RDWR)
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        if left := os.fstat(descriptor).st_size:
            os.ftruncate(descriptor, left - 1)
            note("dies", "-", os.getpid())
            threading.Timer(0.05, os.kill, (os.getpid(), signal.SIGKILL)).start()
        os.close(descriptor)
        return score_trial(setting, request)
    return deadly

def watch_trials(module):
    from mergegate.tasks.sweep.study import request_key
    if DEATHS:
        module.score_trial = worker_dies(module.score_trial)
    score = module._score
    @functools.wraps(score)  # by that name it travels between processes
    def watched(setting, request, on_progress):
        key = request_key(request)
        note("begin", key, os.getpid())
        answer = score(setting, request, on_progress)
        note("end", key, os.getpid())
        return answer
    module._score = watched

def watch_search(module):
    search = module.search
    @functools.wraps(search)
    def watched(*arguments, **more):
        study = search(*arguments, **more)
        trials = [[dict(one.point), [score.hex() for score in one.scores], one.documents, one.dropped, one.problem]
                  for one in study.trials]
        with open(NOTES + "-trials", "w") as file:
            json.dump(trials, file)
        return study
    module.search = watched

WATCHED = {"mergegate.tasks.sweep.trial": watch_trials, "mergegate.tasks.sweep.search": watch_search}

class Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name not in WATCHED:
            return None
        watch = WATCHED.pop(name)
        spec = importlib.util.find_spec(name)
        execute = spec.loader.exec_module
        def and_watch(module):
            execute(module)
            watch(module)
        spec.loader.exec_module = and_watch
        return spec

if NOTES:
    sys.meta_path.insert(0, Finder())
"""


class Note(NamedTuple):
    """A line that the spy wrote."""

    what: str  # 'begin', 'end', or 'dies' for a worker in the middle of its next trial
    key: str  # of the trial: recipe, set and race
    process: int


class Kill(NamedTuple):
    """One kill.

    Args:
        trials: Number of trials that had begun since the run started.
        gone: Seconds until no process of the run was left.
    """

    trials: int
    gone: float


@dataclass
class Project:
    """A directory with the demo's sweep, its own state, and notes of the scored trials."""

    root: Path
    environment: dict[str, str] = field(default_factory=dict)
    peak: int = 0  # bytes of the largest process among runs that ended by themselves

    @staticmethod
    def make(root: Path, runner: str, trials: int, deaths: int = 0) -> Project:
        """Create the project in an empty directory that shares the demo's models and data.

        ``deaths`` is the number of workers that die in the middle of a trial.
        """
        (root / "profiles").mkdir(parents=True)
        (root / "spy").mkdir()
        (root / "spy" / "sitecustomize.py").write_text(SPY)
        text = (PROJECT / SWEPT).read_text() + RUNNERS[runner]
        (root / SWEPT).write_text(text.replace("trials: 60", f"trials: {trials}"))
        (root / "profiles" / "demo").symlink_to(PROJECT / "profiles" / "demo")
        (root / "notes").touch()  # the confined process may write to this file but cannot create one
        own = watched_environment(root)
        if deaths:
            own["MERGEGATE_KILLS_WORKERS"] = str(root / "deaths")
            (root / "deaths").write_bytes(b"x" * deaths)
        return Project(root, own)

    def start(self) -> subprocess.Popen[bytes]:
        """Start a sweep without a release, in its own session."""
        command = [sys.executable, "-c", _START, "sweep", SWEPT, "--no-release"]
        with (self.root / "output").open("ab") as output:
            return subprocess.Popen(
                command, cwd=self.root, env=self.environment, stdout=output, stderr=output, start_new_session=True
            )

    def notes(self, what: str) -> list[Note]:
        """Return all notes so far, of all runs."""
        words = (line.split() for line in (self.root / "notes").read_text().splitlines())
        found = (Note(said, key, int(pid)) for said, key, pid in words)
        return [note for note in found if note.what == what]

    def running(self) -> list[int]:
        """Return the processes of this project's runs, which write their notes to this project."""
        mark, found = f"MERGEGATE_KILLS_NOTES={self.root / 'notes'}".encode(), []
        for entry in Path("/proc").iterdir():
            try:
                if entry.name.isdigit() and mark in (entry / "environ").read_bytes().split(b"\0"):
                    found.append(int(entry.name))
            except OSError:  # it ended, or belongs to another user
                continue
        return found

    def wait_until_gone(self) -> float:
        """Return the seconds until no process is left, or infinity if one stays."""
        began = time.monotonic()
        while self.running():
            if time.monotonic() - began > GONE_WITHIN_S:
                return float("inf")
            time.sleep(_LOOK_EVERY)
        return time.monotonic() - began

    def ended(self, run: subprocess.Popen[bytes]) -> None:
        """Wait for an undisturbed run to end, and raise unless it confirms a winner or correctly reports none."""
        _, status, usage = os.wait4(run.pid, 0)
        run.returncode = os.waitstatus_to_exitcode(status)
        self.peak = max(self.peak, usage.ru_maxrss * 1024)
        if run.returncode not in (0, 3):
            raise RuntimeError((self.root / "output").read_text())

    def trials(self) -> list[Any]:
        """Return points, scores and shares of documents of the search that ended."""
        found: list[Any] = json.loads((self.root / "notes-trials").read_text())
        return found

    def ledger(self) -> list[dict[str, Any]]:
        """Return the ledger's records of trials, without their durations."""
        (journal,) = (self.root / ".mergegate" / "sweeps").glob("*/trials.journal")
        records = [json.loads(line.partition(" ")[2]) for line in journal.read_text().splitlines()]
        return [
            {name: value for name, value in record.items() if name not in ("seconds", "used", "study")}
            for record in records
            if "scored" in record
        ]

    def winner(self) -> bytes:
        """Return the file of the winner's recipe, or nothing if there is no winner."""
        file = self.root / ".mergegate" / "sweeps" / "demo-sweep-winner.yaml"
        return file.read_bytes() if file.exists() else b""

    def size(self, *below: str) -> int:
        """Return the bytes in files below these directories of the state."""
        places = [self.root / ".mergegate" / name for name in below]
        return sum(file.stat().st_size for place in places for file in place.rglob("*") if file.is_file())


def undisturbed(root: Path, runner: str = "local", trials: int = 60, deaths: int = 0) -> Project:
    """Sweep the demo with a command that is not killed, while ``deaths`` of its workers die."""
    project = Project.make(root, runner, trials, deaths)
    project.ended(project.start())
    return project


def disturbed(
    root: Path, *, kills: int, seed: int, runner: str = "local", trials: int = 60
) -> tuple[Project, list[Kill]]:
    """Kill the demo's sweep and start it again, until it has been killed ``kills`` times."""
    project, done, rng = Project.make(root, runner, trials), list[Kill](), random.Random(seed)
    while len(done) < kills:
        before = len(project.notes("begin"))
        left = max(1, trials - len({note.key for note in project.notes("end")}))
        if rng.random() < _IN_STARTING:
            trials_first, pause = 0, rng.uniform(0, 8)
        else:
            trials_first, pause = rng.randint(1, max(1, 2 * left // (kills - len(done) + 1))), rng.uniform(0, 0.3)
        run = project.start()
        while run.poll() is None and len(project.notes("begin")) < before + trials_first:
            time.sleep(_LOOK_EVERY)
        time.sleep(pause)
        run.kill()  # a run that ended on its own does not count
        if run.wait() != -signal.SIGKILL:
            break
        done.append(Kill(len(project.notes("begin")) - before, project.wait_until_gone()))
        print(f"kill {len(done)}: {done[-1]}", file=sys.stderr, flush=True)
    project.ended(project.start())
    return project, done


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--trials", type=int, default=60)
    parser.add_argument("--runner", choices=tuple(RUNNERS), default="local")
    parser.add_argument(
        "--place", type=Path, help="Where both projects are made, and stay; else a temporary directory."
    )
    given = parser.parse_args()
    place = given.place or Path(tempfile.mkdtemp(prefix="mergegate-sweep-kills-"))
    began = time.monotonic()
    alone = undisturbed(place / "undisturbed", given.runner, given.trials)
    took = time.monotonic() - began
    killed, kills = disturbed(
        place / "killed", kills=given.kills, seed=given.seed, runner=given.runner, trials=given.trials
    )
    rows, fine = compared(alone, killed, kills)
    if given.place is None:
        shutil.rmtree(place)
    print(f"| | {given.runner} |\n| --- | --: |")
    for said, value in (*rows, ("seconds that it takes undisturbed, from start to end", f"{took:.0f}")):
        print(f"| {said} | {value} |")
    sys.exit(0 if fine and len(kills) == given.kills else 1)


def compared(alone: Project, killed: Project, kills: list[Kill]) -> tuple[list[tuple[str, str]], bool]:
    """Return table rows of the values that must be equal or small, and whether they are."""
    by_key = [{record["scored"]: record for record in project.ledger()} for project in (alone, killed)]
    kept = len(killed.ledger())
    ended = Counter(note.key for note in killed.notes("end"))
    lost = len(killed.notes("begin")) - sum(ended.values())
    again = sum(ended.values()) - len(ended)
    left = [pid for project in (alone, killed) for pid in project.running()]
    same = {
        "trials: points, scores, documents used": alone.trials() == killed.trials(),
        "every score of every document": by_key[0] == by_key[1],
        "winner's recipe": bool(alone.winner()) and alone.winner() == killed.winner(),
    }
    state, records = ("store", "sweeps", "reports"), ("prefect",)
    rows = [
        ("kills", str(len(kills))),
        ("kills before the first trial of a run", str(sum(kill.trials == 0 for kill in kills))),
        *((said, "identical" if equal else "DIFFERENT") for said, equal in same.items()),
        ("trials and confirmations without kills", str(len(alone.notes("end")))),
        ("distinct records in the ledger", f"{kept}" if kept == len(by_key[1]) else "REPEATED"),
        ("trials interrupted by a kill", str(lost)),
        ("trials scored to the end twice", str(again)),
        ("longest time until all processes had ended", f"{max((kill.gone for kill in kills), default=0):.1f} s"),
        ("processes left at the end", str(len(left))),
        ("store, ledgers and reports: without kills, with kills", _sizes(alone.size(*state), killed.size(*state))),
        ("Prefect's records: without kills, with kills", _sizes(alone.size(*records), killed.size(*records))),
        ("largest process: without kills, with kills", _sizes(alone.peak, killed.peak)),
    ]
    fine = all(same.values()) and kept == len(by_key[1]) == len(ended) and not left
    return rows, fine and again <= len(kills) and killed.size(*state) <= 1.1 * alone.size(*state)


def _sizes(*sizes: int) -> str:
    return ", ".join(f"{size / 1e6:,.1f} MB" for size in sizes)


if __name__ == "__main__":
    main()
