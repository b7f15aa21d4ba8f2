"""Texts that models read for their merge: they are there, and nothing of them is asked by what judges the merge.

A merge that was fitted to the documents that it is judged by would pass for what it cannot do.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from mergegate.merge_core import Recipe
from mergegate.merge_core.errors import Finding
from mergegate.merge_core.files import HashMemo
from mergegate.tasks.evaluation import CalibrationTexts, ContaminatedDocuments, EvalTask
from mergegate.tasks.merge import pin_calibration_texts
from mergegate.tasks.perplexity import HeldOutText, read_texts
from mergegate.tasks.preflight.evidence import Evidence
from mergegate.tasks.store import digest


def collect_calibration_texts(recipe: Recipe, hashes: HashMemo) -> CalibrationTexts | None:
    """All that the models of ``recipe`` read; None where that is nothing.

    Raises:
        InvalidInput: for a text that is not there, or is not as the recipe says.
    """
    read: list[str] = []
    pinned: list[tuple[HeldOutText, int]] = []
    for document in (*recipe.steps, recipe):
        for _, text in pin_calibration_texts(document, hashes):
            pinned.append((text, document.reading.documents))
            read += [one for _, one in read_texts(text, document.reading.documents)]
    return CalibrationTexts(digest=digest(pinned), texts=tuple(read)) if pinned else None


def overlap_findings(
    texts: CalibrationTexts,
    evidence: Evidence,
    documents_of: Callable[[EvalTask, CalibrationTexts], ContaminatedDocuments],
) -> Iterator[Finding]:
    """What of the evidence was read by models for the merge: a finding that blocks, for each task and for the held-out
    text.

    Args:
        texts: What was read.
        evidence: With its data pinned.
        documents_of: :func:`tasks.evaluation.find_contaminated_documents`.

    Raises:
        InvalidInput: when data of a task cannot be loaded.
    """
    if evidence.documents and evidence.windows:
        held_out = [text.strip() for _, text in read_texts(evidence.documents, evidence.windows.documents)]
        own = {text.strip() for text in texts.texts}
        if shared := [text for text in held_out if text in own]:
            yield _overlap("perplexity.documents", len(shared), held_out, shared[0])
    for task in evidence.tasks:
        found = documents_of(task, texts)
        if found.read:
            yield _overlap(f"task {task.name}", found.read, range(found.documents), found.first)


def _overlap(where: str, shared: int, documents: Sequence[object], first: str) -> Finding:
    return Finding(
        "block",
        where,
        found=f"{shared:,} of {len(documents):,} documents stand in texts that models read for it: {first[:60]!r}",
        expected="documents that judge the merge, and others that it is made from",
        remedy="take them out of the texts, or judge by other documents",
    )
