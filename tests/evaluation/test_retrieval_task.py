"""Read the documents of a retrieval task, score embedding models and cross-encoders, and refuse mteb's tasks."""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import pytest
import tiny_kinds
import torch
from safetensors.torch import load_file, save_file
from samples import sampled
from scoring_runs import model_in, quiet, scoring_job

from mergegate.merge_core.errors import InvalidInput
from mergegate.merge_core.files import HashMemo
from mergegate.tasks.models.checkpoints import LoadedModel, load_model, unload_models
from mergegate.tasks.quality.evaluation import pin_built_in
from mergegate.tasks.quality.evaluation.built_in import MtebTask, RetrievalTask, ranking, retrieval
from mergegate.tasks.quality.evaluation.built_in.ranking import RankedQuery, score_texts
from mergegate.tasks.quality.evaluation.scoring.harness import score_documents

Loader: TypeAlias = Callable[..., LoadedModel]
GOOD = {"query": "w1 w2", "positives": ["w1"], "negatives": ["w3", "w4"]}


def task_on(directory: Path, lines: list[Any], corpus: list[Any] | None = None, **settings: Any) -> RetrievalTask:
    def write(name: str, rows: list[Any]) -> Path:
        directory.mkdir(exist_ok=True)
        path = directory / name
        path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
        return path

    data = write("queries.jsonl", lines)
    texts = None if corpus is None else write("corpus.jsonl", corpus)
    return RetrievalTask(kind="retrieval", data=data, corpus=texts, **settings).resolve(directory)


CORPUS = [{"id": name, "text": f"w{at}"} for at, name in enumerate("abcd")]


@pytest.mark.parametrize(
    ("lines", "corpus", "message"),
    [
        ([], None, "no line"),
        ([GOOD, "{"], None, "line 2: not JSON"),
        ([GOOD, "[]"], None, "line 2: list"),
        ([GOOD, {**GOOD, "query": 3}], None, "line 2: query: a number"),
        ([GOOD, {**GOOD, "query": " "}], None, "line 2: query: an empty text"),
        ([GOOD, {**GOOD, "positives": "w1"}], None, "line 2: positives: a text"),
        ([GOOD, {**GOOD, "positives": []}], None, "line 2: positives: an empty list"),
        ([GOOD, {**GOOD, "negatives": []}], None, "line 2: negatives: an empty list"),
        ([GOOD, {**GOOD, "negatives": ["w3", None]}], None, "line 2: negatives[1]: nothing"),
        ([GOOD, {**GOOD, "negatives": ["w3", ""]}], None, "line 2: negatives[1]: an empty text"),
        ([GOOD, {**GOOD, "negatives": ["w3", "w4", "w3"]}], None, "line 2: negatives[2]: the same as negatives[0]"),
        ([GOOD, {**GOOD, "negatives": ["w1"]}], None, "line 2: negatives[0]: the same as positives[0]"),
        ([GOOD, {"query": "w1", "positives": ["w1"]}], None, "line 2: negatives: missing"),
        ([GOOD, {"positives": ["w1"], "negatives": ["w2"]}], None, "line 2: query: missing"),
        ([GOOD, '{"query": "\\ud800", "positives": ["w1"], "negatives": ["w2"]}'], None, "line 2"),
        ([GOOD, {**GOOD, "query": "w" * (17 << 20)}], None, "line 2: over 16777216 bytes"),
        ([{"query": "w1", "positives": ["z"]}], CORPUS, "line 1: positives: 'z'"),
        ([{"query": "w1", "positives": ["a"], "negatives": ["z"]}], CORPUS, "line 1: negatives: 'z'"),
        ([{"query": "w1", "positives": list("abcd")}], CORPUS, "line 1: positives: all 4 texts"),
        ([{"query": "w1", "positives": ["a"]}], [*CORPUS, CORPUS[0]], "corpus.jsonl: line 5: id: 'a'"),
        ([{"query": "w1", "positives": ["a"]}], [{"id": 1, "text": "w"}], "corpus.jsonl: line 1: id: a number"),
        ([{"query": "w1", "positives": ["a"]}], [{"id": "a"}], "corpus.jsonl: line 1: text: missing"),
    ],
    ids=lambda value: str(value)[:80],
)
def test_a_damaged_file_is_an_error_that_names_line_and_field(
    lines: list[Any], corpus: list[Any] | None, message: str, tmp_path: Path
) -> None:
    with pytest.raises(InvalidInput) as raised:
        task_on(tmp_path, lines, corpus).documents()
    assert message in str(raised.value)
    assert str(tmp_path / ("corpus.jsonl" if "corpus" in message else "queries.jsonl")) in str(raised.value)


def test_a_changed_text_of_the_corpus_changes_the_task_and_its_documents(tmp_path: Path) -> None:
    line = {"query": "w1", "positives": ["a"]}
    first, other = (task_on(tmp_path / text, [line], [*CORPUS[:3], {"id": "d", "text": text}]) for text in ("w9", "w8"))
    assert first.documents() != other.documents()
    hashes = HashMemo(tmp_path / "hashes")
    assert pin_built_in(first, tmp_path, hashes).digest != pin_built_in(other, tmp_path, hashes).digest


def rows(count: int, seed: int = 1) -> list[dict[str, Any]]:
    """Return queries whose positive shares half of their words. Texts have different lengths."""
    rng = random.Random(seed)
    lines = []
    for _ in range(count):
        query = rng.sample(tiny_kinds.WORDS, 6)
        negatives = {" ".join(rng.sample(tiny_kinds.WORDS, rng.randint(1, 20))) for _ in range(9)}
        positive = " ".join(query[2:])
        lines.append({"query": " ".join(query), "positives": [positive], "negatives": sorted(negatives - {positive})})
    return lines


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Loader]:
    root = tmp_path_factory.mktemp("models")

    def load(kind: str, dtype: str = "auto") -> LoadedModel:
        directory = root / kind
        if not directory.is_dir():
            tiny_kinds.write(kind, directory)
        with load_model(model_in(directory, kind), dtype=dtype, device="cpu") as model:
            return model

    yield load
    unload_models()


def scores_of(task: RetrievalTask, model: LoadedModel, batch_size: int = 16) -> list[Mapping[str, float]]:
    return [result.scores for result in task.score(model, task.documents(), batch_size, quiet)]


def texts_scored(model: LoadedModel, task: RetrievalTask, batch_size: int = 16) -> list[np.ndarray[Any, Any]]:
    queries = [query for query in task.documents() if isinstance(query, RankedQuery)]
    return list(score_texts(model, queries, batch_size, quiet))


@pytest.mark.story
@pytest.mark.parametrize("kind", ["bert embedding", "modernbert embedding", "qwen3 embedding", "sparse encoder"])
def test_scores_of_texts_are_those_of_sentence_transformers(kind: str, loaded: Loader, tmp_path: Path) -> None:
    model = loaded(kind)
    for line, row in zip(rows(40), texts_scored(model, task_on(tmp_path, rows(40))), strict=True):
        texts = [*line["positives"], *line["negatives"]]
        queries, documents = model.network.encode_query([line["query"]]), model.network.encode_document(texts)
        expected = model.network.similarity(queries, documents)
        expected = expected.to_dense() if expected.is_sparse else expected
        np.testing.assert_allclose(row, expected[0].numpy(), rtol=1e-6, atol=2e-6)


KINDS = ("cross-encoder", "older cross-encoder", "reranker without modules")


@pytest.mark.parametrize("kind", sampled(KINDS, ["cross-encoder"]))
def test_scores_of_pairs_are_those_of_sentence_transformers_before_the_activation(
    kind: str, loaded: Loader, tmp_path: Path
) -> None:
    model = loaded(kind)
    for line, row in zip(rows(5), texts_scored(model, task_on(tmp_path, rows(5))), strict=True):
        pairs = [(line["query"], text) for text in (*line["positives"], *line["negatives"])]
        np.testing.assert_allclose(row, model.network.predict(pairs, activation_fn=torch.nn.Identity()), atol=2e-6)


@pytest.mark.proof
@pytest.mark.parametrize("kind", ["bert embedding", "qwen3 embedding", "sparse encoder", "cross-encoder"])
def test_the_batch_size_does_not_change_scores(
    kind: str, loaded: Loader, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ranking, "_BATCHES", 2)
    model, task = loaded(kind), task_on(tmp_path, rows(12))
    alone, many = (np.concatenate(texts_scored(model, task, batch_size)) for batch_size in (1, 64))
    np.testing.assert_allclose(alone, many, rtol=0, atol=2e-6 * np.abs(many).max())
    assert scores_of(task, model, 1) == scores_of(task, model, 64)


def test_a_corpus_gives_the_scores_of_the_same_texts_as_candidates(loaded: Loader, tmp_path: Path) -> None:
    model, lines = loaded("qwen3 embedding"), rows(6)
    texts = sorted({text for line in lines for text in (*line["positives"], *line["negatives"])})
    names = {text: f"d{at}" for at, text in enumerate(texts)}
    corpus = [{"id": name, "text": text} for text, name in names.items()]
    positives = [{**line, "positives": [names[text] for text in line["positives"]]} for line in lines]
    whole = [{"query": line["query"], "positives": line["positives"]} for line in positives]
    listed = [{**line, "negatives": [names[text] for text in line["negatives"]]} for line in positives]
    pools = [{**line, "negatives": [text for text in texts if text not in line["positives"]]} for line in lines]
    in_texts, by_ids = task_on(tmp_path / "texts", lines), task_on(tmp_path / "ids", listed, corpus)
    assert scores_of(by_ids, model) == scores_of(in_texts, model)
    in_corpus, in_pools = task_on(tmp_path / "whole", whole, corpus), task_on(tmp_path / "pools", pools)
    assert scores_of(in_corpus, model) == scores_of(in_pools, model)
    assert in_corpus.chance_of(in_corpus.documents()[0]) == in_pools.chance_of(in_pools.documents()[0])


def test_a_corpus_is_read_once_for_several_samples(loaded: Loader, tmp_path: Path) -> None:
    model = loaded("bert embedding")
    corpus = [{"id": f"d{at}", "text": f"w{at} w{at % 7}"} for at in range(20)]
    lines = [{"query": f"w{at}", "positives": [f"d{at}"]} for at in range(15)]
    task = task_on(tmp_path, lines, corpus)
    documents, calls = task.documents(), list[tuple[int, int]]()
    results = [
        result.scores
        for part in (documents[:5], documents[5:])
        for result in task.score(model, part, 8, lambda *call: calls.append(call))
    ]
    assert results == scores_of(task, model)
    assert {total for _, total in calls} == {25, 10}


def test_progress_counts_each_text_once(loaded: Loader, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranking, "_BATCHES", 2)
    task, calls = task_on(tmp_path, rows(10)), list[tuple[int, int]]()
    list(task.score(loaded("bert embedding"), task.documents(), 4, lambda *call: calls.append(call)))
    texts = {text for line in rows(10) for text in (*line["positives"], *line["negatives"])}
    assert calls[-1] == (10 + len(texts), 10 + len(texts))
    assert calls == sorted(calls)
    assert len(calls) > 3


def test_embeddings_that_are_not_finite_are_an_error_that_names_the_text(loaded: Loader, tmp_path: Path) -> None:
    for kind in ("bert embedding", "cross-encoder"):
        model = loaded(kind)
        weights = model.network.transformers_model.get_input_embeddings().weight
        row = model.tokenizer.convert_tokens_to_ids("w7")
        before = weights[row].clone()
        try:
            with torch.no_grad():
                weights[row] = float("nan")
            with pytest.raises(InvalidInput, match="NaN or infinity") as raised:
                scores_of(task_on(tmp_path, [{**GOOD, "negatives": ["w3", "w7 w8"]}]), model)
            assert "w" in raised.value.where
        finally:
            with torch.no_grad():
                weights[row] = before


def test_scores_have_the_level_of_chance_and_errors_name_the_model(tmp_path: Path) -> None:
    directory = tiny_kinds.write("bert embedding", tmp_path / "model")
    task = pin_built_in(task_on(tmp_path, rows(8)), tmp_path, HashMemo(tmp_path / "hashes"))
    job = scoring_job(model_in(directory, "merge"), task, (0, 8))
    accuracy = [row for row in score_documents(job, quiet) if row.metric == "accuracy,none"]
    assert [row.chance for row in accuracy] == [pytest.approx(1 / (1 + len(line["negatives"]))) for line in rows(8)]
    tensors = load_file(directory / "model.safetensors")
    tensors["embeddings.word_embeddings.weight"][:] = float("nan")
    save_file(tensors, directory / "model.safetensors", {"format": "pt"})
    broken = replace(job, model=job.model.model_copy(update={"digest": "d2"}))
    with pytest.raises(InvalidInput, match="merge: task queries: text"):
        score_documents(broken, quiet)


def test_a_cross_encoder_does_not_read_a_whole_corpus_for_a_query(loaded: Loader, tmp_path: Path) -> None:
    corpus = [{"id": f"d{at}", "text": f"w{at}"} for at in range(1001)]
    task = task_on(tmp_path, [{"query": "w1", "positives": ["d1"]}], corpus)
    with pytest.raises(InvalidInput, match="1001 texts to rank"):
        scores_of(task, loaded("cross-encoder"))


def test_the_prompts_of_the_model_precede_queries_and_texts(
    loaded: Loader, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, task = loaded("qwen3 embedding"), task_on(tmp_path, rows(10))
    before = np.concatenate(texts_scored(model, task))
    monkeypatch.setattr(model.network, "prompts", {"query": "", "document": ""})
    assert np.abs(np.concatenate(texts_scored(model, task)) - before).max() > 0.01


def mteb_task(name: str, **settings: str) -> MtebTask:
    return MtebTask.model_validate({"kind": "mteb", "name": name, **settings}).resolve(Path.cwd())


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("STS12", "Spearman correlation"), ("ArxivClusteringP2P", "v-measure"),
        ("Banking77Classification", "classifiers that are trained"), ("SprintDuplicateQuestions", "average precision"),
        ("SummEval", "Spearman correlation"), ("BUCC", "F1 score"), ("scifact", "did you mean 'SciFact'?"),
    ],
)  # fmt: skip
def test_a_task_of_mteb_that_is_not_a_mean_over_queries_is_refused_with_the_reason(name: str, message: str) -> None:
    with pytest.raises(InvalidInput) as raised:
        mteb_task(name)
    assert message in str(raised.value)


@pytest.mark.parametrize("name", ["SciFact", "AskUbuntuDupQuestions", "LexRetrieval.v1"])
def test_retrieval_and_reranking_tasks_of_mteb_are_accepted_without_importing_it(name: str) -> None:
    imported = "mteb" in sys.modules
    assert mteb_task(name, metric="ndcg_at_10").judged_by == "ndcg@10"
    assert ("mteb" in sys.modules) == imported


def test_a_missing_package_is_an_error_that_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retrieval.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(InvalidInput) as raised:
        mteb_task("SciFact")
    assert "mergegate[embeddings]" in raised.value.remedy
