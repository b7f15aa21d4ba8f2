"""After a run with variants is killed at any moment, the next run publishes the same bytes."""

from __future__ import annotations

import signal
import textwrap
from collections.abc import Sequence
from pathlib import Path

import pytest
from variant_projects import DIES, PROFILE, REAL, Project, files_of, run_process, variant_project

pytestmark = pytest.mark.story

ROUNDED = ({"format": "rounded", "bits": 8},)
# Cheap ones first: each run continues after the stages that the runs before it completed.
ROUNDED_MOMENTS = ("stage:agreement", "stage:variant", "publish:tiny", "publish:tiny-Rounded")
REAL_MOMENTS = (
    *("child:convert:1", "child:convert:4", "stage:convert", "child:llama:0.5"),
    *("stage:agreement", "stage:variant", "stage:inspect", "stage:answers"),
    *("child:quantize:1", "child:quantize:12", "publish:tiny", "publish:tiny-GGUF", "publish:tiny-FP8"),
)


@pytest.mark.parametrize(
    "moments", [("stage:variant", "publish:tiny"), pytest.param(ROUNDED_MOMENTS, marks=pytest.mark.proof)]
)
@pytest.mark.usefixtures("rounded_variants")
def test_killed_at_one_moment_after_the_other_the_published_variants_are_byte_identical(
    tmp_path: Path, moments: Sequence[str]
) -> None:
    require_same_bytes(tmp_path, ROUNDED, moments)


@pytest.mark.proof
@pytest.mark.variants
@pytest.mark.usefixtures("gguf_python", "quantize_python")
def test_killed_inside_a_converter_a_quantizer_or_llama_cpp_the_published_variants_are_byte_identical(
    tmp_path: Path,
) -> None:
    require_same_bytes(tmp_path, REAL, REAL_MOMENTS)


def require_same_bytes(root: Path, variants: Sequence[dict[str, object]], moments: Sequence[str]) -> None:
    killed, undisturbed = (variant_project(root / name, variants) for name in ("killed", "undisturbed"))
    for moment in moments:
        run = run_process(killed, "-c", textwrap.dedent(DIES), moment, "run", PROFILE)
        assert run.returncode == -signal.SIGKILL, f"{moment}\n{run.stdout}\n{run.stderr}"
        require_whole_releases(killed)
    for project in (killed, undisturbed):
        run = run_process(project, "run", PROFILE)
        assert run.returncode == 0, run.stdout + run.stderr
    assert files_of(killed.root / "releases") == files_of(undisturbed.root / "releases")
    assert not list((killed.home / "store").glob("*/*.partial"))


def require_whole_releases(project: Project) -> None:
    """Check that every published directory has all files that its checksums list."""
    for sums in project.root.glob("releases/*/latest/SHA256SUMS"):
        listed = {line.split(maxsplit=1)[1].lstrip("*") for line in sums.read_text().splitlines()}
        assert listed <= set(files_of(sums.parent))
