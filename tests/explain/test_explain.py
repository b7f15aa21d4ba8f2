"""The explanation of a refusal shows lost documents with their text, weight interference and remedies."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch
from builders.results import build, gate_verdict
from lm_eval_runs import run_lm_eval_here
from safetensors.torch import load_file, save_file
from scoring_runs import pin
from tiny_models import make_model, write_choices, write_jsonl

from mergegate.merge_core import load_recipe
from mergegate.tasks.base.store.store import Artifact
from mergegate.tasks.models.checkpoints.model import Model
from mergegate.tasks.models.checkpoints.pin import PinnedCheckpoint, PinnedRecipe
from mergegate.tasks.quality.evaluation.definitions.task import EvalTask
from mergegate.tasks.quality.evaluation.scoring import document_scores
from mergegate.tasks.quality.evaluation.scoring.document_scores import DocumentScore
from mergegate.tasks.quality.evaluation.scoring.loading import document_texts
from mergegate.tasks.quality.evaluation.scoring.scores import Scores, TaskScore
from mergegate.tasks.quality.gate.verdicts import GateVerdict, GuardVerdict
from mergegate.tasks.release.explain.stage import FLIPS, TABLE, Explanation, Flips, explain, explain_merge, flips

METRIC = "acc,none"
Scored = Callable[..., Artifact[Scores]]


@pytest.fixture
def task(tmp_path: Path) -> EvalTask:
    return pin(write_choices(tmp_path, 30))


@pytest.fixture
def documents(task: EvalTask, tmp_path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (tmp_path / "data" / "letters.jsonl").read_text().splitlines()]


@pytest.fixture
def scored(tmp_path: Path, documents: Sequence[Mapping[str, Any]]) -> Scored:
    """Return the scores of a model that gets these documents wrong and all others right."""

    def write(name: str, wrong: set[int], part: range = range(30), **fields: Any) -> Artifact[Scores]:
        rows = [
            DocumentScore("letters", METRIC, at, hash_of(documents[at]), "p", "t", float(at not in wrong))._replace(
                **fields
            )
            for at in part
        ]
        directory = tmp_path / f"scores-{name}-{part.start}"
        directory.mkdir()
        document_scores.write_document_scores(directory / document_scores.SCORES_FILE, rows)
        table = TaskScore(task="letters", metric=METRIC, n=len(part), score=0.5, stderr=0.1, higher_is_better=True)
        value = Scores(model=name, tasks=(table,), lm_eval_version="0.4.13")
        digest = hashlib.sha256(f"{sorted(wrong)}{part}".encode()).hexdigest()
        return Artifact("evaluate", digest, digest, value, directory, {})

    return write


def hash_of(document: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(document, indent=2).encode()).hexdigest()


def lost(task: EvalTask, out: Path, theirs: Sequence[Artifact[Scores]], ours: Sequence[Artifact[Scores]]) -> Flips:
    out.mkdir()
    return flips.work(out, task, METRIC, tuple(theirs), tuple(ours))


def test_a_lost_document_is_shown_with_its_prompt(
    task: EvalTask, documents: list[dict[str, Any]], scored: Scored, tmp_path: Path
) -> None:
    found = lost(task, tmp_path / "out", [scored("a", {1, 2})], [scored("merge", {2, 7, 9})])
    assert (found.lost, found.won) == (2, 1)
    assert [(flip.doc_id, flip.reference, flip.merge) for flip in found.examples] == [(7, 1.0, 0.0), (9, 1.0, 0.0)]
    for flip in found.examples:
        document = documents[flip.doc_id]
        assert flip.prompt == document["word"]
        assert flip.target == document["choices"][document["right"]]
    (won,) = found.won_examples
    assert (won.doc_id, won.reference, won.merge, won.prompt) == (1, 0.0, 1.0, documents[1]["word"])
    stored = (tmp_path / "out" / FLIPS).read_text().splitlines()
    assert [json.loads(line)["doc_id"] for line in stored] == [7, 9]
    assert found.summary() == "letters: 2 documents lost, 1 won"


def test_ten_examples_are_shown_and_all_are_stored(task: EvalTask, scored: Scored, tmp_path: Path) -> None:
    wrong = set(range(3, 15))
    found = lost(task, tmp_path / "out", [scored("a", set())], [scored("merge", wrong)])
    assert (found.lost, len(found.examples)) == (12, 10)
    kept = [json.loads(line) for line in (tmp_path / "out" / FLIPS).read_text().splitlines()]
    assert {line["doc_id"] for line in kept} == wrong
    assert all(line["prompt"] and line["target"] for line in kept)


def test_parts_of_a_task_count_together(task: EvalTask, scored: Scored, tmp_path: Path) -> None:
    theirs = [scored("a", set(), range(10)), scored("a", {12}, range(10, 30))]
    ours = [scored("merge", {4}, range(10)), scored("merge", {25}, range(10, 30))]
    found = lost(task, tmp_path / "out", theirs, ours)
    assert ([flip.doc_id for flip in found.examples], found.won) == ([4, 25], 1)


def test_a_higher_score_is_a_loss_where_lower_is_better(task: EvalTask, scored: Scored, tmp_path: Path) -> None:
    theirs, ours = (scored(name, wrong, higher_is_better=False) for name, wrong in (("a", {1, 2}), ("merge", {2, 7})))
    found = lost(task, tmp_path / "out", [theirs], [ours])
    assert [flip.doc_id for flip in found.examples] == [1]


def test_the_text_of_a_changed_document_is_not_shown(task: EvalTask, scored: Scored, tmp_path: Path) -> None:
    theirs = scored("a", set(), doc_hash="another")
    (flip,) = lost(task, tmp_path / "out", [theirs], [scored("merge", {3})]).examples
    assert (flip.doc_id, flip.prompt, flip.target) == (3, None, None)


def test_long_prompts_keep_both_their_ends_and_the_artifact_all(
    task: EvalTask, documents: list[dict[str, Any]], scored: Scored, tmp_path: Path
) -> None:
    long = "begins here " + "x" * 5000 + " and ends with the question"
    documents[3] = {"word": long, "right": 0, "choices": ["a", "b"]}
    write_jsonl(tmp_path / "data" / "letters.jsonl", documents)
    task = pin(tmp_path / "letters.yaml")
    found = lost(task, tmp_path / "out", [scored("a", set())], [scored("merge", {3})])
    shown = found.examples[0].prompt
    assert shown is not None
    assert len(shown) == 600
    assert shown.startswith("begins here")
    assert shown.endswith("ends with the question")
    assert json.loads((tmp_path / "out" / FLIPS).read_text())["prompt"] == long


def test_a_document_text_has_lm_evals_hash(task: EvalTask, tmp_path: Path) -> None:
    model = make_model(tmp_path / "m")
    samples = run_lm_eval_here(model.directory, [tmp_path / "letters.yaml"], tmp_path, limit=5)["letters"]
    texts = document_texts(task, {"letters": [sample["doc_id"] for sample in samples]})
    assert len(samples) == 5
    for sample in samples:
        text = texts["letters", sample["doc_id"]]
        assert text.doc_hash == sample["doc_hash"]
        assert text.prompt == sample["arguments"][0][0]


def test_removed_documents_have_no_text(task: EvalTask) -> None:
    assert list(document_texts(task, {"letters": [29, 30], "numbers": [0]})) == [("letters", 29)]


@pytest.fixture
def parents(tmp_path: Path) -> tuple[PinnedCheckpoint, ...]:
    """Save a base model and two parents that move it in opposite directions."""
    found = []
    for name, share in (("base", 0.0), ("a", 0.1), ("b", -0.1), ("merge", 0.05)):
        directory = tmp_path / name
        make_model(directory)
        generator = torch.Generator().manual_seed(3)
        weights = load_file(directory / "model.safetensors")
        moved = {
            key: tensor + share * torch.randn(tensor.shape, generator=generator) for key, tensor in weights.items()
        }
        save_file(moved, directory / "model.safetensors", metadata={"format": "pt"})
        digest = hashlib.sha256(name.encode()).hexdigest()
        names: dict[str, Any] = {"name": name, "ref": f"family/{name}", "is_base": name == "base"}
        found.append(PinnedCheckpoint(digest=digest, directory=directory, **names))
    return tuple(found)


def test_weights_are_explained_layer_by_layer(parents: tuple[PinnedCheckpoint, ...], tmp_path: Path) -> None:
    base, a, b, merge = parents
    (tmp_path / "out").mkdir()
    found = explain.work(tmp_path / "out", base, (a, b), merge)
    whole = found.interference.network_tally
    assert whole.cosine(0, 1) == pytest.approx(-1, abs=1e-6)
    assert whole.conflict == pytest.approx(1.0)
    assert found.summary() == "sign conflict 100 % · merge moved 0.50 times as far as any parent"
    assert found.summary_from("x", ("a", "b")).endswith("· merge moved 0.50 times as far from x as a")
    rows = pq.read_table(tmp_path / "out" / TABLE).to_pylist()
    assert [(row["layer"], row["kind"]) for row in rows] == [(s.layer, s.kind) for s in found.interference.spots]
    assert {row["layer"] for row in rows} == {None, 0, 1}
    assert all(row["merge_distance_1"] == pytest.approx(3 * row["merge_distance_0"], rel=1e-3) for row in rows)
    assert type(found).model_validate_json(found.model_dump_json()) == found


RECIPE: dict[str, Any] = {
    "merge_method": "task_arithmetic",
    "base_model": "family/base",
    "models": [{"model": f"family/{name}", "parameters": {"weight": 0.5}} for name in "ab"],
}


def verdict(outcome: str) -> GateVerdict:
    drop = {"drop": 10.0, "low": 2.0, "high": 18.0, "max_drop": 2, "lost": 3, "won": 0, "n": 30}
    scores = {"metric": METRIC, "reference": "a", "reference_score": 1.0, "merge_score": 0.9}
    guard = build(GuardVerdict, task="letters", outcome=outcome, reason="letters: lost", **scores, **drop)
    reasons = () if outcome == "pass" else (guard.reason,)
    return gate_verdict((guard,), None, reasons, outcome, overall=(10.0, 2.0, 18.0))


def explained(
    parents: tuple[PinnedCheckpoint, ...], task: EvalTask, scored: Scored, outcome: str = "fail"
) -> Explanation:
    *ancestors, merge = parents
    scores = {"a": [scored("a", set())], "merge": [scored("merge", {3, 4, 5})]}
    pinned = PinnedRecipe(load_recipe(RECIPE), tuple(ancestors))
    merged = Model(name="merge", digest=merge.digest, directory=merge.directory)
    return explain_merge(pinned, merged, RECIPE, verdict(outcome), scores, [task])


@pytest.mark.proof
@pytest.mark.usefixtures("prefect_api", "home")
def test_a_refused_merge_is_explained_by_weights_documents_and_remedies(
    parents: tuple[PinnedCheckpoint, ...], task: EvalTask, scored: Scored
) -> None:
    found = explained(parents, task, scored)
    assert (found.origin, found.origin_is_base, found.vectors) == ("base", True, ("a", "b"))
    assert found.interference is not None
    (letters,) = found.lost
    assert (letters.reference, [flip.doc_id for flip in letters.flips.examples]) == ("a", [3, 4, 5])
    assert found.remedies[0].change["merge_method"] == "ties"
    assert Explanation.model_validate_json(found.model_dump_json()) == found


@pytest.mark.story
@pytest.mark.usefixtures("prefect_api", "home")
def test_without_a_base_task_vectors_begin_at_the_first_parent(parents: tuple[PinnedCheckpoint, ...]) -> None:
    base, first, second, merge = parents
    merged = Model(name="merge", digest=merge.digest, directory=merge.directory)

    def vectors(*ancestors: PinnedCheckpoint) -> tuple[str, tuple[str, ...]]:
        pinned = PinnedRecipe(load_recipe(RECIPE), ancestors)
        found = explain_merge(pinned, merged, None, verdict("pass"), {}, [])
        return found.origin, found.vectors

    assert vectors(first, base, second) == ("base", ("a", "b"))
    plain = [parent.model_copy(update={"is_base": False}) for parent in (second, base, first)]
    assert vectors(*plain) == ("b", ("base", "a"))


@pytest.mark.usefixtures("prefect_api", "home")
def test_missing_explanations_never_stop_a_run(
    parents: tuple[PinnedCheckpoint, ...], task: EvalTask, scored: Scored, tmp_path: Path
) -> None:
    (tmp_path / "data" / "letters.jsonl").write_text("changed\n")
    (parents[1].directory / "model.safetensors").write_bytes(b"damaged")
    found = explained(parents, task, scored)
    assert (found.interference, found.lost, found.remedies) == (None, (), ())


@pytest.mark.usefixtures("prefect_api", "home")
def test_a_merge_that_passed_shows_weights_without_losses_or_remedies(
    parents: tuple[PinnedCheckpoint, ...], task: EvalTask, scored: Scored
) -> None:
    found = explained(parents, task, scored, "pass")
    assert found.interference is not None
    assert (found.lost, found.remedies) == ((), ())
