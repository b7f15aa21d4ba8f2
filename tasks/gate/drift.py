"""Judge perplexity drift: how much worse the merge predicts held-out text than the best parent. Pure functions.

The rule is that of a regression guard (``tasks.gate.regression``), applied to the ratio of the two perplexities, with
one limit as both threshold and margin. Scoring all documents takes seconds, so there are no interim looks.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Literal, NamedTuple

from pydantic import BaseModel, ConfigDict

from mergegate.merge_core.errors import InvalidInput
from mergegate.tasks.gate.sentences import UNSAFE
from mergegate.tasks.gate.statistics import likelihood_ratio
from mergegate.tasks.perplexity import DocumentLikelihood, DriftLimits, Likelihoods
from mergegate.tasks.stage import Outcome

BROKEN_RATIO = 2.0  # Ratio of perplexities above which a merge counts as broken; no usable merge is worse.


class DriftVerdict(BaseModel):
    """Perplexity of the merge relative to the parent that predicts the same documents best."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    reference: str  # Name of this parent.
    documents: int
    unit: Literal["token", "byte"]  # Bytes if tokenizers differ.
    ratio: float | None  # None if the merge's likelihood is not finite.
    low: float | None
    high: float | None
    max_ratio: float  # For example 1.05.
    warn_ratio: float  # For example 1.02.
    outcome: Outcome
    broken: bool  # Not finite, or above BROKEN_RATIO: the costly tasks are not worth running.
    warning: bool
    reason: str

    @property
    def word(self) -> str:
        """Verdict in a word: ``pass``, ``fail`` or ``inconclusive``."""
        return self.outcome


class ModelLikelihoods(NamedTuple):
    """Likelihoods of one model, in total and by document."""

    value: Likelihoods
    documents: tuple[DocumentLikelihood, ...]


def judge_drift(
    parents: Mapping[str, ModelLikelihoods], merge: ModelLikelihoods, limits: DriftLimits, confidence: float
) -> DriftVerdict:
    """Compare the merge with the parent that predicts the held-out text best, and return the drift verdict.

    Raises:
        InvalidInput: If no parent has a finite likelihood, or the models did not score the same documents in the same
            way.
    """
    finite = {name: parent for name, parent in parents.items() if parent.value.bits_per_byte is not None}
    if not finite:
        raise InvalidInput(
            "perplexity", found="no parent with a finite likelihood", expected="at least one working parent"
        )
    # Bits per byte are comparable across tokenizers, because every model has scored the same text.
    reference = min(finite, key=lambda name: (finite[name].value.bits_per_byte, name))
    parent = finite[reference]
    location = f"perplexity: merge against {reference}"
    if parent.value.window != merge.value.window:
        raise InvalidInput(
            location,
            found=f"windows of {parent.value.window} and {merge.value.window} tokens",
            expected="the same window for all models",
            remedy=f"set perplexity.max_length: {min(w for w in (parent.value.window, merge.value.window) if w)}",
        )
    documents = [[(document.doc_id, document.bytes) for document in side.documents] for side in (parent, merge)]
    if documents[0] != documents[1]:
        raise InvalidInput(location, found="different documents on each side", expected="the same documents")
    if len(documents[0]) < 2:
        raise InvalidInput(
            location, found="1 document", expected="2 or more, preferably 500", remedy="add held-out text"
        )

    unit: Literal["token", "byte"] = "token" if parent.value.vocabulary == merge.value.vocabulary else "byte"
    max_ratio, warn_ratio = 1 + limits.max_increase, 1 + limits.warn_increase
    ratio = low = high = None
    broken = True
    outcome: Outcome = "fail"
    if all(math.isfinite(document.loglik) for document in merge.documents):
        differences = [p.loglik - m.loglik for p, m in zip(parent.documents, merge.documents, strict=True)]
        weights = [document.tokens if unit == "token" else document.bytes for document in parent.documents]
        ratio, low, high = likelihood_ratio(differences, weights, confidence)
        broken = ratio > BROKEN_RATIO
        if not broken and not (ratio > max_ratio and low > 1):
            outcome = "pass" if high <= max_ratio else "inconclusive"
    verdict = DriftVerdict(
        reference=reference,
        documents=len(merge.documents),
        unit=unit,
        ratio=ratio,
        low=low,
        high=high,
        max_ratio=max_ratio,
        warn_ratio=warn_ratio,
        outcome=outcome,
        broken=broken,
        warning=ratio is not None and outcome != "fail" and ratio > warn_ratio,
        reason="",
    )
    return verdict.model_copy(update={"reason": _sentence(verdict)})


def _sentence(verdict: DriftVerdict) -> str:
    """Return the verdict as a sentence (see ``tasks.gate.sentences``).

    For example: ``perplexity is 1.031 times that of base and at most 1.050; the limit is 1.05``.
    """
    if verdict.ratio is None or verdict.low is None or verdict.high is None:
        return "perplexity is not finite, so the merge is broken"
    ratio, low, high = (
        f"{value:.3f}" if value < 10 else f"{value:,.0f}" if value < 1e6 else f"{value:.1e}"
        for value in (verdict.ratio, verdict.low, verdict.high)
    )
    per_byte = " per byte" if verdict.unit == "byte" else ""
    sentence, limit = f"perplexity is {ratio} times that of {verdict.reference}{per_byte}", f"{verdict.max_ratio:g}"
    if verdict.outcome == "pass":
        return f"{sentence} and at most {high}; the limit is {limit}"
    if verdict.outcome == "fail":
        least = f"at least {low}" if verdict.low > verdict.max_ratio else f"and not by chance (at least {low})"
        return f"{sentence}, {least}; the limit is {limit}"
    reason = f"and may be up to {high} times" if verdict.high > verdict.max_ratio else "which may be chance"
    return (
        f"{UNSAFE}: {sentence} {reason}; the limit is {limit}. More than {verdict.documents:,} documents would decide"
    )
