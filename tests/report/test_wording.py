"""Test the sentences that describe numbers and verdicts."""

from __future__ import annotations

import pytest
import report_samples as samples
from hypothesis import given
from hypothesis import strategies as st

from mergegate.tasks.gate.evidence import GateFinding
from mergegate.tasks.report import wording


@pytest.mark.parametrize(
    ("value", "text"), [(-0.04, "0.0"), (-0.4, f"{wording.MINUS}0.4"), (2.36, "2.4"), (0.0, "0.0")]
)
def test_numbers_have_a_real_minus_and_no_negative_zero(value: float, text: str) -> None:
    assert wording.number(value, 1) == text


@pytest.mark.parametrize(
    ("value", "text"), [(None, "not finite"), (3.41, "3.410"), (2764.2, "2,764"), (3.2e9, "3.2e9")]
)
def test_likelihoods_read_at_any_size(value: float | None, text: str) -> None:
    assert wording.format_magnitude(value) == text


def test_a_ratio_reads_at_any_size() -> None:
    assert wording.format_ratio(samples.drift(1.0024, 0.9981, 1.0067)) == "1.002 [0.998, 1.007]"
    assert wording.format_ratio(samples.drift(1.05004, 1.0438, 1.0562)) == "1.05004 [1.04380, 1.05620]"
    assert wording.format_ratio(samples.drift(812.4, 731.2, 893.6)) == "812.4"
    assert wording.format_ratio(samples.drift(8.1e9, 7.3e9, 8.9e9)) == "8.1e9"
    assert wording.format_ratio(samples.drift(None, None, None)) == "not finite"


def test_a_bound_just_beyond_the_margin_is_not_rounded_onto_it() -> None:
    guard = samples.guard("reversing", "reverser", (0.9, 0.88), (2.0, 0.96, 3.04), "inconclusive")
    assert wording.drop(guard) == "2.00 [0.96, 3.04]"


def test_a_computed_limit_has_two_decimals_and_a_written_one_keeps_its_own() -> None:
    assert [wording.plain(limit) for limit in (11 / 3, 3, 2.5, 1.0555)] == ["3.67", "3", "2.5", "1.0555"]


def test_only_a_proven_loss_gets_more_digits() -> None:
    no_loss = samples.guard("reversing", "reverser", (1.0, 0.99), (1.0, -0.004, 2.209), "pass")
    loss = samples.guard("reversing", "reverser", (1.0, 0.99), (1.0, 0.004, 2.209), "pass")
    assert wording.drop(no_loss) == "1.0 [0.0, 2.2]"
    assert wording.drop(loss) == "1.000 [0.004, 2.209]"


@given(st.floats(-100, 100), st.floats(0, 50))
def test_displayed_bounds_stay_on_their_side_of_the_limit(estimate: float, half: float) -> None:
    guard = samples.guard("t", "r", (0.5, 0.5), (estimate, estimate - half, estimate + half), "pass")
    decimals = wording.guard_decimals(guard)
    for bound in (guard.drop, guard.high):
        shown = float(wording.number(bound, decimals).replace(wording.MINUS, "-"))
        if abs(bound - guard.max_drop) > 0.001:
            assert (shown > guard.max_drop) == (bound > guard.max_drop)
            assert (shown < guard.max_drop) == (bound < guard.max_drop)


def test_a_passed_verdict_names_its_closest_guard() -> None:
    assert wording.sentence(samples.released()) == (
        "Both guards passed. The closest: reversing lost 0.6 points against reverser and at most 1.6; the "
        "margin is 3. Perplexity is 1.002 times that of reverser (limit 1.05)."
    )


def test_notes_of_the_gate_are_shown_once_and_reasons_are_not_notes() -> None:
    verdict = samples.released().verdict
    note = GateFinding(kind="power", outcome="pass", reason="reversing: few documents")
    reason = GateFinding(kind="reference", outcome="inconclusive", reason="reversing cannot show a loss")
    guards = tuple(guard.model_copy(update={"findings": (note, reason)}) for guard in verdict.guards)
    assert wording.gate_notes(verdict.model_copy(update={"guards": guards})) == (note.reason,)


def test_a_refused_verdict_gives_its_worst_reason() -> None:
    assert wording.sentence(samples.refused()) == samples.refused().verdict.reasons[0]


def test_the_consequence_of_an_inconclusive_verdict_depends_on_the_profile() -> None:
    content = samples.inconclusive()
    assert "may be published" in wording.consequence(content)
    blocked = content.verdict.model_copy(update={"on_inconclusive": "block", "publishable": False})
    assert "will not be published" in wording.consequence(content.model_copy(update={"verdict": blocked}))


def test_a_comparison_does_not_mention_publishing() -> None:
    assert wording.consequence(samples.refused().model_copy(update={"recipe": ""})) == ""
    undecided = samples.inconclusive().model_copy(update={"recipe": ""})
    assert (
        wording.consequence(undecided)
        == "The profile allows, with a warning, inconclusive merges (on_inconclusive: warn)."
    )


def test_inconclusive_perplexity_alone_asks_for_held_out_text() -> None:
    content = samples.released()
    drift = samples.drift(1.02, 0.98, 1.06, "inconclusive")
    undecided = content.verdict.model_copy(update={"drift": drift, "outcome": "inconclusive", "publishable": False})
    action = wording.recommended_action(content.model_copy(update={"verdict": undecided}))
    assert action.startswith("Add held-out text")
    failed = undecided.model_copy(update={"guards": samples.refused().verdict.guards, "outcome": "fail"})
    action = wording.recommended_action(content.model_copy(update={"verdict": failed}))
    assert not action.startswith("Add held-out text")


def test_evidence_that_cannot_decide_asks_for_another_evaluation() -> None:
    verdict = samples.inconclusive().verdict
    finding = GateFinding(kind="reference", outcome="inconclusive", reason="base scores 0.0")
    guards = (verdict.guards[0].model_copy(update={"findings": (finding,)}), *verdict.guards[1:])
    content = samples.inconclusive().model_copy(update={"verdict": verdict.model_copy(update={"guards": guards})})
    assert wording.recommended_action(content).startswith("Change the evaluation")
    assert not wording.recommended_action(samples.inconclusive()).startswith("Change the evaluation")
