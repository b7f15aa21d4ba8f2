"""Kill a release while it measures a merge, and check the cost of a kill and its effect on results.

::

    .venv/bin/python benchmarks/kills.py                  # the demo, killed twenty times; some minutes
    .venv/bin/python benchmarks/kills.py --kills 5 --seed 1

The script first releases the demo undisturbed. It then releases it again in another project and sends ``SIGKILL`` at
random moments of perplexity and tasks, alternately to the flow and to the process that holds the models. After each
kill it runs the same command again. In the end, scores and likelihoods must be the same bytes and the verdict must have
the same digest. Notes of every batch that a model started show which batches were computed twice.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

PROJECT = Path(__file__).resolve().parent.parent
MEASURED = ("perplexity", "evaluate", "gate")  # stages whose artifacts must be equal
_LOOK_EVERY = 0.005  # seconds
NOTES = Path("sandbox/notes")  # in the directory that confined processes may write to
_START = "from mergegate.flows.cli import main; main()"

# Imported by every Python process that finds it. It notes each loaded model, and each batch before it is computed.
SPY = """
import hashlib, importlib.abc, importlib.util, os, sys, time

def note(*words):
    descriptor = os.open(os.environ["MERGEGATE_KILLS_NOTES"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.write(descriptor, (" ".join(map(str, (os.getpid(), *words))) + "\\n").encode())
    os.close(descriptor)

def watch(cache):
    load = cache._load
    def watched(model, dtype, device):
        note("load", model.name, "-", 0)
        loaded = load(model, dtype, device)
        def begun(network, args, kwargs):
            ids = kwargs["input_ids"] if "input_ids" in kwargs else args[0]
            from mergegate.tasks.quality.evaluation.backends.hf_models import PROBE_TOKENS
            if tuple(ids[0].tolist()[:len(PROBE_TOKENS)]) == PROBE_TOKENS:
                return  # no batch: it is tried what the network takes
            content = hashlib.sha256(ids.cpu().numpy().tobytes()).hexdigest()
            note("batch", model.name, content, len(ids))
        loaded.network.register_forward_pre_hook(begun, with_kwargs=True)
        return loaded
    cache._load = watched

class Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name != "mergegate.tasks.models.checkpoints.model_cache":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        execute = spec.loader.exec_module
        def and_watch(module):
            execute(module)
            watch(module)
        spec.loader.exec_module = and_watch
        return spec

if "MERGEGATE_KILLS_NOTES" in os.environ:
    sys.meta_path.insert(0, Finder())
"""


class Note(NamedTuple):
    """A line that the spy wrote."""

    process: int
    what: str  # 'load' or 'batch'
    model: str
    content: str  # digest of the batch's tokens
    rows: int  # requests or windows


def watched_environment(root: Path) -> dict[str, str]:
    """Return our environment for a run whose state, spy and notes are below ``root``."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PREFECT_")}
    return {
        **kept,
        "MERGEGATE_HOME": str(root / ".mergegate"),
        "HF_HUB_OFFLINE": "1",
        "MERGEGATE_SANDBOX": str(root / NOTES.parent),
        "MERGEGATE_KILLS_NOTES": str(root / NOTES),
        "PYTHONPATH": os.pathsep.join((str(root / "spy"), str(PROJECT))),
    }


@dataclass
class Project:
    """A directory with the shipped profiles, its own state, and notes of the computed batches."""

    root: Path
    environment: dict[str, str] = field(default_factory=dict)

    @staticmethod
    def make(root: Path) -> Project:
        """Create the project in an empty directory that shares the demo's models and data."""
        (root / "profiles").mkdir(parents=True)
        (root / "spy").mkdir()
        (root / "spy" / "sitecustomize.py").write_text(SPY)
        for profile in (PROJECT / "profiles").glob("*.yaml"):
            shutil.copy(profile, root / "profiles")
        (root / "profiles" / "demo").symlink_to(PROJECT / "profiles" / "demo")
        (root / NOTES.parent).mkdir(mode=0o700)
        return Project(root, watched_environment(root))

    @contextmanager
    def running(self) -> Iterator[subprocess.Popen[bytes]]:
        """Start a run of the demo in its own session."""
        command = [sys.executable, "-c", _START, "run", "profiles/demo.yaml"]
        with (self.root / "output").open("ab") as output:
            run = subprocess.Popen(
                command, cwd=self.root, env=self.environment, stdout=output, stderr=output, start_new_session=True
            )
        try:
            yield run
        finally:
            run.kill()
            run.wait()

    def notes(self) -> list[Note]:
        """Return all notes so far, of all runs."""
        path = self.root / NOTES
        lines = path.read_text().splitlines() if path.exists() else []
        words = (line.split() for line in lines)
        return [Note(int(pid), what, model, content, int(rows)) for pid, what, model, content, rows in words]

    def batches(self) -> list[Note]:
        return [note for note in self.notes() if note.what == "batch"]

    def measured(self) -> dict[str, str]:
        """Return the digest of all measurements and decisions, by stage and key."""
        found = {}
        for stage in MEASURED:
            for place in sorted((self.root / ".mergegate" / "store" / stage).iterdir()):
                record = place / "manifest.json" if place.is_dir() else place
                found[f"{stage}/{place.stem}"] = str(json.loads(record.read_text())["digest"])
        return found


class Kill(NamedTuple):
    """One kill: its target, and how many batches had started since the previous kill."""

    whom: str
    batches: int


def undisturbed(root: Path) -> Project:
    """Release the demo without a kill."""
    project = Project.make(root)
    with project.running() as run:
        if run.wait():
            raise RuntimeError((root / "output").read_text())
    return project


def disturbed(root: Path, *, kills: int, batches: int, seed: int) -> tuple[Project, list[Kill]]:
    """Kill the demo while its models are evaluated and run it again, until it has been killed ``kills`` times.

    ``batches`` is the number of batches in an undisturbed run. Kills are spread over them.
    """
    project, done, rng = Project.make(root), list[Kill](), random.Random(seed)
    while True:
        with project.running() as run:
            while len(done) < kills:
                before = project.batches()
                left = max(1, batches - len({(note.model, note.content) for note in before}))
                wait_for = rng.randint(1, max(1, 2 * left // (kills - len(done) + 1)))
                if not _begun(project, len(before) + wait_for, run):
                    break  # it ended, because of the previous kill or with the release
                time.sleep(rng.uniform(0, 0.03))  # into the middle of a batch
                latest = project.batches()[-1].process
                whom = "the flow" if len(done) % 2 == 0 else "the models' process"
                gone = os.pidfd_open(latest)  # a child of this run, according to its own note
                os.kill(run.pid if whom == "the flow" else latest, signal.SIGKILL)
                select.select([gone], [], [])
                os.close(gone)
                done.append(Kill(whom, len(project.batches()) - len(before)))
                if whom == "the flow":
                    break
            if run.wait() == 0:
                return project, done
        if len(done) >= kills and run.returncode not in (-signal.SIGKILL, 2):
            raise RuntimeError((root / "output").read_text())


def repeated(project: Project, reference: Project) -> list[Note]:
    """Return the batches that started more often than in an undisturbed run."""
    count = Counter((note.model, note.content) for note in reference.batches())
    again = []
    for note in project.batches():
        if count[note.model, note.content]:
            count[note.model, note.content] -= 1
        else:
            again.append(note)
    return again


def _begun(project: Project, batches: int, run: subprocess.Popen[bytes]) -> bool:
    """Wait for ``batches`` batches, and return whether they came before the run ended."""
    size = -1
    notes = project.root / NOTES
    while run.poll() is None:
        if notes.exists() and notes.stat().st_size != size:
            size = notes.stat().st_size
            if len(project.batches()) >= batches:
                return True
        time.sleep(_LOOK_EVERY)
    return False


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="mergegate-kills-") as place:
        began = time.monotonic()
        reference = undisturbed(Path(place) / "undisturbed")
        alone = time.monotonic() - began
        wanted = reference.batches()
        project, kills = disturbed(Path(place) / "disturbed", kills=given.kills, batches=len(wanted), seed=given.seed)
        again = repeated(project, reference)
        rows, all_rows = sum(note.rows for note in again), sum(note.rows for note in wanted)
        loads = Counter(note.model for note in reference.notes() if note.what == "load")
        print("| | |\n| --- | --: |")
        print(f"| batches of an undisturbed run | {len(wanted)} |")
        print(f"| requests and windows in them | {all_rows:,} |")
        print(f"| models loaded in it, each | {len(loads)}, {max(loads.values())} times |")
        print(f"| seconds that it takes, with all else | {alone:.0f} |")
        for whom in ("the flow", "the models' process"):
            print(f"| kills of {whom} | {sum(kill.whom == whom for kill in kills)} |")
        print(f"| batches begun a second time | {len(again)} |")
        print(f"| requests and windows in them | {rows:,} ({100 * rows / all_rows:.1f} %) |")
        print(f"| most of them for one kill | {max((note.rows for note in again), default=0)} |")
        same = project.measured() == reference.measured()
        print(f"| scores, likelihoods, verdict | {'the same, bit for bit' if same else 'DIFFERENT'} |")
    sys.exit(0 if same and len(again) <= len(kills) else 1)


if __name__ == "__main__":
    main()
