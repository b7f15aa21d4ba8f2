"""The command line starts fast, returns the documented exit codes and shows no traceback for user errors."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from demo_project import PROFILES
from patience import HANG_S
from typer.testing import CliRunner

from mergegate.flows.cli.app import RENAMED_OPTIONS, app

MERGEGATE = str(Path(sys.executable).parent / "mergegate")


def run(*arguments: str, cwd: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PREFECT_", "MERGEGATE_"))}
    return subprocess.run(
        [MERGEGATE, *arguments],
        cwd=cwd,
        env={**kept, **environment},
        capture_output=True,
        text=True,
        timeout=HANG_S,
        check=False,
    )


@pytest.mark.story
@pytest.mark.parametrize(
    ("arguments", "environment", "code", "words"),
    [
        (["--version"], {}, 0, "mergegate 0."),
        (["--help"], {}, 0, "Check, merge, evaluate"),
        ([], {}, 2, "Release:"),
        (["run", "nowhere.yaml"], {}, 2, "No such file"),
        (["check", "nowhere.yaml"], {}, 2, "No such file"),
        (["merge", "nowhere.yaml", "out"], {}, 2, "nowhere.yaml"),
        (["run", str(PROFILES / "demo.yaml")], {"PREFECT_API_URL": "http://127.0.0.1:9/api"}, 2, "no server answers"),
        (["run", str(PROFILES / "demo.yaml")], {"MERGEGATE_HOME": "/proc/nowhere"}, 2, "MERGEGATE_HOME"),
        (["methods"], {}, 0, "arxiv.org/abs/2306.01708"),
    ],
)
def test_every_command_has_its_exit_code_and_message(
    tmp_path: Path, arguments: list[str], environment: dict[str, str], code: int, words: str
) -> None:
    done = run(*arguments, cwd=tmp_path, **environment)
    assert done.returncode == code, done.stdout + done.stderr
    assert words in done.stdout + done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.story
def test_merges_that_share_a_directory_make_what_one_makes(tmp_path: Path) -> None:
    recipe = str(PROFILES / "demo" / "recipes" / "dare_ties.yaml")
    assert run("merge", recipe, "alone", cwd=tmp_path).returncode == 0
    command = [MERGEGATE, "merge", recipe, "together", "--share"]
    together = [subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.DEVNULL) for _ in range(3)]
    codes = [process.wait(HANG_S) for process in together]
    # A process that starts after the merge is complete fails with code 2 because the directory is not empty.
    assert set(codes) <= {0, 2}
    assert 0 in codes
    alone = {path.name: path.read_bytes() for path in (tmp_path / "alone").iterdir()}
    assert {path.name: path.read_bytes() for path in (tmp_path / "together").iterdir()} == alone


def test_help_does_not_wait_for_heavy_imports(tmp_path: Path) -> None:
    code = "import sys; sys.argv = ['mergegate', '--help']\nfrom mergegate.flows.cli import main\n"
    code += "try:\n main()\nfinally:\n"
    code += " print(sorted({'torch', 'prefect', 'numpy', 'transformers'} & set(sys.modules)), file=sys.stderr)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path, check=False)
    assert done.returncode == 0
    assert done.stderr.strip() == "[]"


@pytest.mark.parametrize(
    ("command", "former"),
    [
        ("doctor", "--mend"),
        ("store gc", "--older=3"),
        ("shadow promote profile.yaml", "--why"),
        ("shadow serve profile.yaml", "--again"),
        ("shadow replay traffic.jsonl", "--at-once"),
        ("smoke model", "--key-from"),
    ],
)
def test_a_renamed_option_is_an_error_that_names_the_new_one(command: str, former: str) -> None:
    answer = CliRunner().invoke(app, [*command.split(), former, "1"])
    assert answer.exit_code == 2
    assert RENAMED_OPTIONS[former.partition("=")[0]] in answer.output


def test_a_renamed_command_is_an_error_that_names_the_new_one() -> None:
    answer = CliRunner().invoke(app, ["shadow", "look", "profile.yaml"])
    assert answer.exit_code == 2
    assert "evaluate" in answer.output


def test_a_word_after_two_dashes_is_not_an_option() -> None:
    answer = CliRunner().invoke(app, ["doctor", "--", "--mend"])
    assert answer.exit_code == 2
    assert "renamed" not in answer.output
