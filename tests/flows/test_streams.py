"""Standard streams that are closed or lose their reader, and file names in locales without UTF-8."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from demo_project import PROFILES
from patience import HANG_S
from samples import sampled, sampled_rows

MERGEGATE = str(Path(sys.executable).parent / "mergegate")
ASCII = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
NAME = "modèle ✓"


def shell(line: str, cwd: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["bash", "-c", f"set -o pipefail; {line}"],
        cwd=cwd,
        env={**os.environ, "MERGEGATE_HOME": str(cwd / "state"), "m": MERGEGATE, **environment},
        capture_output=True,
        encoding="utf-8",
        timeout=HANG_S,
        check=False,
    )


@pytest.mark.story
@pytest.mark.parametrize(
    ("line", "codes"),
    sampled_rows(
        [
            # Both exit codes occur, because everything may have been written before the reader exits.
            ("$m methods | head -0", (0, 141)),
            ("$m methods --json | head -c1", (0, 141)),
            ("$m --help | head -0", (0, 141)),
            ("$m methods >&-", (0,)),
            ("$m --help >&-", (0,)),
            ("$m --version >&- 2>&- <&-", (0,)),
            ("$m merge missing.yaml out >&- 2>&-", (2,)),
            ("$m merge missing.yaml out 2>&1 | head -0", (2,)),
            ("$m check missing.yaml --json >&-", (2,)),
            ("$m merge 2>&-", (2,)),
            ("$m --help >/dev/full", (3,)),
            ("$m methods >/dev/full", (3,)),
            ("$m merge missing.yaml out 2>/dev/full", (2,)),
        ],
        [("$m --version >&- 2>&- <&-", (0,)), ("$m --help >/dev/full", (3,))],
        pytest.mark.proof,
    ),
)
def test_a_stream_that_cannot_be_written_is_no_traceback(tmp_path: Path, line: str, codes: tuple[int, ...]) -> None:
    done = shell(line, tmp_path)
    assert done.returncode in codes, done.stderr
    assert "Traceback" not in done.stderr
    assert "Exception ignored" not in done.stderr


@pytest.mark.proof
def test_a_closed_stream_does_not_give_its_number_to_another_file(tmp_path: Path) -> None:
    """Otherwise the first opened file would get descriptor 1, and with it all printed output."""
    assert shell(f"$m merge {PROFILES}/demo/recipes/linear.yaml out >&- 2>&-", tmp_path).returncode == 0
    assert shell(f"$m merge {PROFILES}/demo/recipes/linear.yaml other", tmp_path).returncode == 0
    files = sorted((tmp_path / "out").iterdir())
    assert [file.read_bytes() for file in files] == [(tmp_path / "other" / file.name).read_bytes() for file in files]


@pytest.mark.story
@pytest.mark.parametrize(
    "environment", sampled([ASCII, {"LC_ALL": "C"}, ASCII | {"PYTHONIOENCODING": "ascii"}], [ASCII], pytest.mark.proof)
)
def test_valid_utf8_names_work_in_every_locale(tmp_path: Path, environment: dict[str, str]) -> None:
    (tmp_path / NAME).symlink_to(PROFILES / "demo" / "models")
    recipe = (PROFILES / "demo" / "recipes" / "linear.yaml").read_text().replace("../models", NAME)
    (tmp_path / f"{NAME}.yaml").write_text(recipe, encoding="utf-8")
    done = shell(f"$m plan --no-probe '{NAME}.yaml'", tmp_path, **environment)
    assert done.returncode == 0, done.stderr
    refused = shell(f"$m plan '{NAME}/✓.yaml'", tmp_path, **environment)
    assert refused.returncode == 2
    assert "rename it" not in refused.stderr


@pytest.mark.story
def test_a_terminal_without_a_character_gets_its_number(tmp_path: Path) -> None:
    done = shell("$m plan '✓.yaml'", tmp_path, **ASCII, PYTHONIOENCODING="ascii")
    assert done.returncode == 2
    assert "\\u2713.yaml" in done.stderr
