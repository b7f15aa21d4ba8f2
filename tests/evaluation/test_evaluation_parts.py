"""Each part of an evaluation is scored once, regardless of later requests and earlier crashes."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scoring_runs import call_here, pin
from tiny_models import CPU, make_model, write_choices
from traps import asked, write_trap

from mergegate.merge_core.errors import InvalidInput
from mergegate.merge_core.files.hashing import HashMemo
from mergegate.tasks.base.stage.progress import progress_watcher
from mergegate.tasks.base.stage.stages import separate_store, store
from mergegate.tasks.base.store.store import Artifact
from mergegate.tasks.models.checkpoints import unload_models
from mergegate.tasks.models.checkpoints.model import Model
from mergegate.tasks.quality.evaluation.definitions.task import EvalTask
from mergegate.tasks.quality.evaluation.document_order import (
    DocumentRange,
    cover_documents,
    document_ranges,
    interim_looks,
    order_documents,
    sample_ranges,
)
from mergegate.tasks.quality.evaluation.scoring import document_scores, harness, loading
from mergegate.tasks.quality.evaluation.scoring.document_scores import SCORES_FILE, DocumentScore
from mergegate.tasks.quality.evaluation.scoring.harness import ScoringJob
from mergegate.tasks.quality.evaluation.scoring.scores import Scores, TaskScores, join_parts
from mergegate.tasks.quality.evaluation.settings import Scoring
from mergegate.tasks.quality.evaluation.stage import evaluate_documents, excerpt, pin_data
from mergegate.tasks.quality.gate.references import pin_tasks
from mergegate.tasks.quality.gate.settings import Guard

FIRST_TEN = Scoring(documents=10)  # of 40 documents: 10, then 10 more, then 20 more


@pytest.fixture(autouse=True)
def _store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Run stages without Prefect and score in this process. Only the last test does as a run does."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    for module in (harness, loading):
        monkeypatch.setattr(module, "call_model_process", call_here)
    with separate_store(tmp_path / "state"):
        yield


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("parts")
    write_choices(root)
    return root


@pytest.fixture(scope="module")
def model(root: Path) -> Iterator[Model]:
    yield make_model(root / "model")
    unload_models()


@pytest.fixture(scope="module")
def task(root: Path) -> EvalTask:
    return pin(root / "letters.yaml")


def watch(*calls: Callable[[], list[Artifact[Scores]]]) -> tuple[Any, list[list[Artifact[Scores]]]]:
    """Return what a watcher of the calls sees, and their results."""
    watcher = Mock()
    with progress_watcher(watcher):
        results = [call() for call in calls]
    ends = [call.args for call in watcher.on_end.call_args_list]
    how_far = [call.args[2:4] for call in watcher.on_progress.call_args_list]
    watched = SimpleNamespace(endings=[end[2] for end in ends], summaries=[end[4] for end in ends], how_far=how_far)
    return watched, results


def made() -> dict[str, tuple[int, int]]:
    """Return the evaluation artifacts in the store, with a fingerprint that changes when one is rebuilt."""
    found = (store().root / "evaluate").glob("*/manifest.json")
    stats = {path.parent.name: path.stat() for path in found if path.parent.suffix != ".partial"}
    return {name: (stat.st_ino, stat.st_mtime_ns) for name, stat in stats.items()}


def rows_of(parts: Iterable[Artifact[Scores]]) -> list[DocumentScore]:
    """Return the stored scores of some parts under lm-eval's metric."""
    rows = [row for part in parts for row in document_scores.read_document_scores(part.directory / SCORES_FILE)]
    return [row for row in rows if row.metric == "acc,none"]


@pytest.mark.story
def test_joined_parts_score_as_all_their_documents(model: Model, task: EvalTask, tmp_path: Path) -> None:
    watching, (parts,) = watch(lambda: evaluate_documents(model, task, FIRST_TEN, None, CPU))
    with separate_store(tmp_path / "knows nothing"):
        whole = evaluate_documents(model, task, Scoring(), None, CPU)
    assert [len(parts), len(whole)] == [3, 1]
    scores = [row.outcome for row in rows_of(whole)]
    together, sure = join_parts(parts).tasks
    assert sure.metric == "prob,none"
    assert (together.task, together.metric, together.n) == ("letters", "acc,none", 40)
    assert together.score == pytest.approx(np.mean(scores))
    assert together.stderr == pytest.approx(np.std(scores, ddof=1) / np.sqrt(40))
    assert [part.value.tasks[0].n for part in parts] == [10, 10, 20]
    assert join_parts([*parts, *whole[:0]]).part is None
    assert join_parts(whole) == whole[0].value.model_copy(update={"seconds": None})
    assert watching.summaries == [f"letters {100 * together.score:.1f}"]  # users see tasks, not parts
    older = parts[0].value.model_copy(update={"lm_eval_version": "0.4.2"})
    with pytest.raises(InvalidInput, match=r"lm-eval 0\.4\.13 and 0\.4\.2"):
        join_parts([dataclasses.replace(parts[0], value=older), parts[1]])


def scores_of(parts: list[Artifact[Scores]]) -> dict[int, float]:
    """Return each document's outcome, and check that no document occurs twice."""
    rows = rows_of(parts)
    found = {row.doc_id: row.outcome for row in rows}
    assert len(found) == len(rows)
    return found


@settings(max_examples=40)
@given(st.lists(st.integers(1, 50) | st.none(), min_size=1, max_size=6), st.data())
def test_a_look_covers_each_document_exactly_once(history: list[int | None], data: st.DataObject) -> None:
    """Holds for any sequence of ``documents``, looks and samples, even if stored parts are lost or damaged."""
    total = data.draw(st.integers(1, 60))
    asked: list[int] = []
    known: list[DocumentRange] = []
    for first in history:
        start = data.draw(st.integers(0, total - 1))
        parts = document_ranges(total, first, start)
        for look in interim_looks(total, first)[: data.draw(st.integers(1, 3))]:
            pieces = cover_documents(sample_ranges(total, start, look), parts, known)
            counted = [at for piece in pieces for at in range(piece.counted.first, piece.counted.last)]
            assert counted == [(start + at) % total for at in range(look)]
            for piece in pieces:
                assert piece.scored.first <= piece.counted.first
                assert piece.counted.last <= piece.scored.last
                if piece.scored not in known:
                    asked += range(piece.scored.first, piece.scored.last)
                    known.append(piece.scored)
    assert len(asked) == len(set(asked))


@settings(max_examples=40)
@given(st.lists(st.tuples(st.integers(0, 30), st.integers(1, 30)), max_size=8), st.integers(1, 40))
def test_overlapping_ranges_count_once(known: list[tuple[int, int]], look: int) -> None:
    """Ranges overlap if two runs scored independently of each other, or if a part was lost."""
    ranges = [DocumentRange(first=first, last=first + length) for first, length in known]
    pieces = cover_documents(sample_ranges(40, 0, look), document_ranges(40, 7), ranges)
    assert [at for piece in pieces for at in range(piece.counted.first, piece.counted.last)] == list(range(look))
    there = {at for one in ranges for at in range(one.first, one.last)}
    new = [at for piece in pieces if piece.scored not in ranges for at in range(piece.scored.first, piece.scored.last)]
    assert sorted(new) == [at for at in range(look) if at not in there]


@pytest.mark.story
def test_no_document_is_scored_again_after_any_history(
    tmp_path: Path, model: Model, task: EvalTask, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The real stage runs random histories against a fake lm-eval that counts documents."""
    counted: list[int] = []

    def fake_score(job: ScoringJob, on_progress: object) -> tuple[DocumentScore, ...]:
        order = order_documents({"letters": 40}, job.scoring.seed)
        documents = [doc for _, doc in order[job.part.first : job.part.last]]
        counted.extend(documents)
        rows = [DocumentScore("letters", "acc,none", doc, f"{doc}", "p", "t", doc / 40) for doc in sorted(documents)]
        return tuple(rows)

    task = pin_data(task)
    monkeypatch.setattr(harness, "score_in_child", fake_score)
    rng = random.Random(3)
    verdicts = []
    for run in range(12):
        counted.clear()
        firsts = [rng.choice([3, 5, 8, 10, 17, None]) for _ in range(5)]
        history = [*((first, rng.choice(interim_looks(40, first))) for first in firsts), (10, 20)]
        with separate_store(tmp_path / f"store {run}"):
            results = [
                evaluate_documents(model, task, Scoring(documents=first or "all", seed=1), look, CPU)
                for first, look in history
            ]
            for (_, look), parts in zip(history, results, strict=True):
                assert scores_of(parts) == {doc: doc / 40 for _, doc in order_documents({"letters": 40}, 1)[:look]}
            joined = TaskScores("letters", "letters", tuple(results[-1]))
            verdicts.append((joined.rows, joined.table(), joined.requested_documents))
        assert len(counted) == len(set(counted)) == max(look for _, look in history)
    assert all(one == verdicts[0] for one in verdicts)  # the gate sees the same after every history


@pytest.mark.story
def test_fewer_documents_cost_nothing_and_score_as_they_did(model: Model, task: EvalTask) -> None:
    watching, (more, fewer, again, back) = watch(
        lambda: evaluate_documents(model, task, Scoring(documents=30), 30, CPU),
        lambda: evaluate_documents(model, task, FIRST_TEN, 20, CPU),
        lambda: evaluate_documents(model, task, FIRST_TEN, 20, CPU),
        lambda: evaluate_documents(model, task, Scoring(), 40, CPU),
    )
    assert watching.endings == ["made", "cached", "cached", "made"]
    first_twenty = {doc for _, doc in order_documents({"letters": 40}, 0)[:20]}
    assert scores_of(fewer) == {doc: score for doc, score in scores_of(more).items() if doc in first_twenty}
    assert [part.digest for part in again] == [part.digest for part in fewer]
    assert [part.value.part for part in back] == [DocumentRange(first=0, last=30), DocumentRange(first=30, last=40)]
    assert len(made()) == 2
    assert len(scores_of(back)) == 40


@pytest.mark.story
def test_damaged_scores_are_evaluated_again(model: Model, task: EvalTask) -> None:
    _, (parts,) = watch(lambda: evaluate_documents(model, task, Scoring(documents=30), 30, CPU))
    before = scores_of(parts)
    (parts[0].directory / SCORES_FILE).write_bytes(b"torn")
    watching, (again,) = watch(lambda: evaluate_documents(model, task, FIRST_TEN, 20, CPU))
    assert watching.endings == ["made"]
    assert scores_of(again) == {doc: score for doc, score in before.items() if doc in scores_of(again)}
    assert [part.value.part for part in again] == [DocumentRange(first=0, last=10), DocumentRange(first=10, last=20)]


def test_progress_runs_once_over_all_parts(model: Model, task: EvalTask) -> None:
    watching, (parts,) = watch(lambda: evaluate_documents(model, task, FIRST_TEN, None, CPU))
    assert watching.endings == ["made"]
    assert watching.how_far[-1] == (80, 80)  # two choices per document, across all parts
    assert watching.how_far == sorted(watching.how_far)
    assert {total for _, total in watching.how_far} == {80}
    part = DocumentRange(first=0, last=11)
    lacking = dataclasses.replace(parts[0], value=parts[0].value.model_copy(update={"part": part}))
    with pytest.raises(InvalidInput, match="10 scored documents"):
        excerpt.work(Path(), lacking, DocumentRange(first=0, last=5))


@pytest.mark.story
def test_each_model_and_task_is_evaluated_once_whatever_is_added_or_renamed(
    tmp_path: Path, model: Model, task: EvalTask
) -> None:
    second = pin(write_choices(tmp_path, n=10, name="more"))
    renamed = model.model_copy(update={"name": "same by another name"})
    patient = FIRST_TEN.model_copy(update={"time_limit": 3600.0})
    other = CPU.model_copy(update={"libraries": {"torch": "9"}})
    calls = [
        (model, task, FIRST_TEN, CPU, "made"), (model, task, FIRST_TEN, CPU, "cached"),
        (model, second, FIRST_TEN, CPU, "made"), (renamed, task, FIRST_TEN, CPU, "cached"),
        (model, task, patient, CPU, "cached"), (model, task, Scoring(documents=10, batch_size=4), CPU, "made"),
        (model, task, Scoring(documents=10, dtype="bfloat16"), CPU, "made"), (model, task, FIRST_TEN, other, "made"),
    ]  # fmt: skip
    watching, _ = watch(*(partial(evaluate_documents, *call[:3], 10, call[3]) for call in calls))
    assert watching.endings == [call[-1] for call in calls]


def test_documents_are_counted_once(tmp_path: Path) -> None:
    task = write_trap(tmp_path / "tasks", "pass", at=0)
    counts = [(pin_data(task).documents, asked(task)) for _ in range(2)]
    assert counts[0] == counts[1]
    assert counts[0][0] == 40


def test_guards_of_one_task_agree_on_its_clusters(tmp_path: Path) -> None:
    write_choices(tmp_path)
    guards = [
        Guard(task="letters.yaml", guarded_by="a"),
        Guard(task="letters.yaml", guarded_by="b", cluster_by="word"),
        Guard(task="letters.yaml", guarded_by="b", cluster_by="task"),
    ]
    hashes = HashMemo(tmp_path / "hashes.db")
    _, (task,) = pin_tasks(guards, tmp_path, hashes)
    assert task.cluster_field == "word"
    with pytest.raises(InvalidInput, match="the same field for all guards"):
        pin_tasks([*guards, Guard(task="letters.yaml", guarded_by="c", cluster_by="right")], tmp_path, hashes)
