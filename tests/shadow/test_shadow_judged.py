"""The judgment ledger: no pair is judged twice, even after interrupted looks; torn or foreign lines are ignored."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given as for_all
from hypothesis import settings
from hypothesis import strategies as st
from loopback import Answer
from openai_server import completion, serving
from recorded_traffic import pair, prefer_good_answers

from mergegate.merge_core.errors import InvalidInput
from mergegate.tasks.quality.judge import JudgmentSettings
from mergegate.tasks.shadow import SampledPair, ShadowJudge, open_judged, read_judged, sample_pairs

JUDGING = JudgmentSettings(model="judge-1")
EXPECTED = {"good": {"good": 0.5, "bad": 0.0}, "bad": {"good": 1.0, "bad": 0.5, "worse": 0.5}}


def pairs_of(*answers: tuple[str, str]) -> tuple[SampledPair, ...]:
    recorded = [pair(n, parent=parent, candidate=candidate) for n, (parent, candidate) in enumerate(answers)]
    return sample_pairs(lambda: recorded, judged_requests={}, limit=1000).pairs


def judge(place: Path, pairs: tuple[SampledPair, ...], url: str, model: str = "judge-1") -> tuple[float, ...]:
    judge = ShadowJudge(model=model, url=url, attempts=1, concurrency=3)
    with open_judged(place, "demo", "v1", judge) as ledger:
        ledger.judge(pairs, judge, now=lambda: 5000.0)
        return tuple(ledger.totals.scores)


def test_a_win_survives_the_swap_and_equal_answers_need_no_judge(tmp_path: Path) -> None:
    answers = (("good", "bad"), ("bad", "good"), ("bad", "worse"), ("good", "good"))
    with serving(prefer_good_answers) as asked:
        judge(tmp_path, pairs_of(*answers), asked.url)
    assert len(asked.bodies) == 2 * 3 + 2 * 3  # Each different pair has a control.
    found = {one.id: (one.score, one.consistent is None) for one in read_judged(tmp_path, "demo", "v1", JUDGING).pairs}
    wanted = [(EXPECTED[parent][candidate], parent == candidate) for parent, candidate in answers]
    assert found == {f"request-{n}": one for n, one in enumerate(wanted)}


@pytest.mark.story
@settings(max_examples=6)
@for_all(deaths=st.lists(st.integers(1, 9), max_size=4))
def test_an_unreliable_judge_gets_each_prompt_once(tmp_path_factory: pytest.TempPathFactory, deaths: list[int]) -> None:
    place, answered = tmp_path_factory.mktemp("ledger"), Counter[str]()
    left = [0]

    def mortal(body: dict[str, Any]) -> Answer:
        if left[0] <= 0:
            return Answer(400, b"{}")
        left[0] -= 1
        answered[str(body["messages"])] += 1
        return prefer_good_answers(body)

    pairs = pairs_of(*[("good", "bad"), ("bad", "good"), ("bad", "worse")] * 2)
    with serving(mortal) as asked:
        for count in deaths:
            left[0] = count
            try:
                judge(place, pairs, asked.url)
            except InvalidInput:
                assert sum(answered.values()) < 24
        left[0] = 100
        scores = judge(place, pairs, asked.url)
    assert sorted(scores) == [0.0, 0.0, 0.5, 0.5, 1.0, 1.0]
    # Requests in flight when the judge refused another one may have been lost.
    assert sum(answered.values()) <= 24 + 3 * len(deaths)  # Six pairs with a control each.
    with serving(lambda body: pytest.fail("asked twice")) as silent:
        assert judge(place, pairs, silent.url) == scores
    assert silent.bodies == []


def test_only_a_torn_line_is_judged_again(tmp_path: Path) -> None:
    pairs = pairs_of(*[("bad", "ill")] * 4)  # too short for control pairs
    with serving(prefer_good_answers) as asked:
        judge(tmp_path, pairs, asked.url)
        (ledger,) = tmp_path.glob("*.judged")
        ledger.write_bytes(ledger.read_bytes()[:-7])
        assert len(read_judged(tmp_path, "demo", "v1", JUDGING).pairs) == 3
        assert judge(tmp_path, pairs, asked.url) == (0.5,) * 4
    assert len(asked.bodies) == 2 * 4 + 1


def test_another_judge_starts_a_new_ledger_but_another_address_does_not(tmp_path: Path) -> None:
    pairs = pairs_of(("bad", "ill"))
    with serving(prefer_good_answers) as asked, serving(prefer_good_answers) as moved:
        judge(tmp_path, pairs, asked.url)
        judge(tmp_path, pairs, moved.url)
        assert len(moved.bodies) == 0
        judge(tmp_path, pairs, moved.url, "judge-2")
        assert len(moved.bodies) == 2


@pytest.mark.story
@pytest.mark.parametrize("reliable", [True, False])
def test_controls_are_judged_once_and_show_whether_the_judge_sees_damage(tmp_path: Path, reliable: bool) -> None:
    pairs = pairs_of(*[(f"a good one {n}", f"also good {n}") for n in range(30)])
    tie = completion({"reasoning": "", "verdict": "tie"})
    with serving(prefer_good_answers if reliable else lambda body: tie) as asked:
        judge(tmp_path, pairs[:6], asked.url)
        judge(tmp_path, pairs, asked.url)
        assert len(asked.bodies) == 2 * 30 + 2 * 24
        judge(tmp_path, pairs, asked.url)
        assert len(asked.bodies) == 2 * 30 + 2 * 24
    totals = read_judged(tmp_path, "demo", "v1", JUDGING).totals
    assert len(totals.controls) == 24
    assert all(totals.controls) if reliable else not any(totals.controls)
    assert len(totals.scores) == 30
    assert totals.characters == (
        sum(len(pair.answers.reference) for pair in pairs),
        sum(len(pair.answers.merge) for pair in pairs),
    )


def test_the_ledger_contains_no_user_text(tmp_path: Path) -> None:
    with serving(prefer_good_answers) as asked:
        judge(tmp_path, pairs_of(("good secret", "bad secret")), asked.url)
    (ledger,) = tmp_path.glob("*.judged")
    assert ledger.stat().st_size
    for word in ("secret", "question", "one of them"):
        assert word not in ledger.read_text()
