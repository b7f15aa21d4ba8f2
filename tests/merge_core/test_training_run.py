"""Windows of checkpoints of a training run, and their weights."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mergegate.merge_core.errors import InvalidInput
from mergegate.merge_core.recipe import (
    RunCheckpoint,
    RunSettings,
    Schedule,
    load_recipe,
    parse_amount,
    parse_run,
    run_recipe,
    schedule_weights,
    select_window,
    step_in_name,
    tokens_in_name,
)

SCHEDULES = ("mean", "lawa", "linear", "cosine", "minus_sqrt", "exponential", "ema")
steps_of_a_window = st.lists(st.integers(0, 10**7), min_size=1, max_size=40, unique=True).map(sorted)
schedules = st.builds(Schedule, st.sampled_from(SCHEDULES), st.floats(0.01, 0.99))


@settings(max_examples=40)
@given(steps_of_a_window, schedules)
def test_weights_add_up_to_one_and_none_is_negative(steps: list[int], schedule: Schedule) -> None:
    weights = schedule_weights(steps, schedule)
    assert len(weights) == len(steps)
    assert min(weights) >= 0
    assert math.fsum(weights) == pytest.approx(1, abs=1e-12)


@settings(max_examples=40)
@given(st.integers(2, 30), st.sampled_from(["linear", "cosine", "minus_sqrt", "exponential"]), st.randoms())
def test_merging_a_window_equals_training_with_the_decayed_rate(count: int, name: str, random: object) -> None:
    """SGD from the first checkpoint, with each later update counted as often as the decay curve says."""
    curve = {
        "linear": lambda t: 1 - t,
        "cosine": lambda t: 0.5 + 0.5 * math.cos(t * math.pi),
        "minus_sqrt": lambda t: 1 - t**0.5,
        "exponential": lambda t: 0.1**t,
    }[name]
    updates = np.random.default_rng(count).normal(size=(count - 1, 5))
    checkpoints = np.cumsum([np.ones(5), *updates], axis=0)
    decayed = np.ones(5) + sum(curve(j / count) * update for j, update in enumerate(updates, 1))
    weights = schedule_weights([100 * j for j in range(count)], Schedule(name, 0.1))
    assert np.array(weights) @ checkpoints == pytest.approx(decayed, rel=1e-12)


@settings(max_examples=40)
@given(steps_of_a_window, st.floats(0, 0.99))
def test_ema_equals_the_recursion(steps: list[int], keep: float) -> None:
    values = np.random.default_rng(len(steps)).normal(size=len(steps))
    average = values[0]
    for value in values[1:]:
        average = keep * average + (1 - keep) * value
    assert np.dot(schedule_weights(steps, Schedule("ema", keep)), values) == pytest.approx(average, rel=1e-9, abs=1e-9)


def test_an_uneven_run_is_weighted_by_steps() -> None:
    """A checkpoint that covers twice the training counts twice under a linear decay."""
    weights = schedule_weights([0, 100, 300, 400], Schedule("linear"))
    assert weights[1] / weights[0] == pytest.approx(2)
    assert weights[2] == pytest.approx(weights[0])


@pytest.mark.parametrize(
    ("name", "step", "tokens"),
    [
        ("checkpoint-1000", 1000, None), ("step1000-tokens4B", 1000, 4 * 10**9),
        ("stage1-step140000-tokens294B", 140000, 294 * 10**9), ("step1000-tokens2.01B", 1000, 2_010_000_000),
        ("global_step1200", 1200, None), ("iter_0000500", 500, None), ("1500", 1500, None), ("ckpt=70", 70, None),
        ("final", None, None), ("llama-3-8b", None, None),
    ],
)  # fmt: skip
def test_step_and_tokens_are_read_from_names(name: str, step: int | None, tokens: int | None) -> None:
    assert step_in_name(name) == step
    assert tokens_in_name(name) == tokens


@pytest.mark.parametrize(("text", "amount"), [("2.01K", 2010), ("8.2T", 82 * 10**11), ("9" * 5000, None), (0.5, None)])
def test_amounts_with_units_are_exact(text: object, amount: int | None) -> None:
    assert parse_amount(text) == amount


def _run(*steps: int) -> list[RunCheckpoint]:
    return [RunCheckpoint(f"c-{step}", step, step * 1000) for step in steps]


@pytest.mark.parametrize(
    ("settings", "steps"),
    [
        ({"window": ("checkpoints", 3)}, [300, 400, 500]), ({"window": ("steps", 200)}, [400, 500]),
        ({"window": ("tokens", 200_001)}, [300, 400, 500]), ({"window": None}, [9, 100, 200, 300, 400, 500]),
        ({"window": None, "every": ("checkpoints", 2)}, [100, 300, 500]),
        ({"window": None, "every": ("steps", 200)}, [200, 400]),
    ],
)  # fmt: skip
def test_windows_select_the_newest_checkpoints(settings: Any, steps: list[int]) -> None:
    run = _run(9, 100, 200, 300, 400, 500)[::-1]
    assert [checkpoint.step for checkpoint in select_window(run, RunSettings(("r",), **settings), "r")] == steps


def test_steps_that_are_multiples_stay_in_the_window_when_the_run_grows() -> None:
    settings = RunSettings(("r",), window=("checkpoints", 2), every=("steps", 200))
    assert select_window(_run(100, 200, 300, 400), settings, "r") == select_window(
        _run(100, 200, 300, 400, 500), settings, "r"
    )


@pytest.mark.parametrize(
    ("document", "complaint"),
    [
        ({"run": 3}, "expected the directory of a training run"),
        ({"run": "r", "models": []}, "cannot be combined with run"), ({"run": "r", "window": 0}, "found 0"),
        ({"run": "r", "window": True}, "found True"),
        ({"run": "r", "window": {"tokens": "4 B and more"}}, "{tokens: N}"),
        ({"run": "r", "window": {"epochs": 2}}, "{steps: N} or {tokens: N}"),
        ({"run": "r", "every": {"tokens": 5}}, "or {steps: N}"),
        ({"run": "r", "schedule": "cosin"}, "did you mean 'cosine'"),
        ({"run": "r", "schedule": {"cosine": 0.5}}, "cosine without a value"),
        ({"run": "r", "schedule": {"ema": 1}}, "below 1"), ({"run": "r", "schedule": {"exponential": 0}}, "above 0"),
        ({"run": "r", "steps": 5}, "a file (YAML or JSON)"),
    ],
)  # fmt: skip
def test_an_invalid_run_is_refused_with_what_to_write(document: dict[str, object], complaint: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        parse_run(document, "recipe")
    error = caught.value
    assert complaint in f"found {error.found}, expected {error.expected}, {error.remedy}"


def test_two_checkpoints_of_one_step_and_unknown_tokens_are_refused() -> None:
    with pytest.raises(InvalidInput, match="both of step 5"):
        select_window([RunCheckpoint("a", 5), RunCheckpoint("b", 5)], RunSettings(("r",)), "recipe")
    with pytest.raises(InvalidInput, match="number of tokens of a is unknown"):
        select_window([RunCheckpoint("a", 5)], RunSettings(("r",), window=("tokens", 5)), "recipe")


def test_a_run_becomes_a_plain_recipe() -> None:
    document = {"run": "r", "window": 2, "schedule": "minus_sqrt", "dtype": "bfloat16"}
    plain = run_recipe(document, _run(100, 200), Schedule("minus_sqrt"), "recipe")
    assert plain.keys() == {"merge_method", "models", "dtype"}
    recipe = load_recipe(plain)
    assert recipe.merge_method == "linear"
    assert [str(source.model) for source in recipe.sources] == ["c-100", "c-200"]
    with pytest.raises(InvalidInput, match="weights all models equally"):
        run_recipe({"run": "r", "merge_method": "median"}, _run(1, 2), Schedule("cosine"), "recipe")
    with pytest.raises(InvalidInput, match="have not been listed yet"):
        load_recipe({"run": "r"})
