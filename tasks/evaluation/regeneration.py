"""Generate cut-off answers again with a larger token budget, as a cached stage.

Only the documents whose answers were cut off are evaluated again, with twice the budget. The scores of all other
documents stay. The key is that of the earlier scores and the new budget, so a later run, and other interim looks, reuse
the longer answers.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from mergegate.merge_core.errors import InvalidInput
from mergegate.merge_core.files import JOURNAL, JournalLocation, keep_only_journal
from mergegate.tasks.checkpoints import Model, files_fingerprint
from mergegate.tasks.evaluation import process
from mergegate.tasks.evaluation.document_scores import (
    SCORES_FILE,
    DocumentScore,
    read_document_scores,
    write_document_scores,
)
from mergegate.tasks.evaluation.harness import LongerAnswers, ScoringJob
from mergegate.tasks.evaluation.settings import Scoring
from mergegate.tasks.evaluation.stage import Scores, answer_ends, score_table, with_backend
from mergegate.tasks.evaluation.task_definition import EvalTask
from mergegate.tasks.stage import Runtime, advance, stage
from mergegate.tasks.store import Artifact


@stage("regenerate", version=1, subject="model", resumable=True)
def regenerate(
    out: Path,
    model: Model,
    task: EvalTask,
    scoring: Scoring,
    scores: Artifact[Scores],
    budgets: Mapping[str, int],
    runtime: Runtime,
) -> Scores:
    """Generate the cut-off answers in ``scores`` again, with the token budget of each leaf in ``budgets``.

    The result has the scores of all documents. An interrupted run resumes from its journal.

    Raises:
        InvalidInput: See ``evaluate``; also if a prompt differs from that of the first answer.
        Refused: If scoring takes longer than ``scoring.time_limit``.
    """
    keep_only_journal(out)
    value, rows = scores.value, read_document_scores(scores.directory / SCORES_FILE)
    assert value.part is not None  # mergegate scored these documents itself
    before = {
        (row.task, row.doc_id): row
        for row in rows
        if row.is_cut_off and "context" not in row.ended and row.budgets[-1] < budgets.get(row.task, 0)
    }
    documents = {leaf: sorted(doc_id for task_name, doc_id in before if task_name == leaf) for leaf, _ in before}
    endpoint = scoring.server.at(model.name) if scoring.server else None
    began = time.monotonic()
    key = f"{regenerate.key(model, task, scoring, scores, budgets, runtime)} {endpoint!r} {files_fingerprint([model])}"
    job = ScoringJob(
        model,
        task,
        scoring,
        value.part,
        runtime.device,
        JournalLocation(out / JOURNAL, key),
        LongerAnswers(documents, budgets),
    )
    longer: dict[tuple[str, int, str], DocumentScore] = {}
    for row in process.score_in_child(job, lambda done, total: advance(done, total, f"answers of {task.name}")):
        old = before[row.task, row.doc_id]
        if row.prompt_hash != old.prompt_hash:
            raise InvalidInput(
                f"{task.name}: longer answers of {model.name}",
                found=f"another prompt for document {row.doc_id} of {row.task}",
                expected="the prompt of the first answer",
                remedy="delete 'evaluate' from the store and run again",
            )
        longer[row.task, row.doc_id, row.metric] = row._replace(budgets=(*old.budgets, *row.budgets))
    joined = [longer.get((row.task, row.doc_id, row.metric), row) for row in rows]
    write_document_scores(out / SCORES_FILE, joined)
    update = {
        "model": model.name,
        "tasks": score_table(task.name, joined),
        "ends": answer_ends(task.name, joined),
        "seconds": time.monotonic() - began,
    }
    return value.model_copy(update=update)


def lengthen_answers(
    model: Model,
    task: EvalTask,
    scoring: Scoring,
    artifacts: Sequence[Artifact[Scores]],
    doublings: int,
    limit: int | None,
    runtime: Runtime,
) -> list[Artifact[Scores]]:
    """Return the artifacts with their cut-off answers generated again, with a budget that doubles ``doublings`` times.

    ``limit`` is the largest budget (see ``DocumentScore.next_budget``). An artifact without answers that may be longer
    is returned unchanged. Raises the same errors as ``regenerate``.
    """
    runtime = with_backend(scoring, runtime)
    lengthened = list(artifacts)
    for index in range(len(lengthened)):
        for _ in range(doublings):
            artifact = lengthened[index]
            if not any(ends.counts.get("length") for ends in artifact.value.ends.values()):
                break
            rows = read_document_scores(artifact.directory / SCORES_FILE)
            budgets = {row.task: budget for row in rows if (budget := row.next_budget(limit)) is not None}
            if not budgets:
                break
            lengthened[index] = regenerate(model, task, scoring, artifact, budgets, runtime)
    return lengthened
