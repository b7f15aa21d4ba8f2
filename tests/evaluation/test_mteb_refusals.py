"""Refuse mteb's tasks whose score is not a mean over queries, without importing mteb."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from mergegate.merge_core.errors import InvalidInput
from mergegate.tasks.evaluation.built_in import MtebTask, retrieval


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("STS12", "Spearman correlation"),
        ("ArxivClusteringP2P", "v-measure"),
        ("Banking77Classification", "classifiers that are trained"),
        ("SprintDuplicateQuestions", "average precision"),
        ("SummEval", "Spearman correlation"),
        ("BUCC", "F1 score"),
        ("scifact", "did you mean 'SciFact'?"),
    ],
)
def test_a_task_that_is_not_a_mean_over_queries_is_refused_with_the_reason(name: str, message: str) -> None:
    with pytest.raises(InvalidInput) as raised:
        MtebTask.model_validate({"kind": "mteb", "name": name}).resolve(Path.cwd())
    assert message in str(raised.value)


@pytest.mark.parametrize("name", ["SciFact", "AskUbuntuDupQuestions", "LexRetrieval.v1"])
def test_retrieval_and_reranking_tasks_are_accepted(name: str) -> None:
    task = MtebTask.model_validate({"kind": "mteb", "name": name, "metric": "ndcg_at_10"})
    assert task.resolve(Path.cwd()).judged_by == "ndcg@10"


def test_a_missing_package_is_an_error_that_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retrieval.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(InvalidInput) as raised:
        MtebTask.model_validate({"kind": "mteb", "name": "SciFact"}).resolve(Path.cwd())
    assert "mergegate[embeddings]" in raised.value.remedy


def test_the_settings_of_a_task_do_not_import_mteb() -> None:
    imported = "mteb" in sys.modules
    MtebTask.model_validate({"kind": "mteb", "name": "SciFact"}).resolve(Path.cwd())
    assert ("mteb" in sys.modules) == imported
