"""The kill switch: the faults that stop a candidate immediately, and the number of requests that this takes."""

from __future__ import annotations

import numpy as np
import pytest
from arm_rows import rows
from hypothesis import given
from hypothesis import strategies as st

from mergegate.tasks.shadow import ArmRow, SwitchRule, kill_reason

RULE = SwitchRule()
PARENT = rows("parent", 200)


@pytest.mark.parametrize(
    "fault",
    [
        pytest.param({"status": 503}, id="5xx"),
        pytest.param({"status": 429}, id="too much to do"),
        pytest.param({"status": 0, "error": "connection refused"}, id="no answer"),
        pytest.param({"status": 200, "error": "broke off"}, id="half an answer"),
        pytest.param({"status": 200, "fallback": True}, id="the parent stood in"),
        pytest.param({"status": 404}, id="declined, as nobody declines at the parent"),
    ],
)
def test_more_than_five_percent_failures_of_the_last_200_kill_the_candidate(fault: dict[str, object]) -> None:
    well = rows("candidate", 300)
    assert kill_reason(well + rows("candidate", 10, **fault), PARENT, RULE) is None
    said = kill_reason(well + rows("candidate", 11, **fault), PARENT, RULE)
    assert said is not None
    assert said.startswith("11 of the candidate's last 200 requests failed (11 times ")
    assert said.endswith("more than 5 % of 200")


def test_a_dead_candidate_is_killed_at_its_eleventh_request() -> None:
    dead = rows("candidate", 11, status=0, error="connection refused")
    assert kill_reason(dead[:10], (), RULE) is None
    assert kill_reason(dead, (), RULE) == (
        "11 of the candidate's last 11 requests failed (11 times connection refused), more than 5 % of 200"
    )


def test_old_failures_do_not_count() -> None:
    assert kill_reason(rows("candidate", 50, status=503) + rows("candidate", 200), PARENT, RULE) is None


def test_user_mistakes_on_both_arms_do_not_kill_the_candidate() -> None:
    """Every tenth request is malformed in either arm; the candidate refuses twice as many only if it is at fault."""

    def declined(arm: str, count: int) -> tuple[ArmRow, ...]:
        return rows(arm, 200 - count) + rows(arm, count, status=400)  # type: ignore[arg-type]

    assert kill_reason(declined("candidate", 28), declined("parent", 20), RULE) is None
    said = kill_reason(declined("candidate", 40), declined("parent", 20), RULE)
    assert said is not None
    assert "40 times HTTP 400; the parent refused 10.0 % of its own" in said


def test_fallback_answers_do_not_count_for_the_parent() -> None:
    parent = rows("parent", 200) + rows("parent", 200, fallback=True, status=400)
    assert kill_reason(rows("candidate", 189) + rows("candidate", 11, status=400), parent, RULE) is not None


def test_first_bytes_twice_as_slow_kill_the_candidate_after_200_requests() -> None:
    late, usual = rows("candidate", 200, first_byte=0.41), rows("parent", 200, first_byte=0.2)
    assert kill_reason(late, usual, RULE) == (
        "95 % of the candidate's last 200 first bytes arrived within 0.41 s, the parent's within 0.2 s, "
        "so the candidate is more than 2 times slower"
    )
    for few in ((late[1:], usual), (late, usual[1:])):
        assert kill_reason(*few, RULE) is None
    assert kill_reason(rows("candidate", 200, first_byte=0.4), usual, RULE) is None
    mostly = rows("candidate", 191, first_byte=0.2) + rows("candidate", 9, first_byte=60.0)
    assert kill_reason(mostly, usual, RULE) is None, "the slowest 5 % are nobody's business here"
    failing = late[:199] + rows("candidate", 1, status=503, first_byte=0.1)
    assert kill_reason(failing, usual, RULE) is None, "how fast it failed says nothing"


@pytest.mark.story
def test_an_equal_candidate_is_rarely_killed_by_chance() -> None:
    """The switch is checked after every 20 of 4,000 requests, with a first-byte latency as under load (log sd 0.6)."""
    rng = np.random.default_rng(2)
    for _ in range(10):
        candidate, parent = (
            [rows(arm, 1, first_byte=float(t))[0] for t in rng.lognormal(-2, 0.6, 4_000)]
            for arm in ("candidate", "parent")
        )
        assert all(kill_reason(candidate[:n], parent[:n], RULE) is None for n in range(20, 4_001, 20))


@given(st.lists(st.sampled_from([200, 400, 503]), max_size=60), st.lists(st.sampled_from([200, 400]), max_size=60))
def test_another_fault_never_saves_the_candidate(ours: list[int], theirs: list[int]) -> None:
    rule = SwitchRule(max_error_percent=20, window=50)
    candidate = tuple(row for status in ours for row in rows("candidate", 1, status=status))
    parent = tuple(row for status in theirs for row in rows("parent", 1, status=status))
    if kill_reason(candidate, parent, rule):
        assert kill_reason(candidate + rows("candidate", 1, status=503), parent, rule)
