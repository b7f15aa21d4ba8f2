"""Test racing: hopeless candidates are dropped, and equally good ones are dropped only at the declared error rate."""

from __future__ import annotations

import pickle

import numpy as np
import pytest
from scipy.stats import norm

from mergegate.tasks.sweep.race import Race, doubling_shares, going_on, heat, heats, spent_at
from mergegate.tasks.sweep.settings import Racing
from mergegate.tasks.sweep.trials import MetricKey, Sheet

REV, COPY = MetricKey("rev", "exact"), MetricKey("copy", "exact")
LOOKS = doubling_shares(0.125)


def first(sheet: Sheet, share: float) -> Sheet:
    return {asked: numbers[: int(np.ceil(share * len(numbers)))] for asked, numbers in sheet.items()}


def dropped_at(race: Race, sheet: Sheet) -> int | None:
    return next((i for i, share in enumerate(race.looks) if race.is_hopeless(first(sheet, share), i)), None)


def test_looks_double_up_to_all() -> None:
    assert LOOKS == (0.125, 0.25, 0.5, 1.0)
    assert doubling_shares(0.3) == (0.3, 0.6, 1.0)
    assert doubling_shares(1.0) == (1.0,)


def test_the_error_is_spent_before_the_last_look_as_obrien_and_fleming_spend_it() -> None:
    spent = [spent_at(look, 3, 0.05) for look in range(3)]
    assert sum(spent) == pytest.approx(0.05)
    assert spent[0] == pytest.approx(2 * norm.sf(norm.isf(0.025) * np.sqrt(3)))
    assert spent == sorted(spent)


def test_a_candidate_that_is_no_worse_is_dropped_less_often_than_the_error() -> None:
    rng = np.random.default_rng(0)
    dropped = 0
    for _ in range(2000):
        right = rng.random(400) < 0.8
        sheets = [{REV: np.where(rng.random(400) < 0.3, rng.random(400) < 0.8, right) * 1.0} for _ in range(2)]
        dropped += dropped_at(Race(sheets[0], {REV: 1.0}, LOOKS), sheets[1]) is not None
    # All candidates are truly equal, so the rate is 5 %, give or take the noise of 2,000 draws.
    assert 0.02 < dropped / 2000 < 0.065


def test_a_hopeless_candidate_is_dropped_at_the_first_look_and_a_better_one_never() -> None:
    rng = np.random.default_rng(1)
    incumbent = {REV: (rng.random(400) < 0.9) * 1.0}
    race = Race(incumbent, {REV: 1.0}, LOOKS)
    assert dropped_at(race, {REV: (rng.random(400) < 0.3) * 1.0}) == 0
    assert dropped_at(race, {REV: np.ones(400)}) is None
    assert dropped_at(race, incumbent) is None
    assert not race.is_hopeless({REV: np.zeros(400)}, 3)  # dropping a candidate at the last look would save nothing


def test_tasks_count_by_their_weight_not_by_their_documents() -> None:
    rng = np.random.default_rng(2)
    half, other = (rng.random(800) < 0.5) * 1.0, (rng.random(100) < 0.5) * 1.0
    incumbent = {REV: half, COPY: other}
    candidate = {
        REV: np.maximum(half - (rng.random(800) < 0.2), 0),
        COPY: np.minimum(other + (rng.random(100) < 0.6), 1),
    }
    assert dropped_at(Race(incumbent, {REV: 0.5, COPY: 0.5}, LOOKS), candidate) is None
    assert dropped_at(Race(incumbent, {REV: 0.95, COPY: 0.05}, LOOKS), candidate) is not None
    race = Race(incumbent, {REV: 0.5, COPY: 0.5}, LOOKS)
    expected = (candidate[REV] - half).mean() / 2 + (candidate[COPY] - other).mean() / 2
    assert race.difference(candidate) == pytest.approx(expected)


def test_one_terrible_document_drops_nobody_when_it_is_clipped() -> None:
    asked = MetricKey("rev", "log_likelihood")
    rng = np.random.default_rng(3)
    incumbent = {asked: -rng.random(200) * 0.05}
    candidate = {asked: incumbent[asked] + 0.001}
    candidate[asked][3] = -50.0
    race = Race(incumbent, {asked: 1.0}, LOOKS, clips={asked: 0.1})
    assert race.difference(candidate) > 0
    assert dropped_at(race, candidate) is None


def test_what_the_incumbent_is_penalised_for_is_its_candidates_lead() -> None:
    incumbent = {REV: np.ones(400)}
    rng = np.random.default_rng(4)
    candidate = {REV: (rng.random(400) > 0.1) * 1.0}
    assert dropped_at(Race(incumbent, {REV: 1.0}, LOOKS), candidate) is not None
    assert dropped_at(Race(incumbent, {REV: 1.0}, LOOKS, lead=0.1), candidate) is None


def test_few_documents_decide_nothing() -> None:
    incumbent = {REV: np.ones(24)}
    assert not Race(incumbent, {REV: 1.0}, LOOKS).is_hopeless({REV: np.zeros(3)}, 0)


def test_a_race_travels_and_its_digest_is_that_of_what_decides() -> None:
    race = Race({REV: np.ones(4)}, {REV: 1.0}, LOOKS)
    assert pickle.loads(pickle.dumps(race)).digest() == race.digest()
    others = [
        Race({REV: np.array([1.0, 1.0, 1.0, 0.0])}, {REV: 1.0}, LOOKS),
        Race({REV: np.ones(4)}, {REV: 1.0}, LOOKS, 0.01),
        Race({REV: np.ones(4)}, {REV: 1.0}, (0.5, 1.0)),
        Race({REV: np.ones(4)}, {REV: 1.0}, LOOKS, lead=0.1),
        Race({REV: np.ones(4)}, {REV: 1.0}, LOOKS, clips={REV: 1.0}),
        heat(0.5),
    ]
    assert len({one.digest() for one in [race, *others]}) == 7


def test_halving_goes_on_with_a_third_to_three_times_the_documents() -> None:
    assert heats(Racing(rule="halving", first=0.1)) == (pytest.approx(1 / 9), pytest.approx(1 / 3), 1.0)
    assert heats(Racing(rule="halving", first=0.5)) == (1.0,)
    assert going_on([4, 0, 2, 2, 9, 1]) == (1, 5)
    assert going_on([0]) == (0,)
    race = heat(1 / 9)
    assert race.is_hopeless({REV: np.ones(3)}, 0)
    assert not race.is_hopeless({REV: np.ones(27)}, 1)
