"""Test the scores for the Hub's leaderboards: only complete, registered benchmarks, readable by the Hub's library."""

from __future__ import annotations

import huggingface_hub
import pytest
import yaml
from release_samples import content, share

from mergegate.tasks.evaluation.settings import Scoring
from mergegate.tasks.publish.eval_results import BENCHMARKS, eval_results


def test_a_whole_benchmark_is_read_by_the_hubs_library_as_it_was_measured() -> None:
    scores = (share("gsm8k", 700, 1319, "exact_match,flexible-extract"), share("arc_easy", 300, 400))
    files = eval_results(content(scores, scoring=Scoring(num_fewshot=5, chat_template=True, dtype="bfloat16")))
    assert list(files) == [".eval_results/gsm8k.yaml"]
    (entry,) = huggingface_hub.parse_eval_result_entries(yaml.safe_load(files[".eval_results/gsm8k.yaml"]))
    assert (entry.dataset_id, entry.task_id, entry.value) == ("openai/gsm8k", "gsm8k", 53.07)
    for word in ("lm-eval 0.4.13", "5-shot", "with chat template", "bfloat16", "1319 documents", "standard error 1.37"):
        assert word in str(entry.notes)


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
