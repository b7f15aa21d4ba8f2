"""Compare metrics of rankings with pytrec_eval, and their chance levels with simulated rankings."""

from __future__ import annotations

import random
from collections.abc import Mapping

import numpy as np
import pytest
import pytrec_eval  # type: ignore[import-not-found, import-untyped, unused-ignore]
from samples import sampled_rows

from mergegate.tasks.quality.evaluation import form_of_metric
from mergegate.tasks.quality.evaluation.built_in.ranking import RankedQuery, find_relevant_texts, parse_metric

# Names in pytrec_eval. It has no mrr@k, which is the reciprocal rank if that is at least 1/k.
PYTREC = {"ndcg@3": "ndcg_cut_3", "ndcg@10": "ndcg_cut_10", "map@5": "map_cut_5", "recall@5": "recall_5"}
PYTREC |= {"recall@100": "recall_100", "hit_rate@3": "success_3", "accuracy": "success_1", "mrr": "recip_rank"}


def query_of(size: int, gains: Mapping[int, float], missing: int = 0) -> RankedQuery:
    texts = [f"text {at}" for at in range(size)]
    return RankedQuery({"query": "q"}, texts, gains, list(range(size)), [1.0] * missing)


def test_metrics_agree_with_pytrec_eval() -> None:
    rng = random.Random(1)
    evaluator_metrics = {"ndcg_cut.3,10", "map_cut.5", "recall.5,100", "success.1,3", "recip_rank"}
    for _ in range(150):
        size = rng.randint(1, 30)
        gains = {at: float(rng.choice([1, 1, 2, 3])) for at in rng.sample(range(size), rng.randint(1, size))}
        missing = rng.choice([0, 0, 2])
        scores = rng.sample(range(1000), size)
        judged = {f"d{at}": int(gain) for at, gain in gains.items()} | {f"lost{n}": 1 for n in range(missing)}
        run = {f"d{at}": float(score) for at, score in enumerate(scores)}
        expected = pytrec_eval.RelevanceEvaluator({"q": judged}, evaluator_metrics).evaluate({"q": run})["q"]
        query = query_of(size, gains, missing)
        found = find_relevant_texts(query, np.array(scores, dtype=float))
        for name, theirs in PYTREC.items():
            ours = parse_metric(name).measure(found, query.ideal)
            assert ours == pytest.approx(expected[theirs], abs=1e-9), (name, size, gains)
        reciprocal = expected["recip_rank"]
        assert parse_metric("mrr@4").measure(found, query.ideal) == (reciprocal if reciprocal >= 1 / 4 else 0)


SIZES = [(1, 1, 0), (5, 5, 0), (16, 1, 0), (20, 3, 0), (12, 4, 2)]


@pytest.mark.parametrize(("size", "right", "missing"), sampled_rows(SIZES, [SIZES[4]]))
def test_chance_levels_are_the_means_of_random_rankings(size: int, right: int, missing: int) -> None:
    gains = {at: 1.0 + at % 3 for at in range(right)}
    query, rng = query_of(size, gains, missing), np.random.default_rng(2)
    rankings = [find_relevant_texts(query, rng.permutation(size).astype(float)) for _ in range(1000)]
    for name in (*PYTREC, "mrr@4"):
        metric = parse_metric(name)
        simulated = np.array([metric.measure(found, query.ideal) for found in rankings])
        expected = metric.chance(query.size, list(gains.values()), query.ideal)
        assert expected == pytest.approx(simulated.mean(), abs=5 * simulated.std() / 30 + 1e-9), name


def test_ties_count_against_the_model_and_rounding_errors_do_not_break_them() -> None:
    """The score of a relevant text is larger than that of another one by less than float32 computes exactly."""
    query = query_of(4, {0: 1.0, 1: 2.0})
    assert find_relevant_texts(query, np.zeros(4)) == [(2, 1.0), (3, 2.0)]
    assert parse_metric("accuracy").measure(find_relevant_texts(query, np.array([0.5, 0, 0.5, 0])), query.ideal) == 0
    for scale in (1e-6, 1.0, 1e6):
        scores = scale * np.array([0.7 * (1 + 1e-8), 0.7, 0.1])
        assert find_relevant_texts(query_of(3, {0: 1.0}), scores) == [(1, 1.0)]
        assert find_relevant_texts(query_of(3, {0: 1.0}), scale * np.array([0.70001, 0.7, 0.1])) == [(0, 1.0)]


def test_an_excluded_text_is_not_ranked() -> None:
    query = RankedQuery({"query": "q"}, ["own", "right", "wrong"], {1: 1.0}, own_text=0)
    assert query.size == 2
    assert find_relevant_texts(query, np.array([0.9, 0.8, 0.1])) == [(0, 1.0)]


@pytest.mark.parametrize(
    ("form", "metrics"),
    [
        ("retrieval", ("ndcg@10", "mrr", "mrr@5", "map@100", "recall@3", "hit_rate@1", "accuracy")),
        ("transcription", ("wer", "cer")),
        ("text", ("acc", "acc_norm", "exact_match", "")),
    ],
)
def test_a_metric_shows_what_its_task_asks(form: str, metrics: tuple[str, ...]) -> None:
    assert {form_of_metric(metric) for metric in metrics} == {form}


@pytest.mark.parametrize("name", ["ndcg", "ndcg@0", "ndcg@1001", "precision@3", "mrr@", "", "accuracy@1"])
def test_an_unknown_metric_is_an_error(name: str) -> None:
    with pytest.raises(ValueError, match="is not a metric of rankings"):
        parse_metric(name)
    assert parse_metric("ndcg_at_10") == parse_metric("ndcg@10")  # the name in mteb
