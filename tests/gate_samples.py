"""Hand-written evidence for the gate's tests: paired outcomes, stored scores and likelihoods."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from mergegate.tasks.base.store.store import Artifact
from mergegate.tasks.quality.evaluation.scoring import document_scores
from mergegate.tasks.quality.evaluation.scoring.document_scores import DocumentScore, PairedScores
from mergegate.tasks.quality.evaluation.scoring.scores import Scores, TaskScore
from mergegate.tasks.quality.gate import GatePlan, GateRule, GateVerdict, Guard, GuardVerdict, gate
from mergegate.tasks.quality.gate.drift import ModelLikelihoods
from mergegate.tasks.quality.gate.evidence import GuardEvidence, measure_guard
from mergegate.tasks.quality.gate.regression import judge_guards
from mergegate.tasks.quality.perplexity.measurement import DocumentLikelihood, TextMeasurement
from mergegate.tasks.quality.perplexity.stage import LIKELIHOODS_FILE, Likelihoods, total_likelihood, write_documents

GUARD = Guard(task="reverse", guarded_by="reverser", max_drop=3)
MEASUREMENTS = Path(__file__).resolve().parents[1] / "dev" / "measurements"


def table_in_docs(page: str, name: str) -> list[list[str]]:
    """Return the cells of a named table on a page of ``dev/measurements``, header first, without the separator row."""
    text = (MEASUREMENTS / page).read_text(encoding="utf-8")
    lines = text.split(f"<!-- {name} -->")[1].split(f"<!-- /{name} -->")[0].splitlines()
    return [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in lines
        if line.startswith("| ") and "--:" not in line
    ]


def paired(lost: int, won: int, n: int) -> PairedScores:
    """Return ``n`` pairs: ``lost`` that only the reference gets right, ``won`` only the merge, the rest both."""
    reference = [1.0] * lost + [0.0] * won + [1.0] * (n - lost - won)
    merge = [0.0] * lost + [1.0] * won + [1.0] * (n - lost - won)
    return PairedScores(tuple(("reverse", i) for i in range(n)), tuple(reference), tuple(merge))


def pair(reference: Sequence[DocumentScore], merge: Sequence[DocumentScore]) -> PairedScores:
    """Return the scores of both models on the same documents."""
    documents = tuple((row.task, row.doc_id) for row in reference)
    outcomes = (tuple(row.outcome for row in rows) for rows in (reference, merge))
    return PairedScores(documents, *outcomes, rows=tuple(zip(reference, merge, strict=True)))


def measured(guard: Guard, lost: int, won: int, n: int, **more: object) -> GuardEvidence:
    """Return the evidence of a guard for ``paired`` scores."""
    return measure_guard(guard, "acc,none", paired(lost, won, n), True, **more)  # type: ignore[arg-type]  # test values


def judge_guard(
    guard: Guard, metric: str, scores: PairedScores, higher_is_better: bool = True, confidence: float = 0.95
) -> GuardVerdict:
    """Return the verdict of a single guard on scores to which no more will be added."""
    return judge_guards([measure_guard(guard, metric, scores, higher_is_better)], confidence)[0]


def verdict_of(lost: int, won: int, n: int, guard: Guard = GUARD, **more: object) -> GuardVerdict:
    return judge_guards([measured(guard, lost, won, n, **more)], 0.95)[0]


def gate_scores(
    scores: Mapping[str, list[Artifact[Scores]]], *guards: Guard, rule: GateRule | None = None, **plan: object
) -> GateVerdict:
    """Return the verdict of the gate on stored scores, without a held-out text."""
    return gate.work(guards or (GUARD,), scores, {}, None, GatePlan(rule or GateRule(), **plan))  # type: ignore[arg-type]


def scores_of(directory: Path, **right: int) -> dict[str, list[Artifact[Scores]]]:
    """Return the stored scores of models by name, which get these numbers of 400 documents right."""
    return {name: [scores(directory / name, count)] for name, count in right.items()}


def outcome(doc: int, value: float = 1.0, **other: str) -> DocumentScore:
    hashes = {"doc_hash": f"d{doc}", "prompt_hash": f"p{doc}", "target_hash": f"t{doc}"} | other
    return DocumentScore(task="reverse", metric="acc,none", doc_id=doc, outcome=value, **hashes)


def right_on(right: Iterable[int], n: int, first: int = 0) -> list[DocumentScore]:
    """Return documents ``first`` to ``n``; the ones in ``right`` are answered correctly."""
    answered = set(right)
    return [outcome(doc, float(doc in answered)) for doc in range(first, n)]


def likelihoods(
    nats: Sequence[float],
    *,
    vocabulary: str = "v",
    window: int | None = 128,
    tokens: int | Sequence[int] = 100,
    strata: Sequence[str] | None = None,
) -> ModelLikelihoods:
    """Return documents with the given nats per token and four bytes per token."""
    n = len(nats)
    lengths = [tokens] * n if isinstance(tokens, int) else list(tokens)
    documents = [
        DocumentLikelihood(i, -length * value, length, 4 * length, hashlib.sha256(b"%d" % i).hexdigest()[:16], stratum)
        for i, (value, length, stratum) in enumerate(zip(nats, lengths, strata or [""] * n, strict=True))
    ]
    return ModelLikelihoods(
        total_likelihood("as measured", TextMeasurement(documents, vocabulary, window or 0, 0)).model_copy(
            update={"window": window}
        ),
        tuple(documents),
    )


PARENT = likelihoods([2.0 + 0.1 * math.sin(i) for i in range(500)])


def worse(by: float, noise: float = 0.01, **other: object) -> ModelLikelihoods:
    """Return a merge that is worse by ``by`` nats per token, with some variation between documents."""
    nats = [-d.loglik / d.tokens + by + noise * math.cos(7 * i) for i, d in enumerate(PARENT.documents)]
    return likelihoods(nats, **other)  # type: ignore[arg-type]  # Tests pass matching types.


def stored(directory: Path, value: Scores | Likelihoods) -> Artifact[Scores] | Artifact[Likelihoods]:
    return Artifact("made here", "key", f"{directory}", value, directory, {})  # type: ignore[return-value]  # generic


def scores(directory: Path, right: int, *, version: str = "0.4.13", n: int = 400) -> Artifact[Scores]:
    """Return the stored scores of a model that gets the first ``right`` of ``n`` documents right."""
    return part(directory, right_on(range(right), n), version=version)


def part(directory: Path, scored: Sequence[DocumentScore], *, version: str = "0.4.13") -> Artifact[Scores]:
    """Store scores on one part of a task."""
    directory.mkdir(parents=True)
    document_scores.write_document_scores(directory / document_scores.SCORES_FILE, scored)
    table = tuple(
        TaskScore(task=scored[0].task, metric=metric, n=len(scored), score=0.0, stderr=0.0, higher_is_better=True)
        for metric in dict.fromkeys(outcome.metric for outcome in scored)
    )
    return stored(directory, Scores(model="x", tasks=table, lm_eval_version=version))  # type: ignore[return-value]


def read(directory: Path, evidence: ModelLikelihoods) -> Artifact[Likelihoods]:
    directory.mkdir(parents=True)
    write_documents(directory / LIKELIHOODS_FILE, evidence.documents)
    return stored(directory, evidence.value)  # type: ignore[return-value]
