"""Record what judged earlier merges, so that later runs allow for it: documents, and refusals of an anchor.

**Documents.** A release was selected because it was good on certain documents, so its score on them is too high. A
merge that is equally good is blocked more and more often if the documents never change: each release was the luckiest
one so far, and a lucky release stays for long. mergegate therefore judges each new merge on the next sample of a task,
which starts where the last one ended. The same merge is always judged on the same sample, so repeating a run changes
nothing.

**Anchor.** An anchor is a release that stays the same over many runs. All runs together may lose no more against it
than one run may. They compare with the anchor on the same documents, so a team that retries until a merge passes
selects that merge by these documents: at 95 % each time, a hundred runs that lose half a point each end 5 to 17 points
below the anchor. mergegate therefore counts refusals and spends only a part of the allowed error ``alpha`` on each
comparison. A merge that passes does not count::

    alpha / ((refusals + 1) * (refusals + 2))         1/2, 1/6, 1/12, … of alpha, which sum to alpha

Each task and each anchor has a file under the project's home directory. On another machine, or in a new home directory,
the sample after a release starts behind the documents that its provenance names, and refusals are counted from zero.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import TypeVar

from pydantic import Field

from mergegate.merge_core.errors import Finding
from mergegate.merge_core.files import Damaged, hold_lock, read_state, set_aside_damaged, state_directory, write_state
from mergegate.merge_core.wording import format_count
from mergegate.tasks.base.stage import home
from mergegate.tasks.base.store import Artifact, digest
from mergegate.tasks.quality.evaluation import EvalTask, SampleUse, Scores, Scoring, by_task, sample_ranges
from mergegate.tasks.quality.gate.settings import CHAMPION, Guard

WORN = 10.0  # merges per document above which equally good merges are blocked noticeably more often
_MAX_ENTRIES = 1000

T = TypeVar("T")


class JudgedSample(SampleUse):
    """Documents of one task that judged a merge, against the release that was published at the time."""

    merge: str = Field(min_length=1)  # digest
    champion: str = ""  # digest; empty if there was no release yet


class SelectingSample(SampleUse):
    """Documents of one task that selected a release, and the score of the release on them."""

    score: float | None = None  # in [0, 1]; None if the provenance does not name it


def read_samples(task: EvalTask, seed: int) -> tuple[JudgedSample, ...]:
    """Return the samples of ``task`` that have judged merges, oldest first. The order of documents depends on ``seed``.

    A damaged record is set aside, and the result is empty.
    """
    return _read_record(_sample_record(task, seed), _parse_samples) or ()


def record_sample(task: EvalTask, seed: int, sample: JudgedSample) -> None:
    """Record the documents that judged a merge. A merge that is judged again replaces its entry."""
    record = _sample_record(task, seed)
    state_directory(record.parent, private=True)
    with hold_lock(record.parent):
        before = read_samples(task, seed)
        same = [entry for entry in before if (entry.merge, entry.champion) == (sample.merge, sample.champion)]
        if same and same[-1] == sample:
            return
        after = tuple(sample if entry in same else entry for entry in before) if same else (*before, sample)
        lines = [entry.model_dump(exclude_defaults=True) for entry in after[-_MAX_ENTRIES:]]
        write_state(record, json.dumps(lines, indent=1).encode())


def sample_start(history: Sequence[JudgedSample], request: JudgedSample, total: int, first: int | None) -> int:
    """Return the position at which the sample for a merge starts.

    Args:
        history: Samples that have judged merges, oldest first.
        request: The merge, the champion, and the documents that selected the champion.
        total: Number of documents in the task.
        first: Number of documents in the first look. None: all.
    """
    against = [entry for entry in history if entry.champion == request.champion]
    if first is None or first >= total:
        return 0  # there is no other sample
    if own := [entry for entry in against if entry.merge == request.merge]:
        return own[-1].start % total
    return (against[-1] if against else request).next_start(total, first)


def uses_per_document(history: Sequence[JudgedSample], start: int, documents: int, total: int) -> float:
    """Return how many merges each of the ``documents`` documents from ``start`` has judged, on average."""
    shared = 0
    for _, begin, count in {(entry.merge, entry.start % total, min(entry.documents, total)) for entry in history}:
        for one, other in product(sample_ranges(total, start, documents), sample_ranges(total, begin, count)):
            shared += max(0, min(one.last, other.last) - max(one.first, other.first))
    return shared / documents


def unselected_scores(
    guards: Sequence[Guard],
    scores: Sequence[Artifact[Scores]],
    tasks: Sequence[EvalTask],
    selecting: Mapping[str, SelectingSample],
) -> tuple[str, ...]:
    """Return a sentence on the champion's score on documents that did not select it, for each task that has some.

    Args:
        guards: Guards of the run. Only guards against the champion count.
        scores: Scores of the champion.
        tasks: Pinned tasks.
        selecting: Documents that selected the champion, with its scores, by task.
    """
    sentences = []
    totals = {task.name: task.documents or 0 for task in tasks}
    for task, champion in (by_task(CHAMPION, scores) if scores else {}).items():
        guard = next((guard for guard in guards if guard.task == task and guard.guarded_by == CHAMPION), None)
        use, total = selecting.get(task), totals.get(task, 0)
        if guard is None or use is None or use.score is None or not total:
            continue
        old = {(use.start + at) % total for at in range(min(use.documents, total))}
        rows = champion.judge(champion.metrics(guard.metric))
        new = [row.outcome for at, row in enumerate(rows) if (champion.sample_start + at) % total not in old]
        if len(new) > 1:
            low, high = guard.score_range
            unselected = 100 * (sum(new) / len(new) - low) / (high - low)
            sentences.append(
                f"{task}: the current release scores {100 * use.score:.1f} on the {use.documents:,} documents that "
                f"selected it, and {unselected:.1f} on {len(new):,} other documents."
            )
    return tuple(sentences)


def wear_findings(
    guards: Sequence[Guard], tasks: Sequence[EvalTask], scoring: Scoring, *, resample: bool
) -> tuple[list[str], list[Finding]]:
    """Return a line on the use of each guarded task's documents so far, and warnings about worn documents."""
    lines, warnings = [], []
    for task in tasks:
        history, total, first = read_samples(task, scoring.seed), task.documents or 0, task.first_look(scoring)
        references = {guard.guarded_by for guard in guards if guard.task == task.name}
        if not total or not references:
            continue
        sample = total if first is None else min(first, total)
        changes = resample and CHAMPION in references and sample < total
        start = history[-1].next_start(total, first) if changes and history else 0
        uses = uses_per_document(history, start, sample, total)
        which = f"the next {sample:,} of {total:,}" if changes else f"the same {sample:,} of {total:,}"
        if changes or uses:
            advice = "; the references are evaluated on them, too" if changes else ""
            lines.append(
                f"documents: {task.name}: each new merge is judged on {which} documents, which have judged "
                f"{format_count(uses, 'merge')} so far on average{advice}"
            )
        if uses >= WORN and CHAMPION in references:
            can_change = not resample and sample < total
            warnings.append(
                Finding(
                    "warn",
                    f"evaluate.tasks: {task.name}",
                    found=f"{uses:.0f} merges have been judged on each document, so the champion's score is too high, "
                    "and merges that are as good are often blocked",
                    expected=f"fewer than {WORN:.0f} merges per document",
                    remedy="set evaluate.resample: true" if can_change else "use a task with more documents",
                )
            )
    return lines, warnings


def anchor_confidence(confidence: float, refusals: int) -> float:
    """Return the one-sided confidence for comparing with an anchor that has refused ``refusals`` merges."""
    return 1 - (1 - confidence) / ((refusals + 1) * (refusals + 2))


def count_refusals(anchor: str, except_merge: str = "") -> int:
    """Return the number of merges that the anchor with the digest ``anchor`` has refused.

    The merge with the digest ``except_merge`` does not count, for a merge that is judged again. A damaged record is set
    aside, and counting starts from zero.
    """
    return len((_read_record(_anchor_record(anchor), _parse_digests) or set()) - {except_merge})


def record_refusal(anchor: str, merge: str) -> None:
    """Record the digest of a merge that the anchor refused. Recording the same merge again changes nothing."""
    record = _anchor_record(anchor)
    state_directory(record.parent, private=True)
    with hold_lock(record.parent):
        refused = _read_record(record, _parse_digests) or set()
        if merge not in refused:
            write_state(record, json.dumps(sorted({*refused, merge}), indent=1).encode())


def damaged_records() -> list[Damaged]:
    """Return the records of anchors and samples that cannot be read. What they counted is counted from zero again."""
    parsers: dict[str, Callable[[bytes], object]] = {"anchors": _parse_digests, "samples": _parse_samples}
    states = (
        read_state(record, parse)
        for folder, parse in parsers.items()
        for record in sorted((home() / folder).glob("*.json"))
    )
    return [damage for damage in states if isinstance(damage, Damaged)]


def _sample_record(task: EvalTask, seed: int) -> Path:
    # Prompts and the size of the first look do not affect the order of documents.
    pinned = digest({"task": task.in_lm_eval, "digest": task.digest, "data": task.data_digest, "seed": seed})
    only = digest(task.only)[:8] if task.only else "all"
    return home() / "samples" / f"{pinned[:24]}-{only}.json"


def _anchor_record(anchor: str) -> Path:
    return home() / "anchors" / f"{anchor[:32]}.json"


def _read_record(record: Path, parse: Callable[[bytes], T]) -> T | None:
    """Return the parsed content of a record, or None if it does not exist or is damaged."""
    content = read_state(record, parse)
    if isinstance(content, Damaged):
        set_aside_damaged(record, content.reason)
        return None
    return content


def _parse_samples(content: bytes) -> tuple[JudgedSample, ...]:
    entries = json.loads(content)
    if not isinstance(entries, list):
        raise ValueError("the content is not a list of samples")
    return tuple(JudgedSample.model_validate(entry) for entry in entries)


def _parse_digests(content: bytes) -> set[str]:
    digests = json.loads(content)
    if not isinstance(digests, list) or not all(isinstance(digest, str) for digest in digests):
        raise ValueError("the content is not a list of digests")
    return set(digests)
