"""After a run is killed at any moment, the next run gives a byte-identical release. So do two runs, or two workers."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from benchmark_scripts import load_benchmark
from demo_project import Project, expect, make_project
from patience import HANG_S
from typer.testing import Result

pytestmark = pytest.mark.story

BIN = Path(sys.executable).parent
STAGES = ("licenses", "compat", "documents", "merge", "perplexity", "evaluate", "gate", "report", "evidence")
MOMENTS = (*(f"stage:{stage}" for stage in STAGES), "publish:releases")

# Runs the command line and dies by SIGKILL at a moment:
#   stage:NAME     after a stage has done its work, before its artifact is complete
#   publish:NAME   when a release is written below a directory NAME, before it has its own name
#   child:NAME:S   S seconds after the supervised process NAME starts
DIES = """
    import os, pathlib, signal, sys, threading
    from mergegate.tasks.base.sandbox import SupervisedProcess
    from mergegate.tasks.base.store import Store, store
    from mergegate.flows.cli import main
    kind, word, *seconds = sys.argv.pop(1).split(":")
    def die():
        os.kill(os.getpid(), signal.SIGKILL)
    if kind == "publish":
        rename = pathlib.Path.rename
        def dies(self, target):
            die() if word in self.parts and "releases" in self.parts else rename(self, target)
        pathlib.Path.rename = dies
    elif kind == "child":
        start = SupervisedProcess.__init__
        def starts(self, command, environment, output, options):
            start(self, command, environment, output, options)
            if options.name == word:
                threading.Timer(float(seconds[0]), die).start()
        SupervisedProcess.__init__ = starts
    else:
        def deadly(seal):
            def dies(self, stage, *rest):
                return die() if stage == word else seal(self, stage, *rest)
            return dies
        Store._seal, write = deadly(Store._seal), store.write_state
        store.write_state = lambda path, content: die() if path.parent.name == word else write(path, content)
    main()
"""


def environment(project: Project) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PREFECT_")}
    return {**kept, "MERGEGATE_HOME": str(project.home), "COLUMNS": "1000", "HF_HUB_OFFLINE": "1"}


def files_of(release: Path) -> dict[str, bytes]:
    return {path.relative_to(release).as_posix(): path.read_bytes() for path in release.rglob("*") if path.is_file()}


def run_and_die(project: Project, dies: str, moment: str, profile: str) -> subprocess.CompletedProcess[str]:
    """Run a profile with a program such as ``DIES``."""
    command = [sys.executable, "-c", textwrap.dedent(dies), moment, "run", profile]
    return finish(command, project)


def finish(command: list[str], project: Project) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command, cwd=project.root, env=environment(project), capture_output=True, text=True, timeout=HANG_S, check=False
    )


@pytest.mark.parametrize("moments", [("publish:releases",), pytest.param(MOMENTS, marks=pytest.mark.proof)])
def test_killed_at_one_stage_after_the_other_the_release_is_byte_identical(
    tmp_path: Path, released: tuple[Project, Result], begin_records: Callable[[Path], None], moments: tuple[str, ...]
) -> None:
    undisturbed, _ = released
    project = make_project(tmp_path / "killed")
    begin_records(project.home)
    for moment in moments:
        run = run_and_die(project, DIES, moment, "profiles/demo.yaml")
        assert run.returncode == -signal.SIGKILL, f"{moment}\n{run.stdout}\n{run.stderr}"
        assert not project.latest.exists()
    run = finish([str(BIN / "mergegate"), "run", "profiles/demo.yaml"], project)
    assert run.returncode == 0, run.stdout + run.stderr
    assert re.search(r"= merge ", run.stdout), "a finished stage was run again"
    assert files_of(project.latest) == files_of(undisturbed.latest)
    assert project.latest.resolve().name == undisturbed.latest.resolve().name
    leftovers = [path.name for path in (project.root / "releases" / "demo").iterdir()]
    assert sorted(leftovers) == sorted(["latest", project.latest.resolve().name])
    assert not list((project.home / "store").glob("*/*.partial"))


MEASURED = ("merge", "perplexity", "evaluate", "gate")  # Stages whose artifacts must be identical.


def measured(home: Path) -> dict[str, str]:
    """Return the content digest of each measurement and decision, by stage and key."""
    found = {}
    for stage in MEASURED:
        for place in (home / "store" / stage).iterdir():
            record = place / "manifest.json" if place.is_dir() else place
            if not place.name.endswith((".partial", ".lock")):
                found[f"{stage}/{place.stem}"] = json.loads(record.read_text())["digest"]
    return found


@pytest.mark.proof
@pytest.mark.parametrize("runner", ["{workers: 2}", "{kind: dask, workers: 2}"])
def test_two_workers_make_what_one_makes(
    runner: str, demo_release: Path, tmp_path: Path, prefect_api: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    if "dask" in runner:
        pytest.importorskip("prefect_dask")
    project = make_project(tmp_path / "project")
    profile = project.edit("demo.yaml", "perplexity:", f"runner: {runner}\nperplexity:")
    expect(project.mergegate("run", profile, "--json"), 0)
    alone = measured(Project(demo_release).home)
    assert len([name for name in alone if name.startswith("evaluate/")]) >= 12  # Four models, three tasks.
    assert measured(project.home) == alone
    assert not list(project.home.glob("runner-*"))
    # A run without a runner has no work left.
    again = project.mergegate("run", project.edit("demo.yaml", "perplexity:", "perplexity:"), "--json")
    assert json.loads(again.stdout)["status"] == "nothing new"


# Killed during a batch: a run resumes there, and gives the same bits.

KILLS = 3


@pytest.fixture(scope="module")
def bench() -> ModuleType:
    """Import ``benchmarks/kills.py``."""
    return load_benchmark("kills")


@pytest.fixture(scope="module")
def reference(bench: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Any:
    return bench.undisturbed(tmp_path_factory.mktemp("undisturbed") / "project")


@pytest.mark.proof
def test_killed_while_it_measures_it_repeats_a_batch_a_kill_and_changes_no_bit(
    bench: ModuleType, reference: Any, tmp_path: Path
) -> None:
    project, kills = bench.disturbed(tmp_path / "project", kills=KILLS, batches=len(reference.batches()), seed=3)
    assert {kill.whom for kill in kills} == {"the flow", "the models' process"}
    assert project.measured() == reference.measured()
    assert len(bench.repeated(project, reference)) <= len(kills) == KILLS
    assert not list((project.root / ".mergegate" / "store").glob("**/*.journal"))
    assert not list((project.root / ".mergegate" / "store").glob("*/*.partial"))
