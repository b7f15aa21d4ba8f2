"""Retention as a pure decision, and the records of runs that it reads: a lease ends with its process."""

from __future__ import annotations

import itertools
import os
import signal
import string
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mergegate.merge_core.errors import InvalidInput
from mergegate.merge_core.wording import parse_bytes
from mergegate.tasks.base import store
from mergegate.tasks.base.store.collection import needed_by, plan_retention
from mergegate.tasks.base.store.runs import LAST_RUNS, runs_that_count

NOW = 1_000_000_000.0
DAY = 86_400.0

relaxed = settings(suppress_health_check=[HealthCheck.too_slow])


def name_of(number: int) -> store.EntryName:
    return store.EntryName("abc"[number % 3], f"{number:032x}")


@st.composite
def stores(draw: st.DrawFn) -> list[store.StoreEntry]:
    kinds = st.sampled_from(["artifact", "value", "unfinished", "left over"])
    ages = st.floats(-DAY, 400 * DAY)
    drawn = draw(st.lists(st.tuples(kinds, st.integers(0, 10**12), ages), max_size=12))
    return [
        store.StoreEntry(name_of(n).stage, f"{name_of(n).key}.{n}", name_of(n).key, kind, size, NOW - age)
        for n, (kind, size, age) in enumerate(drawn)
    ]


runs = st.lists(
    st.builds(
        store.RunUse,
        run=st.text(string.ascii_lowercase, min_size=4, max_size=4),
        flow=st.sampled_from(["release", "sweep"]),
        profile=st.sampled_from(["", "demo", "other"]),
        started=st.floats(0, NOW),
        status=st.sampled_from([store.RELEASED, "nothing new", "refused", "invalid", ""]),
        judged=st.booleans(),
        is_live=st.booleans(),
        used=st.dictionaries(st.integers(0, 11).map(name_of), st.just("")),
    ),
    max_size=8,
    unique_by=lambda run: run.run,
)
rules = st.builds(
    store.RetentionRule, grace_s=st.none() | st.floats(0, 300 * DAY), quota=st.none() | st.integers(0, 10**13)
)


def planned(
    entries: list[store.StoreEntry], known: list[store.RunUse], rule: store.RetentionRule, beside: int = 0
) -> store.RetentionPlan:
    return plan_retention(entries, needed_by(known, runs_that_count(known)), rule, NOW, other_bytes=beside)


@pytest.mark.story
@relaxed
@given(stores(), runs, rules, st.integers(0, 10**9))
def test_a_plan_decides_each_entry_once_and_meets_the_quota_unless_needed_entries_exceed_it(
    entries: list[store.StoreEntry], known: list[store.RunUse], rule: store.RetentionRule, beside: int
) -> None:
    plan = planned(entries, known, rule, beside)
    assert sorted(one.name for one, _ in (*plan.removals, *plan.retained)) == sorted(one.name for one in entries)
    assert plan.bytes_before == beside + sum(one.bytes for one in entries)
    assert plan.bytes_after == beside + sum(one.bytes for one, _ in plan.retained)
    assert all(why for _, why in (*plan.removals, *plan.retained))
    needed = needed_by(known, runs_that_count(known))
    kept = [one for one in entries if one.entry_name in needed and one.kind != "left over"]
    if rule.quota is None:
        assert plan.over_quota == 0
    elif plan.over_quota:
        assert plan.bytes_after == beside + sum(one.bytes for one in kept) > rule.quota
    else:
        assert plan.bytes_after <= rule.quota


@pytest.mark.story
@relaxed
@given(stores(), runs, rules)
def test_only_the_least_recently_used_entries_are_removed_and_none_of_a_counting_run(
    entries: list[store.StoreEntry], known: list[store.RunUse], rule: store.RetentionRule
) -> None:
    plan = planned(entries, known, rule)
    went = [one for one, _ in plan.removals]
    spared = [one for one, why in plan.retained if why in ("in its grace period", "within the quota")]
    assert all(old.used <= young.used for old in went for young in spared)
    if went and rule.quota is not None and (rule.grace_s is None or max(0, NOW - went[-1].used) < rule.grace_s):
        assert plan.bytes_after + went[-1].bytes > rule.quota, "the last one had to go"
    if rule.quota is None:
        assert all(rule.grace_s is not None and max(0, NOW - one.used) >= rule.grace_s for one in went)
    live = [run for run in known if run.is_live]
    for kind in itertools.product(("release", "sweep"), ("demo", "other")):
        own = [run for run in known if (run.flow, run.profile) == kind]
        those = sorted(own, key=lambda run: (run.started, run.run))
        judged = [run for run in those if run.judged]
        live += those[-1:] + judged[-LAST_RUNS:] + [run for run in judged if run.status == store.RELEASED][-1:]
    gone = {one.entry_name for one in went if one.kind in ("artifact", "value")}
    assert not gone & {name for run in live for name in run.used}


def run(
    at: int, profile: str = "demo", *, status: str = "refused", judged: bool = True, live: bool = False
) -> store.RunUse:
    return store.RunUse(f"{profile}-{at}", "release", profile, float(at), status, judged, live, {name_of(at): ""})


def test_runs_without_a_verdict_displace_no_other_run() -> None:
    """A month-long outage of the Hub must not cost the evaluations of all parents."""
    good, better = run(1, status=store.RELEASED), run(2)
    outage = [run(at, status="refused", judged=False) for at in range(3, 33)]
    assert set(runs_that_count([good, better, *outage])) == {"demo-1", "demo-2", "demo-32"}


def test_the_run_that_made_the_champion_counts_however_long_ago() -> None:
    assert runs_that_count([run(1, status=store.RELEASED), *(run(at) for at in range(2, 300))]) == {
        "demo-1": "release of demo",
        "demo-298": "last runs of demo",
        "demo-299": "last runs of demo",
    }
    # A command without a profile counts only while it is running.
    assert runs_that_count([run(1, profile="", live=True), run(2, profile="")]) == {"-1": "in use"}


def test_the_strongest_reason_is_reported() -> None:
    known = [run(1, status=store.RELEASED), run(2), run(3, live=True, status="")]
    used = {name_of(0): ""}
    known = [store.RunUse(**{**vars(one), "used": used}) for one in known]
    assert needed_by(known, runs_that_count(known)) == {name_of(0): "in use by a run of demo"}


SIZES = {"50GB": 50 * 10**9, "1.5 TB": 1_500_000_000_000, "2k": 2000, "10 MiB": 10 * 2**20, "3gib": 3 * 2**30}


@pytest.mark.parametrize(("said", "bytes_"), [*SIZES.items(), ("0", 0), ("123", 123)])
def test_sizes_are_parsed_in_common_notations(said: str, bytes_: int) -> None:
    assert parse_bytes(said, "here") == bytes_


@pytest.mark.parametrize("said", ["", "GB", "-1GB", "1e9", "fifty", "1.GB", "50 G B", "٣GB", "9" * 30])
def test_an_invalid_size_is_refused(said: str) -> None:
    with pytest.raises(InvalidInput, match="here"):
        parse_bytes(said, "here")


KEY = "0123456789abcdef" * 4
NAME = store.EntryName("merge", KEY[:32])


def ended(runs: Path, run: str, profile: str = "demo", status: str = "refused", judged: bool = True) -> None:
    with store.open_run(runs, run, "release", profile) as opened:
        store.record_use(runs, run, "merge", KEY, "")
        opened.end(status, judged=judged)


def test_a_run_is_live_inside_its_block_and_a_record_afterwards(tmp_path: Path) -> None:
    with store.open_run(tmp_path / "runs", "one", "release", "demo") as opened:
        assert store.record_use(tmp_path / "runs", "one", "merge", KEY, "reverser")
        (run,) = store.read_runs(tmp_path / "runs")
        assert (run.is_live, run.status, run.used) == (True, "", {NAME: "reverser"})
        assert (tmp_path / "runs").stat().st_mode & 0o077 == 0
        opened.end("released", judged=True)
    (run,) = store.read_runs(tmp_path / "runs")
    assert (run.is_live, run.status, run.judged, run.profile, run.flow) == (False, "released", True, "demo", "release")


def test_without_a_registered_run_nothing_is_recorded(tmp_path: Path) -> None:
    assert not store.record_use(tmp_path, "nobody", "merge", KEY, "")
    with store.open_run(tmp_path, "process-1", "command", ""):  # A command without a profile leaves no record.
        assert [run.is_live for run in store.read_runs(tmp_path)] == [True]
    assert list(tmp_path.iterdir()) == []


def test_a_killed_run_is_no_longer_live_and_keeps_its_record(tmp_path: Path) -> None:
    script = f"""
import os, signal, pathlib
from mergegate.tasks.base.store import open_run, record_use
runs = pathlib.Path({str(tmp_path)!r})
with open_run(runs, "killed", "release", "demo"):
    record_use(runs, "killed", "merge", {KEY!r}, "")
    print("noted", flush=True)
    signal.pause()
"""
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, cwd=Path.cwd()) as child:
        assert child.stdout.readline() == b"noted\n"
        assert [run.is_live for run in store.read_runs(tmp_path)] == [True]
        store.forget_runs(tmp_path)
        assert store.forget_runs(tmp_path, "demo") == 0, "a run that goes on is not forgotten"
        os.kill(child.pid, signal.SIGKILL)
        child.wait()
    (run,) = store.read_runs(tmp_path)
    assert (run.is_live, run.status, set(run.used)) == (False, "", {NAME})


def test_a_suspended_run_continues_its_record(tmp_path: Path) -> None:
    ended(tmp_path, "one")
    with store.open_run(tmp_path, "one", "release", "demo"):
        store.record_use(tmp_path, "one", "gate", KEY, "")
        (run,) = store.read_runs(tmp_path)
        assert run.is_live
        assert run.status == ""
        assert set(run.used) == {NAME, store.EntryName("gate", KEY[:32])}


def test_an_incomplete_line_loses_only_itself(tmp_path: Path) -> None:
    ended(tmp_path, "one", status="")
    with (tmp_path / "one.jsonl").open("ab") as file:
        file.write(b'{"stage": "gate", "key": "0123')
    with store.open_run(tmp_path, "one", "release", "demo"):
        store.record_use(tmp_path, "one", "report", KEY, "")
        (run,) = store.read_runs(tmp_path)
    assert set(run.used) == {NAME, store.EntryName("report", KEY[:32])}


@pytest.mark.parametrize(
    "damage",
    [
        *(b"", b"garbage", b"[]\n{}", b'{"run": 1}', b"\xff\xfe", b'{"run": "x"}'),
        *(Path.mkdir, os.mkfifo, lambda path: path.symlink_to("nowhere")),
    ],
)
def test_a_damaged_record_is_removed_and_the_others_are_read(tmp_path: Path, damage: Any) -> None:
    ended(tmp_path, "one")
    path = tmp_path / "two.jsonl"
    path.write_bytes(damage) if isinstance(damage, bytes) else damage(path)
    assert [run.run for run in store.read_runs(tmp_path)] == ["one"]
    assert [path.name for path in tmp_path.iterdir()] == ["one.jsonl"]


def test_pruning_keeps_the_counting_runs_of_each_profile(tmp_path: Path) -> None:
    ended(tmp_path, "a1", status="released")
    for night in range(2, 7):
        ended(tmp_path, f"a{night}")
    ended(tmp_path, "a7", judged=False)
    ended(tmp_path, "b1", profile="other")
    store.forget_runs(tmp_path)
    assert [run.run for run in store.read_runs(tmp_path)] == ["a1", "a5", "a6", "a7", "b1"]
    assert store.forget_runs(tmp_path, "demo") == 4
    assert [run.run for run in store.read_runs(tmp_path)] == ["b1"]
