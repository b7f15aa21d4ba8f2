"""Explaining a merge: how its parents' weights interfere; and where it did not pass, what was lost and what to try.

Two cached stages read weights and documents again; the rest is composed of what is known::

    explanation = explain_merge(pinned, merged, recipe, verdict.value, scores, evidence.tasks)
    explanation.remedies[0].change                                                     # {"lambda": 0.7}
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict

from mergegate.merge_core import open_checkpoint
from mergegate.merge_core.analysis import Interference, measure_interference
from mergegate.merge_core.errors import ChangedInput, InvalidInput, MergegateError
from mergegate.tasks.checkpoints import Model, PinnedCheckpoint, PinnedRecipe
from mergegate.tasks.evaluation import EvalTask, Scores, TaskScores, by_task, document_texts
from mergegate.tasks.explain.base_model import named_base
from mergegate.tasks.explain.remedies import Diagnosis, Remedy, relative_movement, suggest_remedies
from mergegate.tasks.gate import GateVerdict, GuardVerdict
from mergegate.tasks.stage import StageValue, advance, stage
from mergegate.tasks.store import Artifact

log = logging.getLogger(__name__)

TABLE, FLIPS = "interference.parquet", "flips.jsonl"
_EXAMPLES = 5
_SHOWN = 600  # characters of a prompt or a target in a report; the artifact has all of them


class Weights(StageValue):
    """How task vectors interfere. ``interference.parquet`` has a row for each layer and kind of tensor."""

    interference: Interference

    def summary(self) -> str:
        whole = self.interference.whole
        ratio = relative_movement(whole)
        parts = [
            f"sign conflict {100 * whole.conflict:.0f} %" if whole.conflict is not None else "",
            _how_far(ratio) if ratio is not None else "",
        ]
        return " · ".join(part for part in parts if part) or f"{len(self.interference.spots)} parts compared"


def _how_far(ratio: float) -> str:
    if ratio < 0.005:
        return "merge is its base, where weights compare"
    return f"merge moved {ratio:.2f} times as far as any parent"


class Flip(BaseModel):
    """A document on which the merge is worse than its reference. Scores are in [0, 1] for accuracies."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    task: str  # of a group: the task below it
    doc_id: int
    reference: float
    merge: float
    prompt: str | None  # shortened, without few-shot examples; None where the text is no longer to be had
    target: str | None
    reference_answer: str = ""  # shortened; empty where it was not kept, or is no text
    merge_answer: str = ""


class Flips(StageValue):
    """What the merge lost and won on one task. ``flips.jsonl`` has every lost document, unshortened."""

    task: str
    metric: str
    lost: int
    won: int
    examples: tuple[Flip, ...]  # at most five, the largest losses first

    def summary(self) -> str:
        return f"{self.task}: {self.lost} documents lost, {self.won} won"


class LostDocuments(BaseModel):
    """Flips against one reference, under the name that it has in this run."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    reference: str
    flips: Flips


class Explanation(BaseModel):
    """What became of the parents in a merge, as far as weights and documents tell."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    origin: str  # where task vectors begin
    origin_is_base: bool  # otherwise it is the first model of a recipe without base
    vectors: tuple[str, ...]  # the models at their ends
    interference: Interference | None  # None where weights cannot be compared
    lost: tuple[LostDocuments, ...] = ()
    remedies: tuple[Remedy, ...] = ()


@stage("explain", version=1)
def explain(out: Path, origin: Model, parents: tuple[Model, ...], merge: Model) -> Weights:
    """Measure, layer by layer, how the task vectors of ``parents`` agree and how far the merge moved.

    Raises:
        InvalidInput: when a checkpoint cannot be read, or has nothing in common with the others.
    """
    found = measure_interference(
        open_checkpoint(origin.directory),
        [open_checkpoint(parent.directory) for parent in parents],
        open_checkpoint(merge.directory),
        on_progress=lambda done, total: advance(done, total, "B"),
    )
    _write_table(out / TABLE, found)
    return Weights(interference=found)


@stage("flips", version=2)
def flips(
    out: Path,
    task: EvalTask,
    metric: str | dict[str, str],
    reference: tuple[Artifact[Scores], ...],
    merge: tuple[Artifact[Scores], ...],
) -> Flips:
    """Find the documents of ``task`` that the merge lost to its reference, with their text.

    Args:
        metric: By task below the group, where they differ.
        reference: The parts of its scores on this task.
        merge: The same parts.

    Raises:
        InvalidInput: when the task's data can no longer be loaded.
    """
    sides = [
        TaskScores(f"{task.name}: scores of {side}", task.name, parts)
        for side, parts in (("the reference", reference), ("the merge", merge))
    ]
    metrics = sides[0].metrics(metric)
    theirs, ours = ({(row.task, row.doc_id): row for row in side.judged(metrics)} for side in sides)
    sign = 1.0 if metrics.higher_is_better else -1.0
    drops = {at: sign * (theirs[at].outcome - ours[at].outcome) for at in sorted(theirs.keys() & ours.keys())}
    lost = sorted((at for at, drop in drops.items() if drop > 0), key=lambda at: (-drops[at], at))
    wanted: dict[str, list[int]] = {}
    for leaf, doc_id in lost:
        wanted.setdefault(leaf, []).append(doc_id)
    texts = document_texts(task, wanted) if lost else {}
    found = []
    for leaf, doc_id in lost:
        text = texts.get((leaf, doc_id))
        if text is not None and text.doc_hash != theirs[leaf, doc_id].doc_hash:
            text = None  # The data changed since: it is not what was asked.
        found.append(
            Flip(
                task=leaf,
                doc_id=doc_id,
                reference=theirs[leaf, doc_id].outcome,
                merge=ours[leaf, doc_id].outcome,
                prompt=text.prompt if text else None,
                target=text.target if text else None,
                reference_answer=theirs[leaf, doc_id].answer,
                merge_answer=ours[leaf, doc_id].answer,
            )
        )
    lines = [json.dumps(flip.model_dump(), ensure_ascii=False) for flip in found]
    (out / FLIPS).write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    return Flips(
        task=task.name,
        metric=metrics.label,
        lost=len(lost),
        won=sum(drop < 0 for drop in drops.values()),
        examples=tuple(_shortened(flip) for flip in found[:_EXAMPLES]),
    )


def explain_merge(
    pinned: PinnedRecipe,
    merged: Model,
    recipe: Mapping[str, Any] | None,
    verdict: GateVerdict,
    scores: Mapping[str, Sequence[Artifact[Scores]]],
    tasks: Sequence[EvalTask],
) -> Explanation:
    """Everything that explains a verdict. Never stops a run: what cannot be found out is left out, with a line in the
    log.

    Args:
        merged: The merge as a model.
        recipe: The same recipe as plain data, for remedies; None where it has several documents.
        scores: By model, the merge under its own name among them; any number of parts a task.
        tasks: Those that were scored.
    """
    origin, parents = origin_of(pinned.parents)
    interference = _measured(origin, parents, merged)
    remedies: tuple[Remedy, ...] = ()
    if interference is not None and recipe is not None:
        remedies = suggest_remedies(
            Diagnosis(
                recipe=recipe,
                names=tuple(parent.name for parent in parents),
                refs=tuple(parent.ref for parent in parents),
                origin=(origin.name, origin.ref),
                has_base=origin.is_base,
                whole=interference.whole,
                verdict=verdict,
                named_base=None if origin.is_base else _base_of(pinned),
            )
        )
    return Explanation(
        origin=origin.name,
        origin_is_base=origin.is_base,
        vectors=tuple(parent.name for parent in parents),
        interference=interference,
        lost=_lost_documents(verdict.guards, merged.name, scores, tasks),
        remedies=remedies,
    )


def origin_of(parents: Sequence[PinnedCheckpoint]) -> tuple[PinnedCheckpoint, tuple[PinnedCheckpoint, ...]]:
    """Where task vectors begin, and the models at their ends: the base and all others; without a base, the first and
    all others."""
    origin = next((parent for parent in parents if parent.is_base), parents[0])
    return origin, tuple(parent for parent in parents if parent is not origin)


def _base_of(pinned: PinnedRecipe) -> str | None:
    """The base that the models of a recipe without one were made from, as far as their cards tell."""
    directory = pinned.recipe.directory
    return named_base((parent.directory for parent in pinned.parents), directory) if directory else None


def _measured(origin: PinnedCheckpoint, parents: tuple[PinnedCheckpoint, ...], merged: Model) -> Interference | None:
    if not parents:
        return None
    try:
        return explain(origin, parents, merged).value.interference
    except ChangedInput:
        raise
    except MergegateError as error:
        log.warning("the weights are not explained: %s", error)
        return None


def _lost_documents(
    guards: Sequence[GuardVerdict],
    merged: str,
    scores: Mapping[str, Sequence[Artifact[Scores]]],
    tasks: Sequence[EvalTask],
) -> tuple[LostDocuments, ...]:
    by_name = {task.name: task for task in tasks}
    found = []
    for guard in guards:
        if guard.outcome == "pass" or guard.lost == 0 or guard.task not in by_name:
            continue
        try:
            theirs, ours = (_scores_under(guard, name, scores.get(name, ())) for name in (guard.reference, merged))
            metric = guard.leaf_metrics or guard.metric
            value = flips(by_name[guard.task], metric, theirs.parts, ours.parts).value
        except ChangedInput:
            raise
        except MergegateError as error:
            log.warning("lost documents of %s are not shown: %s", guard.task, error)
            continue
        found.append(LostDocuments(reference=guard.reference, flips=value))
    return tuple(found)


def _scores_under(guard: GuardVerdict, model: str, parts: Sequence[Artifact[Scores]]) -> TaskScores:
    """The scores that a guard compared."""
    joined = by_task(model, parts).get(guard.task)
    if joined is None:
        raise InvalidInput(f"task {guard.task}", found=f"no scores of {model}")
    return joined


def _shortened(flip: Flip) -> Flip:
    texts = {name: _clipped(getattr(flip, name)) for name in ("prompt", "target", "reference_answer", "merge_answer")}
    return flip.model_copy(update=texts)


def _clipped(text: str | None) -> str | None:
    """At most ``_SHOWN`` characters: of a long prompt, the end is the question."""
    if text is None or len(text) <= _SHOWN:
        return text
    head = _SHOWN // 3
    return f"{text[:head]} … {text[head + 3 - _SHOWN :]}"


def _write_table(path: Path, found: Interference) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    rows = []
    for spot in found.spots:
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
        for one, other in tally.pairs:
            row[f"cosine_{one}_{other}"] = tally.cosine(one, other)
            row[f"conflict_{one}_{other}"] = tally.pair_conflict(one, other)
        rows.append(row)
    pq.write_table(pa.Table.from_pylist(rows), path, compression="zstd")
