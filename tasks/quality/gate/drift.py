"""Judge perplexity drift: how much worse the merge predicts held-out text than the best parent. Pure functions.

Each distinct document counts once, whatever its length. The statistic is the mean over documents of the log-likelihood
that the merge loses per token. Its exponential is the ratio of the geometric means of the documents' perplexities. If
the tokenizers differ, bytes replace tokens. Three checks decide:

* The ratio. The rule is that of a regression guard (``gate.regression``), with one limit as both threshold and
  margin. The bounds are those of graded scores (``gate.graded_scores``), because Student's interval publishes too
  many merges if a few documents lose much. They need a range, so a document counts at most ``_CLIP`` times the limit in
  them: 0.49 nats at a limit of 5 %.
* The share of broken documents, each of which loses more than ``BROKEN_LOSS`` nats per token. Clipping hides how much
  these documents lose, so their share has its own limit and exact binomial bounds (Clopper & Pearson 1934, Biometrika
  26:404).
* The strata. Documents may name their language or source. A stratum fails if its own lower bound exceeds the limit.
  Holm's procedure (1979, Scand. J. Stat. 6:65) limits the errors of all strata together.

Scoring all documents takes seconds, so there are no interim looks.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from mergegate.merge_core.errors import Finding, InvalidInput
from mergegate.merge_core.wording import format_count
from mergegate.tasks.base.stage import Outcome, severity
from mergegate.tasks.base.store import Artifact
from mergegate.tasks.quality.gate.graded_scores import graded_difference
from mergegate.tasks.quality.gate.statistics import share_bounds
from mergegate.tasks.quality.gate.verdicts import UNSAFE, DriftVerdict, GateFinding, StratumDrift
from mergegate.tasks.quality.perplexity import (
    DistinctDocuments,
    DocumentLikelihood,
    DriftLimits,
    Likelihoods,
    read_documents,
)

BROKEN_RATIO = 2.0  # Ratio of perplexities above which a merge counts as broken; no usable merge is worse.
BROKEN_LOSS = 0.5  # Loss in nats per token of the reference above which a document is broken.
# A document of a few tokens can lose 0.5 nats per token by chance. A broken one loses at least this many nats in total.
_LEAST_BROKEN_LOSS = 8.0
# Largest loss or gain of one document within the bounds, as a multiple of the limit on a log scale. Fewer than _FEW
# documents could not show anything with the larger range: a pass needs at least 31 documents, or 11 with the smaller.
_CLIP, _CLIP_OF_FEW, _FEW = 10.0, 4.0, 100
_MIN_STRATUM = 8  # Fewest documents of a stratum; even if all are broken, fewer could not show it.
_MAX_DUPLICATES = 0.01  # Share of repeated documents above which ``check`` warns.
_MAX_BLOCKS = 5_000  # Many documents are averaged in this number of blocks, which takes seconds instead of minutes.


class ModelLikelihoods(NamedTuple):
    """Likelihoods of one model, in total and by document."""

    value: Likelihoods
    documents: tuple[DocumentLikelihood, ...]


def perplexity_drift(
    likelihoods: Mapping[str, Artifact[Likelihoods]],
    limits: DriftLimits,
    confidence: float,
    merged_models: str = "merge",
) -> DriftVerdict:
    """Return the drift verdict on stored likelihoods, for callers that need it before the costly tasks are run."""
    models = {
        name: ModelLikelihoods(artifact.value, read_documents(artifact.directory))
        for name, artifact in likelihoods.items()
    }
    merge = models.pop(merged_models)
    return judge_drift(models, merge, limits, confidence)


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
    # Nats per byte are comparable across tokenizers, because every model has scored the same text.
    reference = min(finite, key=lambda name: (np.mean([d.loglik / -d.bytes for d in finite[name].documents]), name))
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
    verdict = DriftVerdict(
        reference=reference,
        documents=len(merge.documents),
        unit=unit,
        ratio=None,
        low=None,
        high=None,
        max_ratio=1 + limits.max_increase,
        warn_ratio=1 + limits.warn_increase,
        outcome="fail",
        broken=True,
        warning=False,
        reason="perplexity is not finite, so the merge is broken",
        duplicates=merge.value.duplicates,
        max_broken_documents=limits.max_broken_documents,
    )
    if not all(math.isfinite(document.loglik) for document in merge.documents):
        return verdict
    # Documents in the order of their hashes: it is random, and independent of the order in the file.
    pairs = sorted(zip(parent.documents, merge.documents, strict=True), key=lambda pair: pair[0].hash)
    lost = np.array([reference.loglik - merged.loglik for reference, merged in pairs])  # nats
    tokens = np.array([reference.tokens for reference, _ in pairs])
    sizes = tokens if unit == "token" else np.array([reference.bytes for reference, _ in pairs])
    losses = lost / sizes
    drift = _ratio(losses, limits, confidence)
    strata = _judge_strata([reference.stratum for reference, _ in pairs], losses, limits, confidence)
    broken_documents = int((lost > np.maximum(BROKEN_LOSS * tokens, _LEAST_BROKEN_LOSS)).sum())
    broken_low, broken_high = share_bounds(broken_documents, len(pairs), confidence)
    outcome: Outcome = "pass" if drift.high <= verdict.max_ratio else "inconclusive"
    if drift.ratio > BROKEN_RATIO or (drift.ratio > verdict.max_ratio and drift.low > 1):
        outcome = "fail"
    verdict = verdict.model_copy(
        update={
            **drift._asdict(),
            "outcome": outcome,
            "broken": drift.ratio > BROKEN_RATIO,
            "total_ratio": _exp(float(lost.sum() / sizes.sum())),
            "broken_documents": broken_documents,
            "broken_low": broken_low,
            "broken_high": broken_high,
            "strata": strata,
        }
    )
    findings = _findings(verdict)
    decided = [(outcome, _sentence(verdict)), *((finding.outcome, finding.reason) for finding in findings)]
    outcome, reason = max(decided, key=lambda pair: severity(pair[0]))  # The first of the most severe.
    warning = outcome != "fail" and drift.ratio > verdict.warn_ratio
    return verdict.model_copy(update={"outcome": outcome, "reason": reason, "warning": warning, "findings": findings})


def drift_findings(text: DistinctDocuments, limits: DriftLimits, confidence: float) -> Iterator[Finding]:
    """Yield findings about held-out text that has duplicates or too few documents, before a merge exists.

    Args:
        text: Distinct documents of the text.
        limits: Limits of the profile.
        confidence: One-sided confidence, in (0, 1).
    """
    documents, location = len(text.documents), "perplexity.documents"
    if text.duplicates:
        total = documents + text.duplicates
        yield Finding(
            "warn" if text.duplicates > _MAX_DUPLICATES * total else "info",
            location,
            found=f"{text.duplicates:,} of {total:,} documents repeat another one, and each text counts once",
            expected="documents that differ",
            remedy="remove repeated documents",
        )
    excluded = share_bounds(0, documents, confidence)[1]
    if documents > 1 and _ratio(np.zeros(documents), limits, confidence).high > 1 + limits.max_increase:
        yield Finding(
            "warn",
            location,
            found=f"too few documents to pass: with {documents}, even a merge that equals its best parent on each of "
            "them is inconclusive",
            expected="at least 100 documents, preferably 500",
            remedy="add held-out text",
        )
    elif excluded > limits.max_broken_documents:
        wanted = math.ceil(math.log(1 - confidence) / math.log1p(-limits.max_broken_documents))
        yield Finding(
            "info",
            location,
            found=f"{documents:,} documents can only show that at most {100 * excluded:.1f} % of such documents break; "
            f"{wanted:,} could show that at most {100 * limits.max_broken_documents:g} % do",
        )


class Ratio(NamedTuple):
    """Ratio of perplexities with its interval."""

    ratio: float
    low: float
    high: float


def _ratio(losses: NDArray[np.float64], limits: DriftLimits, confidence: float, few: float = _CLIP_OF_FEW) -> Ratio:
    """Return the ratio of perplexities as a geometric mean over documents.

    Args:
        losses: Loss of each document in nats per token (or byte), in random order.
        limits: Limits that determine the range of one document within the bounds.
        confidence: One-sided confidence of each bound, in (0, 1).
        few: Range of one of fewer than ``_FEW`` documents, as a multiple of the limit. A small range shows that a drift
            is small with fewer documents, a large range that it is large. Default: ``_CLIP_OF_FEW``.
    """
    clip = (_CLIP if len(losses) >= _FEW else few) * math.log1p(limits.max_increase)
    blocks = np.array_split(np.clip(losses / clip, -1, 1), min(len(losses), _MAX_BLOCKS))
    bounds = graded_difference([float(block.mean()) for block in blocks], confidence)
    mean = float(losses.mean())  # Of unclipped losses, so that the ratio is comparable with perplexities.
    return Ratio(_exp(mean), _exp(min(mean, clip * bounds.low)), _exp(max(mean, clip * bounds.high)))


def _judge_strata(
    names: Sequence[str], losses: NDArray[np.float64], limits: DriftLimits, confidence: float
) -> tuple[StratumDrift, ...]:
    """Return the drift of each stratum with enough documents, and by Holm's procedure whether it fails."""
    rows = defaultdict(list)
    for row, name in enumerate(names):
        rows[name].append(row)
    remaining = {name for name in rows if name and _MIN_STRATUM <= len(rows[name]) < len(names)}
    strata: dict[str, StratumDrift] = {}
    while remaining:
        level = 1 - (1 - confidence) / len(remaining)
        for name in remaining:
            ratio, low, _ = _ratio(losses[rows[name]], limits, level, few=_CLIP)
            strata[name] = StratumDrift(
                name=name,
                documents=len(rows[name]),
                ratio=ratio,
                low=low,
                high=_ratio(losses[rows[name]], limits, confidence).high,
                failed=low > 1 + limits.max_increase,
            )
        if not (failed := {name for name in remaining if strata[name].failed}):
            break
        remaining -= failed
    return tuple(strata[name] for name in sorted(strata))


def _findings(verdict: DriftVerdict) -> tuple[GateFinding, ...]:
    """Return findings about failed strata, broken documents and duplicates, which the ratio does not show.

    The ratio of a broken merge says enough about its strata and documents.
    """
    findings = [
        GateFinding(
            kind="stratum",
            outcome="fail",
            reason=f"perplexity of {stratum.name} is {_format(stratum.ratio)} times that of {verdict.reference} in "
            f"{format_count(stratum.documents, 'document')}, at least {stratum.low:.3f}; the limit is "
            f"{verdict.max_ratio:g}",
        )
        for stratum in verdict.strata
        if stratum.failed and not verdict.broken
    ]
    if (broken := verdict.broken_documents) and not verdict.broken:
        limit, low, high = verdict.max_broken_documents, verdict.broken_low, verdict.broken_high
        outcome: Outcome = "pass"
        bound = f"at most {100 * high:.1f} % of such documents do"
        if low > limit:
            outcome, bound = "fail", f"at least {100 * low:.1f} % of such documents do"
        elif high > limit:
            outcome, bound = "inconclusive", f"up to {100 * high:.1f} % of such documents may"
        findings.append(
            GateFinding(
                kind="broken documents",
                outcome=outcome,
                reason=f"{f'{UNSAFE}: ' if outcome == 'inconclusive' else ''}{broken:,} of "
                f"{format_count(verdict.documents, 'document')} {'lose' if broken > 1 else 'loses'} more than "
                f"{BROKEN_LOSS:g} nats per token against {verdict.reference}, and {bound}; max_broken_documents is "
                f"{100 * limit:g} %",
            )
        )
    if verdict.duplicates:
        repeats = "repeats another one and is" if verdict.duplicates == 1 else "repeat another one and are"
        reason = f"{format_count(verdict.duplicates, 'held-out document')} {repeats} not counted"
        findings.append(GateFinding(kind="duplicates", outcome="pass", reason=reason))
    return tuple(findings)


def _sentence(verdict: DriftVerdict) -> str:
    """Return the verdict by the ratio as a sentence (see ``gate.verdicts``).

    For example: ``perplexity is 1.031 times that of base and at most 1.050; the limit is 1.05``.
    """
    ratio, low, high = (_format(value or 0.0) for value in (verdict.ratio, verdict.low, verdict.high))
    per_byte = " per byte" if verdict.unit == "byte" else ""
    sentence, limit = f"perplexity is {ratio} times that of {verdict.reference}{per_byte}", f"{verdict.max_ratio:g}"
    if verdict.broken:
        return f"{sentence}, so the merge is broken; the limit is {limit}"
    if verdict.outcome == "pass":
        return f"{sentence} and at most {high}; the limit is {limit}"
    if verdict.outcome == "fail":
        is_shown = verdict.low is not None and verdict.low > verdict.max_ratio
        least = f"at least {low}" if is_shown else f"and not by chance (at least {low})"
        return f"{sentence}, {least}; the limit is {limit}"
    return (
        f"{UNSAFE}: {sentence} and may be up to {high} times; the limit is {limit}. "
        f"More than {verdict.documents:,} documents would decide"
    )


def _format(value: float) -> str:
    """Format a ratio of perplexities of any magnitude."""
    return f"{value:.3f}" if value < 10 else f"{value:,.0f}" if value < 1e6 else f"{value:.1e}"


def _exp(x: float) -> float:
    return math.exp(max(-700.0, min(700.0, x)))  # Far beyond any limit, but still a number that JSON can represent.
