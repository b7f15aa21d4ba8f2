"""Full disks, deleted directories and unusable names give one message, and the next run continues.

The exit code is 3 if the machine is at fault, and 2 if the command's input is.
"""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from demo_project import PROFILES, Project, make_project
from faults import disk_fails, files_below
from patience import HANG_S
from samples import sampled

from mergegate.flows.cli import merge as merging

RECIPE = str(PROFILES / "demo" / "recipes" / "dare_ties.yaml")
MAIN = "from mergegate.flows.cli import main; main()"
Done = subprocess.CompletedProcess[str]


@pytest.fixture
def offline(tmp_path: Path) -> Project:
    """Return a project without a Prefect API, for commands that run no flow."""
    return make_project(tmp_path / "project")


def run(
    *arguments: str, cwd: Path, before: str = "", stdout: int = subprocess.PIPE
) -> subprocess.CompletedProcess[str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PREFECT_", "MERGEGATE_"))}
    return subprocess.run(
        [sys.executable, "-c", f"import os, sys\n{before}\n{MAIN}", *arguments],
        cwd=cwd,
        env={**kept, "PYTHONPATH": str(Path(__file__).parents[2])},
        stdout=stdout,
        stderr=subprocess.PIPE,
        text=True,
        timeout=HANG_S,
        check=False,
    )


def assert_one_message(done: subprocess.CompletedProcess[str], *words: str, code: int = 3) -> None:
    assert done.returncode == code, done.stderr
    assert "Traceback" not in done.stderr
    assert "Exception ignored" not in done.stderr
    assert done.stderr.count("remedy:") == 1
    assert all(word in done.stderr for word in words), done.stderr


@pytest.mark.parametrize(
    "number",
    [errno.ENOSPC, *(pytest.param(number, marks=pytest.mark.story) for number in (errno.EROFS, errno.EIO))],
    ids=errno.errorcode.get,
)
def test_a_merge_on_a_failing_disk_ends_in_one_message_and_the_next_one_in_the_same_bytes(
    offline: Project, number: int
) -> None:
    assert offline.mergegate("merge", RECIPE, "undisturbed").exit_code == 0
    with disk_fails(None) as calls:
        assert offline.mergegate("merge", RECIPE, "counted").exit_code == 0
    for at in range(1, calls.count + 1, max(1, calls.count // 6)):
        out = f"at-{at}"
        with disk_fails(at, number) as calls:
            result = offline.mergegate("merge", RECIPE, out)
        is_complete = (offline.root / out).exists()  # Only the final cleanup failed.
        assert result.exit_code == (0 if is_complete else 3), f"{calls.failed} at {at}\n{result.output}"
        if not is_complete:
            assert result.output.count("remedy:") == 1
            assert offline.mergegate("merge", RECIPE, out).exit_code == 0
        assert files_below(offline.root / out) == files_below(offline.root / "undisturbed")
    assert not list(offline.root.glob(".*.lock"))


def test_a_second_merge_into_one_directory_is_refused(offline: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    inside, go_on = threading.Event(), threading.Event()
    merge_weights = merging.merge_weights

    def slow(*args: object, **kwargs: object) -> object:
        inside.set()
        assert go_on.wait(HANG_S)
        return merge_weights(*args, **kwargs)  # type: ignore[arg-type]

    def first() -> None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(merging, "merge_weights", slow)
            ended.append(merging.merge_recipe(Path(RECIPE), merging.MergeOptions(out, device="cpu"), quiet()))

    ended: list[object] = []
    out = offline.root / "out"
    thread = threading.Thread(target=first)
    thread.start()
    assert inside.wait(HANG_S)
    result = offline.mergegate("merge", RECIPE, "out")
    go_on.set()
    thread.join(HANG_S)
    assert result.exit_code == 3, result.output
    assert "another merge into it is running" in result.output
    assert len(ended) == 1
    assert (out / "config.json").exists()
    assert offline.mergegate("merge", RECIPE, "out").exit_code == 2, "it is there by now"


def quiet() -> object:
    from rich.console import Console

    return Console(quiet=True)


@pytest.mark.parametrize(
    "command",
    sampled(
        [("run", str(PROFILES / "demo.yaml")), ("merge", RECIPE, "out"), ("doctor",), ("check", RECIPE)], [("doctor",)]
    ),
)
def test_a_working_directory_that_was_deleted_is_said_to_be(tmp_path: Path, command: tuple[str, ...]) -> None:
    (tmp_path / "gone").mkdir()
    assert_one_message(run(*command, cwd=tmp_path / "gone", before="os.rmdir(os.getcwd())"), "deleted")


@pytest.mark.parametrize("name", ["n" * 300, "/".join(["n" * 200] * 30)], ids=["name", "path"])
def test_a_path_that_no_disk_can_hold_is_refused_when_it_is_read(tmp_path: Path, name: str) -> None:
    done = run("merge", RECIPE, name, cwd=tmp_path)
    assert done.returncode == 2
    assert "Invalid value for 'OUT'" in done.stderr
    assert "bytes" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_parent_in_the_home_of_an_unknown_user_is_reported(tmp_path: Path) -> None:
    recipe = "merge_method: linear\nmodels: [{model: ~nobody-of-that-name/a}, {model: b}]\nparameters: {weight: 1}\n"
    (tmp_path / "recipe.yaml").write_text(recipe)
    assert_one_message(run("merge", "recipe.yaml", "out", cwd=tmp_path), "~nobody-of-that-name", "user", code=2)


@pytest.mark.story
def test_a_file_name_that_is_not_text_does_not_fail_the_run(tmp_path: Path) -> None:
    done = run("merge", RECIPE, os.fsdecode(b"\xff\xfe"), cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert [os.fsencode(path.name) for path in tmp_path.iterdir() if not path.name.startswith(".")] == [b"\xff\xfe"]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="Linux has it")
@pytest.mark.parametrize("command", [("methods",), ("methods", "--json")])
def test_output_that_cannot_be_printed_is_said_where_it_can_be(tmp_path: Path, command: tuple[str, ...]) -> None:
    with Path("/dev/full").open("w") as full:
        assert_one_message(run(*command, cwd=tmp_path, stdout=full.fileno()), "the disk is full")


def test_a_doctor_says_that_nothing_is_wrong_where_nothing_is(offline: Project) -> None:
    result = offline.mergegate("doctor")
    assert result.exit_code == 0
    assert "no damaged and no leftover files" in result.output


def test_a_doctor_finds_what_is_damaged_and_mends_it(offline: Project) -> None:
    home = offline.home
    for name in ("store/gate", "prefect", "anchors", "reports/demo.html"):
        (home / name).mkdir(parents=True)
    (home / "store" / "gate" / f"{'a' * 32}.json").write_text("{")
    (home / "store" / "hashes.sqlite").write_bytes(b"garbage" * 99)
    (home / "prefect" / "prefect.db").write_bytes(b"garbage" * 99)
    (home / "anchors" / "0.json").write_text("{")
    (home / "logs").write_text("a file")
    result = offline.mergegate("doctor")
    assert result.exit_code == 3
    said = "".join(result.output.split())
    for name in ("a.json", "hashes.sqlite", "prefect.db", "0.json", "demo.html", "logs"):
        assert name in said
    assert offline.mergegate("doctor", "--repair").exit_code == 0
    assert offline.mergegate("doctor").exit_code == 0
    assert offline.mergegate("doctor", "--repair", "--json").exit_code == 0
    assert "set aside" not in offline.mergegate("doctor").output
