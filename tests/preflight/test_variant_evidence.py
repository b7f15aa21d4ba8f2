"""The evidence of a variant is that of its merge, with the merge as the only reference."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mergegate.merge_core.errors import InvalidInput
from mergegate.tasks.base.store import digest
from mergegate.tasks.merge import MERGED
from mergegate.tasks.models.checkpoints import Model, QuantizedModel
from mergegate.tasks.preflight import Evidence, evidence_for_variant, forecast_variant_power
from mergegate.tasks.quality.evaluation import EvalTask, Scoring
from mergegate.tasks.quality.evaluation.backends.vllm import VllmSettings
from mergegate.tasks.quality.gate import GateRule, Guard
from mergegate.tasks.quality.perplexity import DriftLimits
from mergegate.tasks.quality.variants import variant_formats

ROOT = Path("/profiles")


def task(name: str, documents: int = 1000) -> EvalTask:
    path = ROOT / "tasks" / f"{name}.yaml"
    return EvalTask(name=name, digest=digest(name), definition=path, data_digest=digest([name]), documents=documents)


EVIDENCE = Evidence(
    tasks=(task("copy"), task("sort"), task("hints")),
    guards=(
        Guard(task="copy", guarded_by="base", max_drop=3, limit=5),
        Guard(task="copy", guarded_by="champion", max_drop=1),
        Guard(task="sort", guarded_by="best parent", max_drop=2, margin=2.5),
        Guard(task="hints", guarded_by="base", advisory=True),
    ),
    rule=GateRule(reference=("base",), anchor="first"),
    limits=DriftLimits(reference=("base",)),
    ensemble=True,
)


def of(evidence: Evidence = EVIDENCE, **settings: Any) -> Evidence:
    variant = variant_formats()["gguf"].model_validate({"format": "gguf", "types": ["Q8_0"], **settings})
    return evidence_for_variant(variant, evidence, ROOT)


def test_each_task_with_a_guard_that_counts_is_compared_with_the_merge() -> None:
    judged = of()
    assert {guard.guarded_by for guard in judged.guards} == {MERGED}
    limits = [(guard.task, guard.max_drop, guard.upper_limit) for guard in judged.guards]
    assert limits == [("copy", 3, 4), ("sort", 2, 2.5)]
    assert [each.name for each in judged.tasks] == ["copy", "sort"]
    assert (judged.rule.reference, judged.rule.anchor) == ("all", None)
    assert judged.limits == DriftLimits(reference="all")
    assert judged.accepted_copies == (MERGED,)
    assert judged.scoring == EVIDENCE.scoring
    assert judged.rule.confidence == EVIDENCE.rule.confidence


def test_limits_of_the_variant_replace_those_of_the_release() -> None:
    judged = of(max_drop=1, max_increase="3%", guards=[{"task": "sort", "max_drop": 4}, {"task": "tasks/copy.yaml"}])
    limits = [(guard.task, guard.max_drop, guard.upper_limit) for guard in judged.guards]
    assert limits == [("sort", 4, 5), ("copy", 1, 2)]
    assert judged.limits.max_increase == 0.03


def test_a_variant_may_have_a_guard_on_a_task_that_is_advisory_for_the_merge() -> None:
    (guard,) = of(guards=[{"task": "hints"}]).guards
    assert (guard.task, guard.advisory) == ("hints", False)


limits = st.one_of(st.none(), st.floats(0, 20).map(lambda value: round(value, 1)))


@settings(max_examples=40)
@given(max_drop=limits, margin=limits, drop=limits, own_margin=limits)
def test_every_accepted_combination_of_limits_is_a_valid_guard(
    max_drop: float | None, margin: float | None, drop: float | None, own_margin: float | None
) -> None:
    largest = drop if drop is not None else max_drop if max_drop is not None else 3  # that of the release
    bound = own_margin if own_margin is not None or drop is not None else margin
    try:
        judged = of(max_drop=max_drop, margin=margin, guards=[{"task": "copy", "max_drop": drop, "margin": own_margin}])
    except ValueError:  # the settings alone contradict each other
        return
    except InvalidInput:
        assert bound is not None
        assert bound < largest
        return
    (guard,) = judged.guards
    assert Guard.model_validate(guard.model_dump()) == guard
    assert (guard.max_drop, guard.upper_limit) == (largest, bound if bound is not None else largest + 1)


@pytest.mark.parametrize(
    ("settings", "evidence", "words"),
    [
        ({"guards": [{"task": "copi"}]}, EVIDENCE, "did you mean 'copy'?"),
        ({"margin": 1}, EVIDENCE, "guard on copy: a margin of 1 points"),
        ({"max_increase": "3%"}, EVIDENCE._replace(limits=None), "which this profile does not measure"),
        ({}, EVIDENCE._replace(guards=EVIDENCE.guards[3:], limits=None), "nothing would judge the variant"),
    ],
)
def test_settings_without_a_meaning_are_rejected(settings: dict[str, Any], evidence: Evidence, words: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        of(evidence, **settings)
    assert words.lower() in str(caught.value).lower()
    assert str(caught.value).startswith("variants: Q8_0")


def test_a_forecast_warns_if_the_documents_cannot_decide() -> None:
    few = EVIDENCE._replace(tasks=tuple(task(each.name, documents=60) for each in EVIDENCE.tasks))
    too_few = forecast_variant_power(of(few, max_drop=0.1, margin=0.2))
    assert not list(forecast_variant_power(of()).findings("variants: Q8_0"))
    (finding,) = too_few.findings("variants: Q8_0")
    assert finding.severity == "warn"
    assert "widen margin" in finding.remedy


def test_a_quantized_model_is_scored_by_its_own_backend_and_all_else_is_equal() -> None:
    scoring = Scoring(backend="vllm", vllm=VllmSettings(), num_fewshot=3, seed=7, chat_template=True)
    merge = Model(name=MERGED, digest=digest("merge"), directory=ROOT)
    variant = QuantizedModel(name="Q8_0", digest=digest("q"), directory=ROOT, source=merge, backend="hf")
    evidence = Evidence(scoring=scoring)
    assert evidence.scoring_of(merge) is scoring
    own = evidence.scoring_of(variant)
    assert (own.backend, own.vllm) == ("hf", None)
    assert Scoring.model_validate(own.model_dump()) == own
    assert own.model_copy(update={"backend": "vllm", "vllm": scoring.vllm}) == scoring
