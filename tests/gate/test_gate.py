"""The most severe guard decides a merge's verdict, with reasons. The stage loads its evidence and refuses copies."""

from __future__ import annotations

import math
from pathlib import Path

import gate_samples as samples
import pytest
from gate_samples import GUARD, PARENT, gate_scores, outcome, part, read, scores, scores_of, verdict_of, worse

from mergegate.merge_core.errors import InvalidInput
from mergegate.tasks.base.stage import Outcome, Section, Verdict, combine_verdicts
from mergegate.tasks.quality.evaluation.stage import join_parts
from mergegate.tasks.quality.gate import EvaluateSettings, GatePlan, GateRule, GateVerdict, gate
from mergegate.tasks.quality.gate.drift import judge_drift
from mergegate.tasks.quality.gate.evidence import find_copies
from mergegate.tasks.quality.gate.stage import gate_verdict
from mergegate.tasks.quality.perplexity.settings import DriftLimits

LIMITS = DriftLimits()


def test_the_worst_guard_decides_and_is_named_first() -> None:
    drifted = judge_drift({"base": PARENT}, worse(math.log(1.03)), LIMITS, 0.95)
    verdict = gate_verdict([verdict_of(0, 0, 400), verdict_of(1, 1, 40), verdict_of(43, 0, 300)], drifted, "pass")
    assert (verdict.outcome, verdict.publishable) == ("fail", False)
    assert len(verdict.reasons) == 2
    assert verdict.reasons[0].startswith("reverse lost 14.3 points against reverser, at least 10.8; max_drop is 3")
    assert verdict.reasons[1].startswith("Not shown to be safe: reverse lost 0.0 points")
    assert verdict.refuses()
    assert verdict.refusal() is None  # the report is written before the flow stops


@pytest.mark.parametrize(("policy", "publishable"), [("block", False), ("warn", True), ("pass", True)])
def test_on_inconclusive_decides_about_an_undecided_merge(policy: str, publishable: bool) -> None:
    verdict = gate_verdict([verdict_of(1, 1, 40)], None, policy)  # type: ignore[arg-type]  # parametrized
    assert (verdict.outcome, verdict.publishable) == ("inconclusive", publishable)
    assert verdict.reasons


def test_a_clean_merge_is_publishable_without_reasons() -> None:
    verdict = gate_verdict([verdict_of(0, 0, 400)], judge_drift({"base": PARENT}, worse(0.0), LIMITS, 0.95), "block")
    assert (verdict.outcome, verdict.publishable, verdict.reasons) == ("pass", True, ())


@pytest.mark.parametrize(
    ("outcome", "joint", "reasons"),
    [
        ("pass", "inconclusive", ["reverse"]),
        ("inconclusive", "inconclusive", ["reverse", "judge:"]),
        ("fail", "fail", ["judge:", "reverse"]),
    ],
)
def test_later_verdicts_can_only_make_the_outcome_worse(outcome: Outcome, joint: str, reasons: list[str]) -> None:
    verdict = gate_verdict([verdict_of(1, 1, 40)], None, "warn")
    passes = outcome == "pass"
    told = {"outcome": outcome, "publishable": passes, "reasons": () if passes else ("judge: undecided",)}
    judge = Verdict(name="judge", **told, evidence=verdict, section=Section(title="Judge"))
    further = combine_verdicts((verdict.as_verdict(), judge))
    assert (further.outcome, further.publishable) == (joint, passes)
    assert [reason.removeprefix("Not shown to be safe: ").split()[0] for reason in further.reasons] == reasons


def test_the_overall_drop_is_the_mean_over_tasks_with_a_narrower_interval() -> None:
    one = verdict_of(8, 0, 400)
    two = verdict_of(0, 0, 400, GUARD.model_copy(update={"task": "shift"}))
    verdict = gate_verdict([one, two], None, "block")
    assert verdict.overall_drop == pytest.approx((one.drop + two.drop) / 2)
    half = math.hypot(one.drop - one.low, two.drop - two.low) / 2
    assert verdict.overall_drop - verdict.overall_low == pytest.approx(half)


def test_several_guards_of_one_task_do_not_narrow_the_interval() -> None:
    one = verdict_of(8, 0, 400)
    verdict = gate_verdict([one, one], None, "block")
    assert (verdict.overall_low, verdict.overall_high) == pytest.approx((one.low, one.high))


def test_a_verdict_survives_its_json() -> None:
    broken = judge_drift({"base": PARENT}, samples.likelihoods([math.nan] * 500), LIMITS, 0.95)
    verdict = gate_verdict([verdict_of(43, 0, 300)], broken, "block")
    assert GateVerdict.model_validate_json(verdict.model_dump_json()) == verdict


def test_every_setting_of_the_rule_reaches_the_gate() -> None:
    settings = EvaluateSettings(tasks=(GUARD,), confidence=0.9, extend=False, on_inconclusive="warn")
    assert settings.gate_rule == GateRule(confidence=0.9, extend=False, on_inconclusive="warn")


# --- The stage


def test_the_stage_judges_stored_evidence(tmp_path: Path) -> None:
    found = scores_of(tmp_path, reverser=400, merge=340)
    likelihood = {"base": read(tmp_path / "b", PARENT), "merge": read(tmp_path / "l", worse(0.0))}
    verdict = gate.work((GUARD,), found, likelihood, LIMITS, GatePlan(GateRule()))
    assert (verdict.outcome, verdict.drift.outcome) == ("fail", "pass")
    assert verdict.summary().startswith("reverse lost 15.0 points against reverser")


def test_a_broken_merge_needs_no_scores(tmp_path: Path) -> None:
    likelihood = {"base": read(tmp_path / "b", PARENT), "merge": read(tmp_path / "l", worse(5.0))}
    verdict = gate.work((GUARD,), {}, likelihood, LIMITS, GatePlan(GateRule()))
    assert (verdict.outcome, verdict.guards) == ("fail", ())
    assert verdict.reasons[0].startswith("perplexity is 148 times that of base")


def test_scores_of_different_lm_eval_versions_are_rejected(tmp_path: Path) -> None:
    found = {"reverser": [scores(tmp_path / "r", 400)], "merge": [scores(tmp_path / "m", 400, version="0.4.12")]}
    with pytest.raises(InvalidInput, match=r"lm-eval 0\.4\.13 and 0\.4\.12"):
        gate_scores(found)


def test_an_unknown_metric_is_rejected_with_the_available_ones(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="choose one of acc,none"):
        gate_scores(scores_of(tmp_path, reverser=400, merge=400), GUARD.model_copy(update={"metric": "f1"}))


def test_the_parts_of_a_task_are_judged_together(tmp_path: Path) -> None:
    whole, starts = scores_of(tmp_path / "whole", reverser=400, merge=340), range(0, 400, 100)
    pieces = {
        name: [part(tmp_path / f"{name}{at}", samples.right_on(range(right), at + 100, at)) for at in starts]
        for name, right in (("reverser", 400), ("merge", 340))
    }
    assert gate_scores(pieces) == gate_scores(whole)


def test_a_document_in_two_parts_is_rejected(tmp_path: Path) -> None:
    found = scores_of(tmp_path, reverser=400, merge=400)
    found["merge"].append(part(tmp_path / "b", samples.right_on((), 500, 399)))
    with pytest.raises(InvalidInput, match="parts with the same documents"):
        gate_scores(found)
    with pytest.raises(InvalidInput, match="parts with the same documents"):
        join_parts(found["merge"])  # the report's table joins parts with the same function


# --- A merge that copies a parent, by its weights or by all its answers, is refused unless the profile accepts it


def judged(tmp_path: Path, merge: list[str], *, n: int = 400, answers: bool = True, **plan: object) -> GateVerdict:
    """Judge a merge that scores like both parents. ``merge`` holds the answers that differ from those of 'reverser'."""
    texts = [f"answer {doc}" if answers else "" for doc in range(n)]

    def scored(name: str, own: list[str]) -> list:  # type: ignore[type-arg]
        rows = [outcome(doc, answer=text) for doc, text in enumerate([*own, *texts[len(own) :]])]
        return [part(tmp_path / name, rows)]

    models = {"reverser": scored("reverser", []), "base": scored("base", ["own"] * 5), "merge": scored("merge", merge)}
    return gate_scores(models, **plan)


def test_a_merge_with_the_answers_of_a_parent_is_refused(tmp_path: Path) -> None:
    verdict = judged(tmp_path, [])
    assert (verdict.outcome, verdict.publishable) == ("fail", False)
    assert verdict.reasons[0].startswith("the merge behaves like a copy of reverser: all 400 answers are equal")
    assert "checks.copies.accepted: [reverser]" in verdict.reasons[0]
    assert [finding.kind for finding in verdict.findings] == ["copy"]


def test_a_parent_that_no_guard_compares_with_can_be_copied_too(tmp_path: Path) -> None:
    assert "copy of base" in judged(tmp_path, ["own"] * 5).reasons[0]


def test_one_other_answer_is_enough_to_differ(tmp_path: Path) -> None:
    assert judged(tmp_path, ["other"]).outcome == "pass"


def test_few_documents_or_unknown_answers_show_no_copy(tmp_path: Path) -> None:
    few = find_copies("", {"base": [(outcome(doc, answer="a"), outcome(doc, answer="a")) for doc in range(99)]}, ())
    assert not list(few)
    assert judged(tmp_path, [], answers=False).outcome == "pass"


def test_an_accepted_copy_is_noted(tmp_path: Path) -> None:
    verdict = judged(tmp_path, [], accepted_copies=("reverser",), copy_of="reverser")
    assert verdict.outcome == "pass"
    (note,) = verdict.findings
    assert (note.outcome, note.reason) == ("pass", "the merge is a copy of reverser: all weights are equal")


def test_equal_weights_are_refused_without_any_score() -> None:
    scores = {"reverser": [], "merge": []}
    verdict = gate.work((GUARD,), scores, {}, None, GatePlan(GateRule(on_inconclusive="pass"), copy_of="reverser"))
    assert (verdict.outcome, verdict.publishable) == ("fail", False)
    assert verdict.summary().startswith("the merge is a copy of reverser: all weights are equal")
    assert "publish reverser itself" in verdict.summary()


@pytest.mark.parametrize("name", ["champion", "anchor"])
def test_the_champion_is_not_a_parent(tmp_path: Path, name: str) -> None:
    """A merge that answers like the published release is judged like any other."""
    rows = [outcome(doc, answer=str(doc)) for doc in range(200)]
    own = [*rows[:-1], outcome(199, answer="own")]
    models = {"reverser": [part(tmp_path / "a", own)], name: [part(tmp_path / "b", rows)]}
    models["merge"] = [part(tmp_path / "c", rows)]
    assert gate_scores(models).outcome == "pass"
