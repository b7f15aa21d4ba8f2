"""Publish quantized variants in whole runs: after the merge, each place as a whole, and again after a failure."""

from __future__ import annotations

import shutil
import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest
from demo_project import Printed, Project
from patience import HANG_S
from test_killed_run import environment, files_of
from test_variants import run, with_variants

sys.path.append(str(Path(__file__).resolve().parents[1] / "variants"))
from rounded_format import rounded_registered

pytestmark = pytest.mark.story

FIRST, SECOND = "{format: rounded, bits: [8, 6]}", "{format: rounded, bits: 7, suffix: Second}"
BROKEN = "{format: rounded, bits: 7, suffix: Second, fault: scales}"

# A command that is killed when it renames a path among the releases for the given number of times.
DIES = """
    import os, pathlib, signal, sys
    from mergegate.flows.cli import main
    renames, rename = int(sys.argv.pop(1)), pathlib.Path.rename
    def dies(self, target):
        global renames
        if "releases" in self.parts:
            renames -= 1
            if renames < 0:
                os.kill(os.getpid(), signal.SIGKILL)
        return rename(self, target)
    pathlib.Path.rename = dies
    main()
"""


@pytest.fixture(scope="module", autouse=True)
def rounded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Register the variant format ``rounded`` for this module."""
    with rounded_registered(tmp_path_factory.mktemp("rounded") / "site"):
        yield


@pytest.fixture(scope="module")
def published(released: tuple[Project, Printed]) -> Project:
    """Return the project of the released demo after a run that published variants in two places."""
    project, _ = released
    merge = files_of(project.latest)
    outcome = run(project, with_variants(project, FIRST, SECOND))
    assert outcome["status"] == "released"
    assert outcome["message"].startswith("released R8, R6, R7 of demo ")
    assert [(each["types"], each["new"]) for each in outcome["variants"]] == [(["R8", "R6"], True), (["R7"], True)]
    assert files_of(project.latest) == merge, "the release of the merge does not depend on its variants"
    return project


def place(project: Project, suffix: str) -> Path:
    return project.root / "releases" / f"demo-{suffix}"


def test_each_place_is_a_release_that_depends_on_that_of_the_merge(published: Project) -> None:
    for suffix in ("Rounded", "Second"):
        latest = place(published, suffix) / "latest"
        checked = subprocess.run(
            ["sha256sum", "--quiet", "--check", "SHA256SUMS"], cwd=latest, capture_output=True, text=True, check=False
        )
        assert (checked.returncode, checked.stderr) == (0, "")
        verified = published.mergegate("verify", str(latest))
        assert verified.exit_code == 0, verified.output
        assert published.latest.resolve().name in (latest / "README.md").read_text()


def test_a_second_run_publishes_nothing(published: Project) -> None:
    again = run(published, with_variants(published, FIRST, SECOND))
    assert again["status"] == "nothing new"
    assert [each["new"] for each in again["variants"]] == [False, False]


def test_a_place_that_fails_leaves_the_others_published_and_running_again_completes_it(published: Project) -> None:
    second = place(published, "Second")
    version = (second / "latest").resolve()
    genuine = (version / "README.md").read_bytes()
    (version / "README.md").write_bytes(genuine + b"edited")
    shutil.rmtree(place(published, "Rounded"))
    failed = run(published, with_variants(published, FIRST, SECOND), code=3)
    assert "was released before, but not all of its variants" in failed["message"]
    assert "demo-Second is not published: " in failed["message"]
    assert "other content" in failed["message"]
    assert "Run again to publish the missing variants." in failed["message"]
    assert [(each["types"], each["new"]) for each in failed["variants"]] == [(["R8", "R6"], True)]
    (version / "README.md").write_bytes(genuine)
    again = run(published, with_variants(published, FIRST, SECOND))
    assert [each["new"] for each in again["variants"]] == [False, False]


def test_a_place_without_a_new_variant_keeps_its_release_and_the_run_says_so(published: Project) -> None:
    before = files_of(place(published, "Second"))
    outcome = run(published, with_variants(published, FIRST, BROKEN))
    assert "demo-Second keeps its earlier release, because no variant of" in outcome["message"]
    assert files_of(place(published, "Second")) == before


@pytest.mark.proof
def test_killed_before_each_step_of_the_publication_every_place_is_whole_and_the_bytes_are_the_same(
    published: Project, tmp_path: Path
) -> None:
    project = Project(tmp_path / "project")
    shutil.copytree(published.root, project.root, symlinks=True)
    shutil.rmtree(project.root / "releases")
    profile = with_variants(project, FIRST, SECOND)
    kills = 0
    while True:
        # Each run completes one more step than the one before it, because it resumes after the kill.
        command = [sys.executable, "-c", textwrap.dedent(DIES), "1" if kills else "0", "run", profile]
        done = subprocess.run(
            command,
            cwd=project.root,
            env=environment(project),
            capture_output=True,
            text=True,
            timeout=HANG_S,
            check=False,
        )
        for name in ("demo", "demo-Rounded", "demo-Second"):
            whole = published.root / "releases" / name / "latest"
            if (latest := project.root / "releases" / name / "latest").exists():
                assert files_of(latest) == files_of(whole)
        if done.returncode == 0:
            break
        assert done.returncode == -signal.SIGKILL, done.stdout + done.stderr
        kills += 1
    assert kills >= 5
    for name in ("demo", "demo-Rounded", "demo-Second"):
        assert files_of(project.root / "releases" / name / "latest")
