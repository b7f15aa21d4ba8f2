"""Full disks, deleted directories and unusable names give one message, and no command touches files of the user."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest
from demo_project import PROFILES, Project, expect, make_project
from faults import disk_fails, files_below
from patience import HANG_S
from samples import sampled_rows

RECIPE = str(PROFILES / "demo" / "recipes" / "dare_ties.yaml")
Done = subprocess.CompletedProcess[str]
MAIN = "from mergegate.flows.cli import main; main()"


@pytest.fixture
def offline(tmp_path: Path) -> Project:
    """Return a project without a Prefect API, for commands that run no flow."""
    return make_project(tmp_path / "project")


def run(*arguments: str, cwd: Path, before: str = "", stdout: int = subprocess.PIPE) -> Done:
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


def assert_one_message(done: Done, *words: str) -> None:
    assert done.returncode == 3, done.stderr
    assert "Traceback" not in done.stderr
    assert "Exception ignored" not in done.stderr
    assert done.stderr.count("remedy:") == 1
    assert all(word in done.stderr for word in words), done.stderr


@pytest.mark.proof
@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EROFS, errno.EIO], ids=errno.errorcode.get)
def test_a_merge_on_a_failing_disk_ends_in_one_message_and_the_next_one_in_the_same_bytes(
    offline: Project, number: int
) -> None:
    assert offline.mergegate("merge", RECIPE, "undisturbed").exit_code == 0
    with disk_fails(None) as calls:
        assert offline.mergegate("merge", RECIPE, "counted").exit_code == 0
    for at in range(1, calls.count + 1, max(1, calls.count // 3)):
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


@pytest.mark.proof
@pytest.mark.parametrize(
    "command", [("run", str(PROFILES / "demo.yaml")), ("merge", RECIPE, "out"), ("doctor",), ("check", RECIPE)]
)
def test_a_working_directory_that_was_deleted_is_said_to_be(tmp_path: Path, command: tuple[str, ...]) -> None:
    (tmp_path / "gone").mkdir()
    assert_one_message(run(*command, cwd=tmp_path / "gone", before="os.rmdir(os.getcwd())"), "deleted")


@pytest.mark.story
def test_a_file_name_that_is_not_text_does_not_fail_the_run(tmp_path: Path) -> None:
    done = run("merge", RECIPE, os.fsdecode(b"\xff\xfe"), cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert [os.fsencode(path.name) for path in tmp_path.iterdir() if not path.name.startswith(".")] == [b"\xff\xfe"]


@pytest.mark.story
@pytest.mark.skipif(not Path("/dev/full").exists(), reason="Linux has it")
@pytest.mark.parametrize("command", [("methods",), ("methods", "--json")])
def test_output_that_cannot_be_printed_is_said_where_it_can_be(tmp_path: Path, command: tuple[str, ...]) -> None:
    with Path("/dev/full").open("w") as full:
        assert_one_message(run(*command, cwd=tmp_path, stdout=full.fileno()), "the disk is full")


def test_a_doctor_finds_what_is_damaged_and_mends_it(offline: Project) -> None:
    expect(offline.mergegate("doctor"), 0, "no damaged and no leftover files")
    home = offline.home
    for name in ("store/gate", "prefect", "anchors", "reports/demo.html"):
        (home / name).mkdir(parents=True)
    (home / "store" / "gate" / f"{'a' * 32}.json").write_text("{")
    (home / "anchors" / "0.json").write_text("{")
    for name in ("store/hashes.sqlite", "prefect/prefect.db", "logs"):
        (home / name).write_bytes(b"garbage" * 99)
    result = expect(offline.mergegate("doctor"), 3)
    said = "".join(result.output.split())
    damaged = ("a.json", "hashes.sqlite", "prefect.db", "0.json", "demo.html", "logs")
    assert [name for name in damaged if name not in said] == []
    assert offline.mergegate("doctor", "--repair").exit_code == 0
    assert offline.mergegate("doctor").exit_code == 0
    assert offline.mergegate("doctor", "--repair", "--json").exit_code == 0
    assert "set aside" not in offline.mergegate("doctor").output


REVERSER, BASE = "profiles/demo/models/reverser", "profiles/demo/models/base"
COMMANDS = {
    "merge": ["merge", "profiles/demo/recipes/linear.yaml", "o"],
    "merge of adapters": ["merge", "profiles/demo/recipes/adapters.yaml", "o"],
    "merge --share": ["merge", "profiles/demo/recipes/linear.yaml", "o", "--share"],
    "merge of adapters --share": ["merge", "profiles/demo/recipes/adapters.yaml", "o", "--share"],
    "extract-lora": ["extract-lora", REVERSER, BASE, "--rank=1", "--output=o"],
    "transplant-tokenizer": ["transplant-tokenizer", REVERSER, BASE, "o"],
}
SHARED = ["steps.partial/notes", "merge.partial", "config.json", "a.journal.partial", "x.partial.damaged-1"]


def of_the_user(root: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in root.rglob("*") if path.is_file() and ".mergegate" not in path.parts}


EXISTING = (
    *((command, "o.partial/notes.txt") for command in COMMANDS if "--share" not in command),
    *((command, "o/notes.txt") for command in COMMANDS),
    *(("merge --share", f"o/{name}") for name in SHARED),
)


@pytest.mark.parametrize(("command", "name"), sampled_rows(EXISTING, EXISTING[::4]))
def test_files_of_the_user_stay(offline: Project, command: str, name: str) -> None:
    (offline.root / name).parent.mkdir(parents=True)
    (offline.root / name).write_text("of the user")
    before = of_the_user(offline.root)
    result = expect(offline.mergegate(*COMMANDS[command]), 2)
    assert name.split("/")[0] in result.output or "with --share" in result.output
    assert of_the_user(offline.root) == before


@pytest.mark.parametrize("command", ["doctor --repair", "store gc --older-than 0 --quota 0B"])
def test_files_of_the_user_in_the_home_stay(offline: Project, command: str) -> None:
    names = ["backup.partial", "photo.damaged-1.jpg", "store/notes.txt", "store/merge/big.partial", "store/x/y.doomed"]
    names += ["store/merge/photo.damaged-x", "reports/notes.partial", "12"]
    for name in names:
        (offline.home / name).parent.mkdir(parents=True, exist_ok=True)
        (offline.home / name).write_text("of the user")
    for _ in range(2):
        offline.mergegate(*command.split())
    assert {name: (offline.home / name).exists() for name in names} == dict.fromkeys(names, True)
