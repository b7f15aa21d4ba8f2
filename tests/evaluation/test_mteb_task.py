"""Compare scores of mteb's retrieval and reranking tasks with those that mteb itself computes, without network."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest
import tiny_kinds

from mergegate.merge_core.errors import InvalidInput
from mergegate.tasks.models.checkpoints import Model, load_model, unload_models
from mergegate.tasks.quality.evaluation import EvalTask
from mergegate.tasks.quality.evaluation.built_in import MtebTask, mteb_task
from mergegate.tasks.quality.evaluation.scoring.loading import load_task

pytestmark = pytest.mark.story  # Importing mteb takes 10 to 30 seconds.


@pytest.fixture(scope="module", autouse=True)
def registered() -> Iterator[None]:
    """Add local tasks to mteb, with data like that of its own tasks."""
    from datasets import Dataset  # type: ignore[import-untyped]
    from mteb.abstasks.retrieval import AbsTaskRetrieval
    from mteb.abstasks.task_metadata import TaskMetadata
    from mteb.get_tasks import _TASKS_REGISTRY

    def metadata_of(name: str, kind: str) -> Any:
        empty = ("reference", "date", "domains", "task_subtypes", "license", "annotations_creators", "dialect")
        return TaskMetadata(
            **dict.fromkeys((*empty, "sample_creation", "bibtex_citation")), name=name, description="local",
            dataset={"path": "local/data", "revision": "1"}, type=kind, category="t2t", modalities=["text"],
            eval_splits=["test"], eval_langs=["eng-Latn"], main_score="ndcg_at_10",
        )  # fmt: skip

    class Local(AbsTaskRetrieval):  # type: ignore[misc]
        is_reranking: ClassVar[bool] = False
        is_instructed: ClassVar[bool] = False

        def load_data(self, *_: Any, **__: Any) -> None:
            rng = random.Random(3)
            texts = {" ".join(rng.sample(tiny_kinds.WORDS, rng.randint(2, 12))) for _ in range(120)}
            corpus = [
                {"id": f"d{at}", "text": text, "title": "w1 w2" if at % 3 == 0 else ""}
                for at, text in enumerate(sorted(texts))
            ]
            queries = [{"id": f"q{at}", "text": " ".join(rng.sample(tiny_kinds.WORDS, 5))} for at in range(30)]
            queries.append({"id": "d5", "text": corpus[5]["text"]})
            names = [str(entry["id"]) for entry in corpus]
            judged = {
                str(query["id"]): {name: rng.choice([0, 1, 2]) for name in rng.sample(names, 6)}
                for query in queries[2:]
            }
            judged["d5"] = {"d5": 1, "d6": 1}
            if self.is_instructed:
                queries = [{**query, "instruction": "w30 w31"} for query in queries]
            ranked = {str(query["id"]): rng.sample(names, 40) for query in queries} if self.is_reranking else None
            data = {"corpus": Dataset.from_list(corpus), "queries": Dataset.from_list(queries)}
            self.dataset = {"default": {"test": {**data, "relevant_docs": judged, "top_ranked": ranked}}}
            self.data_loaded = True

    def local(name: str, kind: str = "Retrieval", **attributes: bool) -> type[Local]:
        return type(name, (Local,), {"metadata": metadata_of(name, kind), **attributes})

    added = (
        local("LocalRetrieval"),
        local("LocalIgnoring", ignore_identical_ids=True),
        local("LocalReranking", "Reranking", is_reranking=True),
        local("LocalInstructed", "InstructionRetrieval", is_instructed=True),
        local("LocalClasses", "STS"),
        local("LocalSkipping", skip_first_result=True),
    )
    for task in added:
        _TASKS_REGISTRY[task.metadata.name] = task
    yield
    for task in added:
        del _TASKS_REGISTRY[task.metadata.name]
    unload_models()


@pytest.mark.parametrize(
    ("kind", "name", "prompts"),
    [
        ("bert embedding", "LocalRetrieval", {}),
        pytest.param("qwen3 embedding", "LocalRetrieval", {}, marks=pytest.mark.proof),
        ("qwen3 embedding", "LocalRetrieval", {"Retrieval-query": "w5 ", "Retrieval": "w7 ", "query": "w6 "}),
        pytest.param("bert embedding", "LocalIgnoring", {}, marks=pytest.mark.proof),
        pytest.param("qwen3 embedding", "LocalReranking", {}, marks=pytest.mark.proof),
        ("bert embedding", "LocalInstructed", {}),
        pytest.param("sparse encoder", "LocalRetrieval", {}, marks=pytest.mark.proof),
        ("cross-encoder", "LocalReranking", {}),
    ],
)
def test_scores_agree_with_mteb(kind: str, name: str, prompts: dict[str, str], tmp_path: Path) -> None:
    import mteb

    directory = tiny_kinds.write(kind, tmp_path / "model")
    task = MtebTask.model_validate({"kind": "mteb", "name": name, "metric": "ndcg@10"})
    names = ("ndcg@10", "mrr", "map@10", "recall@20", "hit_rate@5")
    with load_model(Model(name="m", digest=kind, directory=directory), dtype="auto", device="cpu") as model:
        if prompts:
            model.network.prompts = prompts
        results = mteb.evaluate(
            model.network, [mteb.get_task(name)], cache=None, show_progress_bar=False, encode_kwargs={"batch_size": 8}
        )
        documents = task.documents()
        for metric in names:
            judged = task.model_copy(update={"metric": metric})
            scores = [each.scores[metric] for each in judged.score(model, documents, 16, lambda *_: None)]
            theirs = results.task_results[0].scores["test"][0]
            expected = theirs["mrr_at_1000" if metric == "mrr" else metric.replace("@", "_at_")]
            # mteb rounds its means to five digits.
            assert sum(scores) / len(scores) == pytest.approx(expected, abs=6e-6), metric
        unload_models()


def test_documents_and_sources_are_pinned() -> None:
    task = MtebTask.model_validate({"kind": "mteb", "name": "LocalRetrieval"})
    loaded = load_task(EvalTask(name="LocalRetrieval", digest="0", definition=None, built_in=task))
    assert [source.path for source in loaded.sources] == ["local/data"]
    assert loaded.sizes == {"LocalRetrieval": 29}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"name": "SciFactt"}, "did you mean 'SciFact'?"),
        ({"name": "LocalClasses"}, "the Spearman correlation over all pairs of texts"),
        ({"name": "LocalSkipping"}, "ignores the first text"),
        ({"name": "LocalRetrieval", "split": "dev"}, "split: 'dev'"),
        ({"name": "LocalRetrieval", "subset": "de"}, "subset: 'de'"),
        ({"name": "MIRACLRetrieval", "split": "dev"}, "subset: missing"),
        ({"name": "WebQAT2ITRetrieval"}, "texts"),
    ],
    ids=str,
)
def test_a_task_that_mergegate_cannot_use_is_an_error_when_it_is_loaded(settings: Any, message: str) -> None:
    with pytest.raises(InvalidInput) as raised:
        MtebTask.model_validate({"kind": "mteb", **settings}).documents()
    assert message in str(raised.value)


def test_the_types_of_tasks_are_known_without_importing_mteb() -> None:
    from mteb.get_tasks import _TASKS_REGISTRY

    types = mteb_task.known_types()
    wrong = {
        name: types[name]
        for name, task in _TASKS_REGISTRY.items()
        if name in types and (types[name] in mteb_task.TYPES) != (task.metadata.type in mteb_task.TYPES)
    }
    assert wrong == {}
    assert len(types.keys() & _TASKS_REGISTRY.keys()) > 0.98 * len(_TASKS_REGISTRY)
