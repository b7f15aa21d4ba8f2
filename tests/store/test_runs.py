"""Records of runs: a lease that ends with its process, and the record that remains."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from mergegate.tasks.store import EntryName, forget_runs, open_run, read_runs, record_use

KEY = "0123456789abcdef" * 4
NAME = EntryName("merge", KEY[:32])


def ended(runs: Path, run: str, profile: str = "demo", status: str = "refused", judged: bool = True) -> None:
    with open_run(runs, run, "release", profile) as opened:
        record_use(runs, run, "merge", KEY, "")
        opened.end(status, judged=judged)


def test_a_run_is_live_inside_its_block_and_a_record_afterwards(tmp_path: Path) -> None:
    with open_run(tmp_path / "runs", "one", "release", "demo") as opened:
        assert record_use(tmp_path / "runs", "one", "merge", KEY, "reverser")
        (run,) = read_runs(tmp_path / "runs")
        assert (run.is_live, run.status, run.used) == (True, "", {NAME: "reverser"})
        opened.end("released", judged=True)
    (run,) = read_runs(tmp_path / "runs")
    assert (run.is_live, run.status, run.judged, run.profile, run.flow) == (False, "released", True, "demo", "release")


def test_without_a_registered_run_nothing_is_recorded(tmp_path: Path) -> None:
    assert not record_use(tmp_path, "nobody", "merge", KEY, "")
    with open_run(tmp_path, "process-1", "command", ""):  # A command without a profile leaves no record.
        assert [run.is_live for run in read_runs(tmp_path)] == [True]
    assert list(tmp_path.iterdir()) == []


def test_a_killed_run_is_no_longer_live_and_keeps_its_record(tmp_path: Path) -> None:
    script = f"""
import os, signal, pathlib
from mergegate.tasks.store import open_run, record_use
runs = pathlib.Path({str(tmp_path)!r})
with open_run(runs, "killed", "release", "demo"):
    record_use(runs, "killed", "merge", {KEY!r}, "")
    print("noted", flush=True)
    signal.pause()
"""
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, cwd=Path.cwd()) as child:
        assert child.stdout.readline() == b"noted\n"
        assert [run.is_live for run in read_runs(tmp_path)] == [True]
        forget_runs(tmp_path)
        assert forget_runs(tmp_path, "demo") == 0, "a run that goes on is not forgotten"
        os.kill(child.pid, signal.SIGKILL)
        child.wait()
    (run,) = read_runs(tmp_path)
    assert (run.is_live, run.status, set(run.used)) == (False, "", {NAME})


def test_a_suspended_run_continues_its_record(tmp_path: Path) -> None:
    ended(tmp_path, "one")
    with open_run(tmp_path, "one", "release", "demo"):
        record_use(tmp_path, "one", "gate", KEY, "")
        (run,) = read_runs(tmp_path)
        assert run.is_live
        assert run.status == ""
        assert set(run.used) == {NAME, EntryName("gate", KEY[:32])}


def test_an_incomplete_line_loses_only_itself(tmp_path: Path) -> None:
    ended(tmp_path, "one", status="")
    with (tmp_path / "one.jsonl").open("ab") as file:
        file.write(b'{"stage": "gate", "key": "0123')
    with open_run(tmp_path, "one", "release", "demo"):
        record_use(tmp_path, "one", "report", KEY, "")
        (run,) = read_runs(tmp_path)
    assert set(run.used) == {NAME, EntryName("report", KEY[:32])}


@pytest.mark.parametrize(
    "damage",
    [
        *(b"", b"garbage", b"[]\n{}", b'{"run": 1}', b"\xff\xfe", b'{"run": "x"}'),
        *(Path.mkdir, os.mkfifo, lambda path: path.symlink_to("nowhere")),
    ],
)
def test_a_damaged_record_is_set_aside_and_the_others_are_read(tmp_path: Path, damage: Any) -> None:
    ended(tmp_path, "one")
    path = tmp_path / "two.jsonl"
    path.write_bytes(damage) if isinstance(damage, bytes) else damage(path)
    assert [run.run for run in read_runs(tmp_path)] == ["one"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["one.jsonl", "two.jsonl.damaged-1"]


def test_pruning_keeps_the_counting_runs_of_each_profile(tmp_path: Path) -> None:
    ended(tmp_path, "a1", status="released")
    for night in range(2, 7):
        ended(tmp_path, f"a{night}")
    ended(tmp_path, "a7", judged=False)
    ended(tmp_path, "b1", profile="other")
    forget_runs(tmp_path)
    assert [run.run for run in read_runs(tmp_path)] == ["a1", "a5", "a6", "a7", "b1"]
    assert forget_runs(tmp_path, "demo") == 4
    assert [run.run for run in read_runs(tmp_path)] == ["b1"]


def test_records_are_closed_to_others(tmp_path: Path) -> None:
    ended(tmp_path / "runs", "one")
    assert (tmp_path / "runs").stat().st_mode & 0o077 == 0
