"""Test the scores for the Hub's leaderboards: only complete, registered benchmarks, readable by the Hub's library."""

from __future__ import annotations

from pathlib import Path

import huggingface_hub
import pytest
import yaml
from release_samples import content, share

from mergegate.tasks.evaluation.settings import Scoring
from mergegate.tasks.evaluation.task_data import DataSource, TaskData
from mergegate.tasks.publish.eval_results import BENCHMARKS, eval_results
from mergegate.tasks.publish.targets.directory import DirectoryTarget
from mergegate.tasks.publish.targets.hub import HubTarget


def test_a_whole_benchmark_is_read_by_the_hubs_library_as_it_was_measured() -> None:
    scores = (share("gsm8k", 700, 1319, "exact_match,flexible-extract"), share("arc_easy", 300, 400))
    files = eval_results(content(scores, scoring=Scoring(num_fewshot=5, chat_template=True, dtype="bfloat16")))
    assert list(files) == [".eval_results/gsm8k.yaml"]
    (entry,) = huggingface_hub.parse_eval_result_entries(yaml.safe_load(files[".eval_results/gsm8k.yaml"]))
    assert (entry.dataset_id, entry.task_id, entry.value) == ("openai/gsm8k", "gsm8k", 53.07)
    for word in ("lm-eval 0.4.13", "5-shot", "with chat template", "bfloat16", "1319 documents", "standard error 1.37"):
        assert word in str(entry.notes)


@pytest.mark.parametrize("version", [None, "2.1"])
def test_on_the_hub_an_entry_names_its_dataset_revision_and_its_evidence(version: str | None) -> None:
    said = content((share("gsm8k", 700, 1319, "exact_match,flexible-extract"),))
    sources = (DataSource(path="openai/gsm8k", name="main", revision="5" * 40),)
    *others, merge = said.models
    assert merge.scores
    scores = merge.scores.model_copy(update={"data": {"gsm8k": TaskData(digest="d" * 64, sources=sources)}})
    said = said.model_copy(update={"models": (*others, merge.model_copy(update={"scores": scores}))})
    target = HubTarget(to="hub", repo="acme/demo", version=version)
    (data,) = map(yaml.safe_load, eval_results(said, target).values())
    (entry,) = huggingface_hub.parse_eval_result_entries(data)
    assert entry.dataset_revision == "5" * 40
    assert entry.source_url == f"https://huggingface.co/acme/demo/tree/{version or 'main'}/evidence"
    assert entry.source_name
    # Only the Hub can verify an evaluation, and a release has no dates.
    assert (entry.verify_token, entry.date) == (None, None)
    assert data == huggingface_hub.eval_result_entries_to_yaml([entry])
    (elsewhere,) = eval_results(said, DirectoryTarget(path=Path("releases"))).values()
    assert "source" not in yaml.safe_load(elsewhere)[0]


@pytest.mark.parametrize(
    "score",
    [
        share("gsm8k", 70, 132, "exact_match,flexible-extract"),
        share("gsm8k", 700, 1319, "exact_match,strict-match"),
        share("arc_easy", 300, 400),
    ],
    ids=["a sample", "another metric", "not registered"],
)
def test_incomparable_scores_are_not_written_for_a_leaderboard(score) -> None:
    assert eval_results(content((score,))) == {}


def test_without_scores_no_file_is_written() -> None:
    assert eval_results(content()) == {}


def test_the_first_of_two_variants_of_a_benchmark_counts() -> None:
    scores = (
        share("gpqa_diamond_cot_zeroshot", 60, 198, "exact_match,flexible-extract"),
        share("gpqa_diamond_cot_n_shot", 80, 198, "exact_match,flexible-extract"),
    )
    (text,) = eval_results(content(scores)).values()
    assert yaml.safe_load(text)[0]["value"] == 30.3


def test_every_benchmark_is_an_id_and_a_metric_with_a_filter() -> None:
    for benchmark in BENCHMARKS.values():
        assert benchmark.dataset.count("/") == 1
        assert benchmark.metric.count(",") == 1
        assert benchmark.documents > 0
