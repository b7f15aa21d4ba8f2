"""Retention as a pure decision: needed artifacts stay, quotas hold where possible, the least recently used go first."""

from __future__ import annotations

import itertools
import string

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mergegate.merge_core.errors import InvalidInput
from mergegate.merge_core.wording import parse_bytes
from mergegate.tasks.store import RELEASED, EntryName, RetentionPlan, RetentionRule, RunUse, StoreEntry
from mergegate.tasks.store.retention import LAST_RUNS, needed_by, plan_retention, runs_that_count

NOW = 1_000_000_000.0
DAY = 86_400.0

relaxed = settings(suppress_health_check=[HealthCheck.too_slow])


def name_of(number: int) -> EntryName:
    return EntryName("abc"[number % 3], f"{number:032x}")


@st.composite
def stores(draw: st.DrawFn) -> list[StoreEntry]:
    kinds = st.sampled_from(["artifact", "value", "unfinished", "set aside", "left over"])
    ages = st.floats(-DAY, 400 * DAY)
    drawn = draw(st.lists(st.tuples(kinds, st.integers(0, 10**12), ages), max_size=12))
    return [
        StoreEntry(name_of(n).stage, f"{name_of(n).key}.{n}", name_of(n).key, kind, size, NOW - age)
        for n, (kind, size, age) in enumerate(drawn)
    ]


runs = st.lists(
    st.builds(
        RunUse,
        run=st.text(string.ascii_lowercase, min_size=4, max_size=4),
        flow=st.sampled_from(["release", "sweep"]),
        profile=st.sampled_from(["", "demo", "other"]),
        started=st.floats(0, NOW),
        status=st.sampled_from([RELEASED, "nothing new", "refused", "invalid", ""]),
        judged=st.booleans(),
        is_live=st.booleans(),
        used=st.dictionaries(st.integers(0, 11).map(name_of), st.just("")),
    ),
    max_size=8,
    unique_by=lambda run: run.run,
)
rules = st.builds(RetentionRule, grace_s=st.none() | st.floats(0, 300 * DAY), quota=st.none() | st.integers(0, 10**13))


def planned(entries: list[StoreEntry], known: list[RunUse], rule: RetentionRule, beside: int = 0) -> RetentionPlan:
    return plan_retention(entries, needed_by(known, runs_that_count(known)), rule, NOW, other_bytes=beside)


@pytest.mark.story
@relaxed
@given(stores(), runs, rules, st.integers(0, 10**9))
def test_each_entry_is_decided_once_and_the_sizes_add_up(
    entries: list[StoreEntry], known: list[RunUse], rule: RetentionRule, beside: int
) -> None:
    plan = planned(entries, known, rule, beside)
    assert sorted(one.name for one, _ in (*plan.removals, *plan.retained)) == sorted(one.name for one in entries)
    assert plan.bytes_before == beside + sum(one.bytes for one in entries)
    assert plan.bytes_after == beside + sum(one.bytes for one, _ in plan.retained)
    assert all(why for _, why in (*plan.removals, *plan.retained))


@pytest.mark.story
@relaxed
@given(stores(), runs, rules)
def test_entries_of_counting_runs_are_never_removed(
    entries: list[StoreEntry], known: list[RunUse], rule: RetentionRule
) -> None:
    gone = {one.entry_name for one, _ in planned(entries, known, rule).removals if one.kind in ("artifact", "value")}
    live = [run for run in known if run.is_live]
    for kind in itertools.product(("release", "sweep"), ("demo", "other")):
        those = sorted(
            (run for run in known if (run.flow, run.profile) == kind), key=lambda run: (run.started, run.run)
        )
        judged = [run for run in those if run.judged]
        released = [run for run in judged if run.status == RELEASED]
        live += those[-1:] + judged[-LAST_RUNS:] + released[-1:]
    assert not gone & {name for run in live for name in run.used}


@pytest.mark.story
@relaxed
@given(stores(), runs, rules)
def test_the_quota_is_met_unless_needed_entries_exceed_it(
    entries: list[StoreEntry], known: list[RunUse], rule: RetentionRule
) -> None:
    plan = planned(entries, known, rule)
    if rule.quota is None:
        assert plan.over_quota == 0
        return
    needed = needed_by(known, runs_that_count(known))
    kept = [one for one in entries if one.entry_name in needed and one.kind not in ("set aside", "left over")]
    if plan.over_quota:
        assert plan.bytes_after == sum(one.bytes for one in kept) > rule.quota
    else:
        assert plan.bytes_after <= rule.quota


@pytest.mark.story
@relaxed
@given(stores(), runs, rules)
def test_only_as_many_least_recently_used_entries_as_necessary_are_removed(
    entries: list[StoreEntry], known: list[RunUse], rule: RetentionRule
) -> None:
    plan = planned(entries, known, rule)
    went = [one for one, _ in plan.removals]
    spared = [one for one, why in plan.retained if why in ("in its grace period", "within the quota")]
    assert all(old.used <= young.used for old in went for young in spared)
    if went and rule.quota is not None and (rule.grace_s is None or max(0, NOW - went[-1].used) < rule.grace_s):
        assert plan.bytes_after + went[-1].bytes > rule.quota, "the last one had to go"
    if rule.quota is None:
        assert all(rule.grace_s is not None and max(0, NOW - one.used) >= rule.grace_s for one in went)


def run(at: int, profile: str = "demo", *, status: str = "refused", judged: bool = True, live: bool = False) -> RunUse:
    return RunUse(f"{profile}-{at}", "release", profile, float(at), status, judged, live, {name_of(at): ""})


def test_runs_without_a_verdict_displace_no_other_run() -> None:
    """A month-long outage of the Hub must not cost the evaluations of all parents."""
    good, better = run(1, status=RELEASED), run(2)
    outage = [run(at, status="refused", judged=False) for at in range(3, 33)]
    assert set(runs_that_count([good, better, *outage])) == {"demo-1", "demo-2", "demo-32"}


def test_the_run_that_made_the_champion_counts_however_long_ago() -> None:
    assert runs_that_count([run(1, status=RELEASED), *(run(at) for at in range(2, 300))]) == {
        "demo-1": "release of demo",
        "demo-298": "last runs of demo",
        "demo-299": "last runs of demo",
    }


def test_a_command_without_a_flow_counts_while_it_goes_on() -> None:
    assert runs_that_count([run(1, profile="", live=True), run(2, profile="")]) == {"-1": "in use"}


def test_the_strongest_reason_is_reported() -> None:
    known = [run(1, status=RELEASED), run(2), run(3, live=True, status="")]
    used = {name_of(0): ""}
    known = [RunUse(**{**vars(one), "used": used}) for one in known]
    assert needed_by(known, runs_that_count(known)) == {name_of(0): "in use by a run of demo"}


SIZES = {"50GB": 50 * 10**9, "1.5 TB": 1_500_000_000_000, "2k": 2000, "10 MiB": 10 * 2**20, "3gib": 3 * 2**30}


@pytest.mark.parametrize(("said", "bytes_"), [*SIZES.items(), ("0", 0), ("123", 123)])
def test_sizes_are_parsed_in_common_notations(said: str, bytes_: int) -> None:
    assert parse_bytes(said, "here") == bytes_


@pytest.mark.parametrize("said", ["", "GB", "-1GB", "1e9", "fifty", "1.GB", "50 G B", "٣GB", "9" * 30])
def test_an_invalid_size_is_refused(said: str) -> None:
    with pytest.raises(InvalidInput, match="here"):
        parse_bytes(said, "here")
