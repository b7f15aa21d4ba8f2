"""Explain a merge: interference of its parents' weights and, after a refusal, lost documents and remedies.

Two cached stages read weights and documents again. Everything else is derived from existing results::

    explanation = explain_merge(pinned, merged, recipe, verdict.value, scores, evidence.tasks)
    explanation.remedies[0].change                                                     # {"lambda": 0.7}
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict

from mergegate.merge_core import open_checkpoint
from mergegate.merge_core.analysis import Interference, measure_interference
from mergegate.merge_core.errors import ChangedInput, InvalidInput, MergegateError
from mergegate.tasks.base.stage import StageValue, advance, join_progress, stage
from mergegate.tasks.base.store import Artifact
from mergegate.tasks.models.checkpoints import Model, PinnedRecipe
from mergegate.tasks.preflight.licenses import CardSource, read_declaration
from mergegate.tasks.quality.evaluation import EvalTask, Scores, TaskScores, by_task, document_texts
from mergegate.tasks.quality.gate import GateVerdict
from mergegate.tasks.release.explain.remedies import (
    Diagnosis,
    Remedy,
    relative_movement,
    suggest_documents,
    suggest_remedies,
)

log = logging.getLogger(__name__)

TABLE, FLIPS = "interference.parquet", "flips.jsonl"
_EXAMPLES = 10
_MAX_TEXT = 600  # Characters of a prompt or a target in a report; the artifact has the full text.


class Weights(StageValue):
    """Interference of task vectors. ``interference.parquet`` has one row for each layer and kind of tensor."""

    interference: Interference

    def summary(self) -> str:
        return self.summary_from("", ())

    def summary_from(self, origin: str, parents: Sequence[str]) -> str:
        """Return the summary of a recipe without base. ``origin`` is its first model, and ``parents`` are the others.

        Names are not part of this value, because another run may name the same models differently.
        """
        tally = self.interference.network_tally
        parts = [] if tally.conflict is None else [f"sign conflict {100 * tally.conflict:.0f} %"]
        if (ratio := relative_movement(tally)) is not None:
            far = "as far as any parent"
            if origin:
                far = f"as far from {origin} as {parents[max(range(tally.vectors), key=tally.norm)]}"
            is_base = ratio < 0.005
            parts.append(f"merge equals {origin or 'its base'}" if is_base else f"merge moved {ratio:.2f} times {far}")
        return " · ".join(parts) or f"{len(self.interference.spots)} parts compared"


class Flip(BaseModel):
    """Document on which the merge and its reference score differently. Scores are in [0, 1] for accuracies."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    task: str  # For a group, the task below it.
    doc_id: int
    reference: float
    merge: float
    prompt: str | None  # Shortened, without few-shot examples; None if the text is no longer available.
    target: str | None
    reference_answer: str = ""  # Shortened; empty if it was not stored or is not text.
    merge_answer: str = ""


class Flips(StageValue):
    """Number of documents that the merge lost and won on one task. ``flips.jsonl`` has every lost document in full."""

    task: str
    metric: str
    lost: int
    won: int
    examples: tuple[Flip, ...]  # Lost documents, at most ten, the largest losses first.
    won_examples: tuple[Flip, ...] = ()  # Won documents, at most ten, the largest gains first.

    def summary(self) -> str:
        return f"{self.task}: {self.lost} documents lost, {self.won} won"


class LostDocuments(BaseModel):
    """Documents that the merge lost to the model named ``reference``, and examples of documents that it won."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    reference: str
    flips: Flips


class Explanation(BaseModel):
    """Explanation of a verdict on a merge from its weights and documents."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    origin: str  # Start of the task vectors.
    origin_is_base: bool  # If False, the origin is the first model of a recipe without base.
    vectors: tuple[str, ...]  # Models at the ends of the task vectors.
    interference: Interference | None  # None if weights are not comparable.
    lost: tuple[LostDocuments, ...] = ()
    remedies: tuple[Remedy, ...] = ()


@stage("explain", version=1)
def explain(out: Path, origin: Model, parents: tuple[Model, ...], merge: Model) -> Weights:
    """Measure, layer by layer, how the task vectors of ``parents`` agree and how far the merge moved from ``origin``.

    Raises:
        InvalidInput: If a checkpoint is unreadable or has no tensors in common with the others.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    interference = measure_interference(
        open_checkpoint(origin.directory),
        [open_checkpoint(parent.directory) for parent in parents],
        open_checkpoint(merge.directory),
        on_progress=lambda done, total: advance(done, total, "B"),
    )
    rows = []
    for spot in interference.spots:
        tally = spot.tally
        row: dict[str, Any] = {
            "stack": spot.stack,
            "layer": spot.layer,
            "kind": spot.kind,
            "elements": tally.elements,
            "conflict": tally.conflict,
            "merge_length": tally.merge_length,
        }
        for vector in range(tally.vectors):
            row[f"length_{vector}"] = tally.length(vector)
            row[f"merge_distance_{vector}"] = tally.merge_distance(vector)
        for first, second in tally.pairs:
            row[f"cosine_{first}_{second}"] = tally.cosine(first, second)
            row[f"conflict_{first}_{second}"] = tally.pair_conflict(first, second)
        rows.append(row)
    pq.write_table(pa.Table.from_pylist(rows), out / TABLE, compression="zstd")
    return Weights(interference=interference)


@stage("flips", version=3)
def flips(
    out: Path,
    task: EvalTask,
    metric: str | dict[str, str],
    reference: tuple[Artifact[Scores], ...],
    merge: tuple[Artifact[Scores], ...],
) -> Flips:
    """Find the documents of ``task`` that the merge lost to its reference, with their text, and examples of won ones.

    ``metric`` is one metric, or a metric for each task below the group. ``reference`` and ``merge`` are the scores of
    the two models on this task, one artifact per part.

    Raises:
        InvalidInput: If the task's data can no longer be loaded.
    """
    sides = [
        TaskScores(f"{task.name}: scores of {side}", task.name, parts)
        for side, parts in (("the reference", reference), ("the merge", merge))
    ]
    metrics = sides[0].metrics(metric)
    reference_rows, merge_rows = ({(row.task, row.doc_id): row for row in side.judge(metrics)} for side in sides)
    sign = 1.0 if metrics.higher_is_better else -1.0
    drops = {
        document: sign * (reference_rows[document].outcome - merge_rows[document].outcome)
        for document in sorted(reference_rows.keys() & merge_rows.keys())
    }
    lost = sorted(
        (document for document, drop in drops.items() if drop > 0), key=lambda document: (-drops[document], document)
    )
    won = sorted(
        (document for document, drop in drops.items() if drop < 0), key=lambda document: (drops[document], document)
    )
    described = (*lost, *won[:_EXAMPLES])
    shown_by_task: dict[str, list[int]] = {}
    for leaf, doc_id in described:
        shown_by_task.setdefault(leaf, []).append(doc_id)
    texts = document_texts(task, shown_by_task) if shown_by_task else {}
    flip_list = []
    for leaf, doc_id in described:
        text = texts.get((leaf, doc_id))
        if text is not None and text.doc_hash != reference_rows[leaf, doc_id].doc_hash:
            text = None  # The data changed since, so this is not the evaluated document.
        flip_list.append(
            Flip(
                task=leaf,
                doc_id=doc_id,
                reference=reference_rows[leaf, doc_id].outcome,
                merge=merge_rows[leaf, doc_id].outcome,
                prompt=text.prompt if text else None,
                target=text.target if text else None,
                reference_answer=reference_rows[leaf, doc_id].answer,
                merge_answer=merge_rows[leaf, doc_id].answer,
            )
        )
    lost_flips, won_flips = flip_list[: len(lost)], flip_list[len(lost) :]
    lines = [json.dumps(flip.model_dump(), ensure_ascii=False) for flip in lost_flips]
    (out / FLIPS).write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    return Flips(
        task=task.name,
        metric=metrics.label,
        lost=len(lost),
        won=len(won),
        examples=tuple(map(_clip, lost_flips[:_EXAMPLES])),
        won_examples=tuple(map(_clip, won_flips)),
    )


def _clip(flip: Flip) -> Flip:
    """Return the document with long texts shortened: their start, and mostly their end, which has the question."""
    clipped: dict[str, str] = {}
    for name in ("prompt", "target", "reference_answer", "merge_answer"):
        text = getattr(flip, name)
        if text is not None and len(text) > _MAX_TEXT:
            head = _MAX_TEXT // 3
            clipped[name] = f"{text[:head]} … {text[head + 3 - _MAX_TEXT :]}"
    return flip.model_copy(update=clipped)


def explain_merge(
    pinned_recipe: PinnedRecipe,
    merge: Model,
    recipe: Mapping[str, Any] | None,
    verdict: GateVerdict,
    scores: Mapping[str, Sequence[Artifact[Scores]]],
    tasks: Sequence[EvalTask],
) -> Explanation:
    """Return everything that explains a verdict. Parts that cannot be computed are left out and logged.

    ``recipe`` is the pinned recipe as plain data, or None if it has several documents; remedies need it. ``scores``
    holds the scores by model, with the merge under its own name and any number of parts per task.

    Raises:
        ChangedInput: If an input file changed during the run.
    """
    # Task vectors begin at the base or, without a base, at the first model. They end at all other models.
    origin = next((parent for parent in pinned_recipe.parents if parent.is_base), pinned_recipe.parents[0])
    parents = tuple(parent for parent in pinned_recipe.parents if parent is not origin)
    interference: Interference | None = None
    try:
        if parents:
            with join_progress(explain.name, "", [1]) as report:
                weights = explain(origin, parents, merge).value
                names = [parent.name for parent in parents]
                report.summary = weights.summary() if origin.is_base else weights.summary_from(origin.name, names)
            interference = weights.interference
    except ChangedInput:
        raise
    except MergegateError as error:
        log.warning("cannot explain the weights: %s", error)
    documents = suggest_documents(verdict, {task.name: task.documents or 0 for task in tasks})
    remedies: tuple[Remedy, ...] = (documents,) if documents else ()
    if not documents and interference is not None and recipe is not None:
        directory = None if origin.is_base else pinned_recipe.recipe.directory
        remedies = suggest_remedies(
            Diagnosis(
                recipe=recipe,
                names=tuple(parent.name for parent in parents),
                refs=tuple(parent.ref for parent in parents),
                origin=(origin.name, origin.ref),
                has_base=origin.is_base,
                tally=interference.network_tally,
                verdict=verdict,
                named_base=named_base((parent.directory for parent in pinned_recipe.parents), directory)
                if directory
                else None,
            )
        )
    return Explanation(
        origin=origin.name,
        origin_is_base=origin.is_base,
        vectors=tuple(parent.name for parent in parents),
        interference=interference,
        lost=_lost_documents(verdict, merge.name, scores, tasks),
        remedies=remedies,
    )


def named_base(models: Iterable[Path], directory: Path) -> str | None:
    """Return the base that the cards of all models name, in the form that a recipe in ``directory`` would use.

    ``models`` are directories. If a card does not name exactly one base, if the cards differ, or if the base is one
    of the models, the result is None.
    """
    directories = [model_directory.resolve() for model_directory in models]
    candidates = set()
    for model_directory in directories:
        bases = read_declaration(CardSource(model_directory)).base_model
        if len(bases) != 1:
            return None
        local_path = model_directory / bases[0]
        candidates.add(local_path.resolve() if local_path.is_dir() else bases[0])
    if len(candidates) != 1:
        return None
    (base,) = candidates
    if isinstance(base, str):  # a repository of the Hub
        return base
    return None if base in directories else os.path.relpath(base, directory.resolve())


def _lost_documents(
    verdict: GateVerdict,
    merge: str,
    scores: Mapping[str, Sequence[Artifact[Scores]]],
    tasks: Sequence[EvalTask],
) -> tuple[LostDocuments, ...]:
    by_name = {task.name: task for task in tasks}
    lost_documents = []
    if verdict.outcome == "pass":
        return ()
    # The guards that did not pass come first. A merge that failed as a whole may have lost documents on every task.
    for guard in sorted(verdict.guards, key=lambda guard: guard.outcome == "pass"):
        if guard.lost + guard.won == 0 or guard.task not in by_name:
            continue
        try:
            parts = []
            for model in (guard.reference, merge):
                task_scores = by_task(model, scores.get(model, ())).get(guard.task)
                if task_scores is None:
                    raise InvalidInput(f"task {guard.task}", found=f"no scores of {model}")
                parts.append(task_scores.parts)
            metric = guard.leaf_metrics or guard.metric
            value = flips(by_name[guard.task], metric, *parts).value
        except ChangedInput:
            raise
        except MergegateError as error:
            log.warning("cannot show the lost documents of %s: %s", guard.task, error)
            continue
        lost_documents.append(LostDocuments(reference=guard.reference, flips=value))
    return tuple(lost_documents)
