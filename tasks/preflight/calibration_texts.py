"""Check calibration texts: they exist, and do not overlap with the documents that judge the merge.

A merge that is fitted to the documents that judge it would pass for abilities that it does not have.
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
    """Return all texts that the models of ``recipe`` read during the merge, or None if there are none.

    Raises:
        InvalidInput: If a text is missing or differs from the recipe's declaration.
    """
    contents: list[str] = []
    pinned: list[tuple[HeldOutText, int]] = []
    for document in (*recipe.steps, recipe):
        for _, text in pin_calibration_texts(document, hashes):
            pinned.append((text, document.reading.documents))
            contents += [content for _, content in read_texts(text, document.reading.documents)]
    return CalibrationTexts(digest=digest(pinned), texts=tuple(contents)) if pinned else None


def overlap_findings(
    texts: CalibrationTexts,
    evidence: Evidence,
    documents_of: Callable[[EvalTask, CalibrationTexts], ContaminatedDocuments],
) -> Iterator[Finding]:
    """Yield a blocking finding for each task, and for the held-out text, that overlaps with calibration texts.

    Args:
        texts: Calibration texts.
        evidence: Evidence with its data pinned.
        documents_of: ``tasks.evaluation.find_contaminated_documents`` or a replacement.

    Raises:
        InvalidInput: If data of a task cannot be loaded.
    """
    if evidence.documents and evidence.windows:
        held_out = [text.strip() for _, text in read_texts(evidence.documents, evidence.windows.documents)]
        calibration = {text.strip() for text in texts.texts}
        if shared := [text for text in held_out if text in calibration]:
            yield _overlap("perplexity.documents", len(shared), held_out, shared[0])
    for task in evidence.tasks:
        contaminated = documents_of(task, texts)
        if contaminated.read:
            yield _overlap(f"task {task.name}", contaminated.read, range(contaminated.documents), contaminated.first)


def _overlap(location: str, shared: int, documents: Sequence[object], first: str) -> Finding:
    return Finding(
        "block",
        location,
        found=f"{shared:,} of {len(documents):,} documents stand in texts that models read for it: {first[:60]!r}",
        expected="documents that judge the merge, and others that it is made from",
        remedy="take them out of the texts, or judge by other documents",
    )
