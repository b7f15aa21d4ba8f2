"""Time estimates for a machine without history are within a factor of three of recorded runs."""

from __future__ import annotations

from dataclasses import replace

import pytest

from mergegate.flows.cli.run_plan import PlannedRun, PlannedStage
from mergegate.merge_core.engine.forecast import Rates
from mergegate.merge_core.wording import format_roughly
from mergegate.tasks.preflight.duration import (
    AROUND,
    STARTING,
    NetworkSize,
    PromptLoad,
    evaluation_seconds,
    merge_seconds,
)

# Probe results for two cores that other programs used at the same time.
RATES = Rates(
    read=2.2e9, write=5.2e8, copy=8.1e9, hash=1.8e9, units=4.5e9, same_disk=True, measured_at=0.0, products=3.0e10
)
DEMO = NetworkSize(parameters=280_000, nbytes=564_000, tensors=29)
MIDDLE = NetworkSize(parameters=20_900_000, nbytes=83_600_000, tensors=74)
# Requests, tokens and batch size of one call; number of calls, and their total seconds in a run on that machine.
RECORDED = {
    "perplexity of the demo, with the start of its process": (DEMO, PromptLoad(600, 27_700, batch=16), 4, 4.0),
    "a task of the demo": (DEMO, PromptLoad(400, 8_800, batch=16), 12, 3.35),
    "perplexity of a larger model": (MIDDLE, PromptLoad(300, 13_900, batch=16), 3, 50.9),
    "a task of a larger model": (MIDDLE, PromptLoad(100, 2_200, batch=16), 3, 9.6),
}


@pytest.mark.parametrize("name", RECORDED)
def test_evaluation_time_is_predicted_within_the_stated_factor(name: str) -> None:
    size, asked, calls, took = RECORDED[name]
    starting = STARTING if "start" in name else 0.0
    guessed = starting + calls * evaluation_seconds(size, asked, RATES)
    assert took / 3 < guessed < 3 * took


def test_the_duration_of_the_demo_is_predicted() -> None:
    guessed = merge_seconds(1_680_000, 564_000, RATES) + STARTING + AROUND
    guessed += 4 * evaluation_seconds(DEMO, PromptLoad(600, 27_700, batch=16), RATES)
    guessed += 12 * evaluation_seconds(DEMO, PromptLoad(400, 8_800, batch=16), RATES)
    assert 16.7 / 3 < guessed < 3 * 16.7


def test_larger_loads_take_longer_and_batches_less() -> None:
    written = PromptLoad(100, 10_000, written=12_800, batch=16)
    assert evaluation_seconds(MIDDLE, written, RATES) > 2 * evaluation_seconds(
        MIDDLE, replace(written, written=0), RATES
    )
    assert evaluation_seconds(MIDDLE, written, RATES) > evaluation_seconds(MIDDLE, replace(written, batch=64), RATES)
    assert evaluation_seconds(MIDDLE, written, RATES) > evaluation_seconds(DEMO, written, RATES)


def test_predictions_are_marked_and_unknown_durations_are_not_summed() -> None:
    measured = PlannedStage("merge", "", False, 1, 100.0)
    guessed = PlannedStage("evaluate", "merge, copy", False, 400, 7200.0, rough=True)
    assert PlannedRun((measured,)).time() == "about 1 m 40 s, as in the last run"
    assert PlannedRun((guessed,)).time() == "about 2 h, first run here"
    assert PlannedRun((measured, guessed)).time() == "about 2 h, first run of some stages here"
    unknown = PlannedStage("evaluate", "merge, served", False, 400)
    assert PlannedRun((guessed, unknown)).seconds is None
    assert PlannedRun((PlannedStage("merge", "", True),)).sentence().startswith("all 1 expensive stages")


@pytest.mark.parametrize(
    ("seconds", "said"),
    [
        (0.2, "< 3 s"),
        (14, "15 s"),
        (130, "2 min"),
        (41 * 60, "40 min"),
        (9100, "2.5 h"),
        (40_000, "11 h"),
        (3e5, "3 days"),
    ],
)
def test_a_predicted_duration_has_few_digits(seconds: float, said: str) -> None:
    assert format_roughly(seconds) == said
