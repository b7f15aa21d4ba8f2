"""Test the sentences that describe numbers, sizes, durations and verdicts."""

from __future__ import annotations

import re

import pytest
import report_samples as samples
from builders.results import drift, guard, update
from hypothesis import given
from hypothesis import strategies as st

from mergegate.merge_core.wording import format_bytes, format_short_time
from mergegate.tasks.quality.gate.verdicts import GateFinding
from mergegate.tasks.release.report import wording


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


@pytest.mark.parametrize(
    ("ratio", "text"),
    [
        ((1.0024, 0.9981, 1.0067), "1.002 [0.998, 1.007]"), ((1.05004, 1.0438, 1.0562), "1.05004 [1.04380, 1.05620]"),
        ((812.4, 731.2, 893.6), "812.4"), ((8.1e9, 7.3e9, 8.9e9), "8.1e9"), ((None, None, None), "not finite"),
    ],
)  # fmt: skip
def test_a_ratio_reads_at_any_size(ratio: tuple[float | None, float | None, float | None], text: str) -> None:
    assert wording.format_ratio(drift(*ratio)) == text


@pytest.mark.parametrize(
    ("drop", "text"),
    [
        ((2.0, 0.96, 3.04), "2.00 [0.96, 3.04]"),  # a bound just beyond the margin is not rounded onto it
        ((1.0, -0.004, 2.209), "1.0 [0.0, 2.2]"),
        ((1.0, 0.004, 2.209), "1.000 [0.004, 2.209]"),  # a proven loss
    ],
)
def test_only_a_proven_loss_and_a_bound_near_a_limit_get_more_digits(
    drop: tuple[float, float, float], text: str
) -> None:
    assert wording.drop(guard("reversing", "reverser", (1.0, 0.99), drop, "pass")) == text


def test_a_computed_limit_has_two_decimals_and_a_written_one_keeps_its_own() -> None:
    assert [wording.plain(limit) for limit in (11 / 3, 3, 2.5, 1.0555)] == ["3.67", "3", "2.5", "1.0555"]


@given(st.floats(-100, 100), st.floats(0, 50))
def test_displayed_bounds_stay_on_their_side_of_the_limit(estimate: float, half: float) -> None:
    judged = guard("t", "r", (0.5, 0.5), (estimate, estimate - half, estimate + half), "pass")
    decimals = wording.guard_decimals(judged)
    for bound in (judged.drop, judged.high):
        shown = float(wording.number(bound, decimals).replace(wording.MINUS, "-"))
        if abs(bound - judged.max_drop) > 0.001:
            assert (shown > judged.max_drop) == (bound > judged.max_drop)
            assert (shown < judged.max_drop) == (bound < judged.max_drop)


def test_a_passed_verdict_names_its_closest_guard() -> None:
    assert wording.sentence(samples.released()) == (
        "Both guards passed. The closest: reversing lost 0.6 points against reverser and at most 1.6; the "
        "margin is 3. Perplexity is 1.002 times that of reverser (limit 1.05)."
    )


def test_notes_of_the_gate_are_shown_once_and_reasons_are_not_notes() -> None:
    verdict = samples.released().verdict
    note = GateFinding(kind="power", outcome="pass", reason="reversing: few documents")
    reason = GateFinding(kind="reference", outcome="inconclusive", reason="reversing cannot show a loss")
    guards = tuple(update(judged, findings=(note, reason)) for judged in verdict.guards)
    assert wording.gate_notes(update(verdict, guards=guards)) == (note.reason,)


def test_a_refused_verdict_gives_its_worst_reason() -> None:
    assert wording.sentence(samples.refused()) == samples.refused().verdict.reasons[0]


def test_the_consequence_of_an_inconclusive_verdict_depends_on_the_profile() -> None:
    content = samples.inconclusive()
    assert "may be published" in wording.consequence(content)
    blocked = update(content.verdict, on_inconclusive="block", publishable=False)
    assert "will not be published" in wording.consequence(update(content, verdict=blocked))


def test_a_comparison_does_not_mention_publishing() -> None:
    assert wording.consequence(update(samples.refused(), recipe="")) == ""
    warned = "The profile allows, with a warning, inconclusive merges (on_inconclusive: warn)."
    assert wording.consequence(update(samples.inconclusive(), recipe="")) == warned


def test_inconclusive_perplexity_alone_asks_for_held_out_text() -> None:
    content = samples.released()
    undecided = {"drift": drift(1.02, 0.98, 1.06, "inconclusive"), "outcome": "inconclusive", "publishable": False}
    action = wording.recommended_action(update(content, verdict=update(content.verdict, **undecided)))
    assert action.startswith("Add held-out text")
    failed = undecided | {"guards": samples.refused().verdict.guards, "outcome": "fail"}
    action = wording.recommended_action(update(content, verdict=update(content.verdict, **failed)))
    assert not action.startswith("Add held-out text")


def test_evidence_that_cannot_decide_asks_for_another_evaluation() -> None:
    verdict = samples.inconclusive().verdict
    finding = GateFinding(kind="reference", outcome="inconclusive", reason="base scores 0.0")
    guards = (update(verdict.guards[0], findings=(finding,)), *verdict.guards[1:])
    content = update(samples.inconclusive(), verdict=update(verdict, guards=guards))
    assert wording.recommended_action(content).startswith("Change the evaluation")
    assert not wording.recommended_action(samples.inconclusive()).startswith("Change the evaluation")


# --- Sizes and durations

UNITS = {"B": 1, "kB": 1e3, "MB": 1e6, "GB": 1e9, "TB": 1e12}


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"), (999, "999 B"), (999.7, "1 kB"), (1000, "1 kB"), (913_408, "913 kB"), (999_600, "1 MB"),
        (1_499_000_000, "1.5 GB"), (2_471_645_608, "2.47 GB"), (999_700_000_000, "1 TB"),
        (3_500_000_000_000_000, "3500 TB"),
    ],
)  # fmt: skip
def test_sizes_read_in_decimal_units(count: float, text: str) -> None:
    assert format_bytes(count) == text


@given(st.floats(1, 1e15))
def test_a_size_is_accurate_to_three_digits_and_below_a_thousand_units(count: float) -> None:
    found = re.fullmatch(r"([\d.]+) (\wB|B)", format_bytes(count))
    assert found is not None
    shown = float(found[1]) * UNITS[found[2]]
    assert shown == pytest.approx(count, rel=0.005, abs=0.5)
    assert float(found[1]) < 1000 or found[2] == "TB"


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.0042, "4.2 ms"), (0.0123, "12 ms"), (0.9996, "1.0 s"), (1.449, "1.4 s"), (9.96, "10 s"), (38.4, "38 s"),
        (1234, "1,234 s"),
    ],
)  # fmt: skip
def test_durations_use_a_suitable_unit(seconds: float, text: str) -> None:
    assert format_short_time(seconds) == text
