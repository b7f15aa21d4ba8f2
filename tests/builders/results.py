"""Build results of the stages of a run. ``build`` fills in usual values, and keywords override any of them."""

from __future__ import annotations

import hashlib
import math
from typing import Any, TypeVar

from pydantic import BaseModel

from mergegate.tasks.base.stage import Outcome
from mergegate.tasks.quality.evaluation.scoring.scores import TaskScore
from mergegate.tasks.quality.evaluation.stage import Scores
from mergegate.tasks.quality.gate.verdicts import DriftVerdict, GateVerdict, GuardVerdict, SuiteVerdict, drop_sentence
from mergegate.tasks.quality.perplexity.stage import Likelihoods
from mergegate.tasks.quality.variants import VariantRecord, VariantVerdict
from mergegate.tasks.release.report import RunRecord, RunScore
from mergegate.tasks.release.report.content import ReportContent, ReportedModel

T = TypeVar("T")
R = TypeVar("R", bound=BaseModel)
Bounds = tuple[float, float, float]
"""An estimate with its lower and upper bound."""

PASSED: dict[str, Any] = {"outcome": "pass", "publishable": True, "reasons": ()}
LIMITS: dict[str, Any] = {"max_drop": 3, "margin": 3, "confidence": 0.95}
USUAL: dict[type, dict[str, Any]] = {
    TaskScore: {"metric": "acc,none", "higher_is_better": True},
    Scores: {"model": "as-measured-long-ago", "lm_eval_version": "0.4.13"},
    GuardVerdict: {**LIMITS, "metric": "acc,none", "n": 500, "lost": 14, "won": 3},
    SuiteVerdict: {**LIMITS, "tasks": 2, "documents": 1000, "margin": 4, "outcome": "pass", "detectable_drop": 1.2},
    GateVerdict: {
        **PASSED, "guards": (), "drift": None, "overall_drop": None, "overall_low": None, "overall_high": None,
        "on_inconclusive": "block",
    },
    ReportedModel: {"role": "parent", "licence": "apache-2.0"},
    ReportContent: {"licence": "apache-2.0", "files": ()},
    RunRecord: {
        "run": "r", "flow": "release", "profile": "demo", "ended": 1_790_000_000.0, "seconds": 3.0,
        "status": "released", "message": "released demo v1",
    },
    RunScore: {"reference": "base", "max_drop": 3, "margin": 3, "outcome": "pass"},
    VariantRecord: {
        "format": "gguf", "files": ("variant.gguf",), "bytes": 1000, "versions": {"llama.cpp": "0.3.36"},
        "settings": {"imatrix": "none"},
    },
    VariantVerdict: {**PASSED, "format": "gguf", "required": False},
}  # fmt: skip


def build(kind: type[T], **fields: Any) -> T:
    """Return an object of a kind with its usual values, except those in ``fields``."""
    return kind(**{**USUAL[kind], **fields})


def sha(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def update(record: R, **fields: Any) -> R:
    """Return a copy of a record with other values of these fields."""
    return record.model_copy(update=fields)


def task_score(task: str, share: float, n: int = 500, **fields: Any) -> TaskScore:
    """Return the score of a task for the share of right answers of ``n``."""
    usual = {"task": task, "score": share, "n": n, "stderr": math.sqrt(share * (1 - share) / n)}
    return build(TaskScore, **{**usual, **fields})


def task_scores(**shares: float) -> Scores:
    return build(Scores, tasks=tuple(task_score(task, share) for task, share in shares.items()))


def likelihoods(perplexity: float | None, vocabulary: str = "one") -> Likelihoods:
    tokens, size = 41_200, 164_800
    loglik = None if perplexity is None else -tokens * math.log(perplexity)
    bits = None if loglik is None else -loglik / size / math.log(2)
    size_of = {"documents": 800, "tokens": tokens, "bytes": size, "loglik": loglik, "bits_per_byte": bits}
    return Likelihoods(model="as-measured-long-ago", perplexity=perplexity, vocabulary=vocabulary, **size_of)


def guard(
    task: str, reference: str, scores: tuple[float, float], drop: Bounds, outcome: Outcome, n: int = 500
) -> GuardVerdict:
    """Return a guard's verdict. ``scores`` are those of the reference and of the merge."""
    margin = 2 if task == "sorting" else 3
    measured = {"reference_score": scores[0], "merge_score": scores[1], "n": n, "margin": margin}
    measured |= dict(zip(("drop", "low", "high"), drop, strict=True))
    verdict = build(GuardVerdict, task=task, reference=reference, outcome=outcome, reason="", **measured)
    return update(verdict, reason=drop_sentence(verdict, n))


def suite(reference: str, drop: Bounds) -> SuiteVerdict:
    reason = f"the mean of 2 tasks lost {drop[0]} points against {reference}"
    return build(SuiteVerdict, reference=reference, drop=drop[0], low=drop[1], high=drop[2], reason=reason)


def drift(ratio: float | None, low: float | None, high: float | None, outcome: Outcome = "pass") -> DriftVerdict:
    value = "not finite" if ratio is None else f"{ratio:.3f} times that of reverser [{low:.3f}, {high:.3f}]"
    return DriftVerdict(
        reference="reverser", documents=800, unit="token", ratio=ratio, low=low, high=high, max_ratio=1.05,
        warn_ratio=1.02, outcome=outcome, broken=ratio is None or ratio > 2, warning=ratio is None or ratio > 1.02,
        total_ratio=ratio, reason=f"The merge's perplexity is {value}; the limit is 1.05.",
        broken_high=0.0037,  # of 800 documents without a broken one
    )  # fmt: skip


def gate_verdict(
    guards: tuple[GuardVerdict, ...],
    drift: DriftVerdict | None,
    reasons: tuple[str, ...] = (),
    outcome: Outcome = "pass",
    on_inconclusive: str = "block",
    overall: Bounds | tuple[None, None, None] = (None, None, None),
) -> GateVerdict:
    publishable = outcome == "pass" or (outcome == "inconclusive" and on_inconclusive != "block")
    decided = {"outcome": outcome, "publishable": publishable, "reasons": reasons, "on_inconclusive": on_inconclusive}
    decided |= dict(zip(("overall_drop", "overall_low", "overall_high"), overall, strict=True))
    return build(GateVerdict, guards=guards, drift=drift, **decided)
