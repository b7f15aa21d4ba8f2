"""After a run is killed at any moment, the next run gives a byte-identical release."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest
from demo_project import Project, make_project
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
    from mergegate.tasks.sandbox import SupervisedProcess
    from mergegate.tasks.store import Store, store
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


@pytest.mark.parametrize(
    "moments", [("stage:merge", "publish:releases"), pytest.param(MOMENTS, marks=pytest.mark.proof)]
)
def test_killed_at_one_stage_after_the_other_the_release_is_byte_identical(
    tmp_path: Path,
    released: tuple[Project, Result],
    begin_records: Callable[[Path], None],
    moments: tuple[str, ...],
) -> None:
    undisturbed, _ = released
    project = make_project(tmp_path / "killed")
    begin_records(project.home)
    for moment in moments:
        run = subprocess.run(
            [sys.executable, "-c", textwrap.dedent(DIES), moment, "run", "profiles/demo.yaml"],
            cwd=project.root,
            env=environment(project),
            capture_output=True,
            text=True,
            timeout=HANG_S,
            check=False,
        )
        assert run.returncode == -signal.SIGKILL, f"{moment}\n{run.stdout}\n{run.stderr}"
        assert not project.latest.exists()
    run = subprocess.run(
        [str(BIN / "mergegate"), "run", "profiles/demo.yaml"],
        cwd=project.root,
        env=environment(project),
        capture_output=True,
        text=True,
        timeout=HANG_S,
        check=False,
    )
    assert run.returncode == 0, run.stdout + run.stderr
    assert re.search(r"= merge ", run.stdout), "a finished stage was run again"
    assert files_of(project.latest) == files_of(undisturbed.latest)
    assert project.latest.resolve().name == undisturbed.latest.resolve().name
    leftovers = [path.name for path in (project.root / "releases" / "demo").iterdir()]
    assert sorted(leftovers) == sorted(["latest", project.latest.resolve().name])
    assert not list((project.home / "store").glob("*/*.partial"))


@pytest.mark.proof
def test_two_runs_at_once_make_everything_once(tmp_path: Path) -> None:
    project = make_project(tmp_path)
    runs = [
        subprocess.Popen(
            [str(BIN / "mergegate"), "run", "profiles/demo.yaml"],
            cwd=project.root,
            env=environment(project),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for _ in range(2)
    ]
    outputs = [run.communicate(timeout=HANG_S)[0] for run in runs]
    assert [run.returncode for run in runs] == [0, 0], outputs
    for stage in ("licenses", "compat", "merge", "gate", "report"):
        made = sum(bool(re.search(rf"✓ {stage} ", output)) for output in outputs)
        assert made == 1, f"{stage} was made {made} times\n{outputs}"
    assert len(project.artifacts("perplexity")) == 4
    assert len(project.artifacts("evaluate")) == 12
    releases = sorted(path.name for path in (project.root / "releases" / "demo").iterdir())
    assert len(releases) == 2
    assert "latest" in releases
