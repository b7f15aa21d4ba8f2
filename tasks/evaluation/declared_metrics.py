"""Determine the metrics that a task's configuration declares, and what lm-eval computes per document for each of them.

lm-eval's own metrics are tied to output types: a choice task has no BLEU, even if it declares BLEU. Some metrics (F1,
Matthews correlation, BLEU) collect pairs of reference and prediction and score them together at the end. Pairs have
no mean, and lm-eval fails if a task requests one. The configuration does not reveal which metrics the task's own
functions return.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from mergegate.tasks.checkpoints import import_lean
from mergegate.tasks.evaluation.task_file import Function

_DEFAULTS = {  # lm-eval's defaults for a task that lists no metrics
    "multiple_choice": ("acc", "acc_norm"),
    "loglikelihood": ("perplexity", "acc"),
    "generate_until": ("exact_match",),
}
# Values that lm-eval itself computes for a document, by output type: numbers, or pairs that are scored at the end.
_NUMBERS = {
    "multiple_choice": ("acc", "acc_norm", "acc_bytes", "acc_mutual_info", "exact_match"),
    "loglikelihood": ("acc", "perplexity"),
    "generate_until": ("exact_match",),
}
_PAIRS = {"multiple_choice": ("f1", "mcc", "brier_score", "likelihood")}


@dataclass(frozen=True)
class DeclaredMetric:
    """A metric of a task, as far as the configuration describes it."""

    name: str
    is_mean: bool  # a mean of per-document numbers, with a direction
    averages_pairs: bool  # declared as a mean of pairs, which lm-eval cannot compute


def declared_metrics(config: Mapping[str, Any], kind: str) -> tuple[DeclaredMetric, ...] | None:
    """Return the metrics that a task declares, or lm-eval's defaults; None if the list is malformed.

    ``config`` is the configuration in the task's YAML file, with functions as text. ``kind`` is the output type.
    """
    entries = config.get("metric_list")
    if entries is None:
        entries = [{"metric": name} for name in _DEFAULTS.get(kind, ())]
    if not isinstance(entries, Sequence) or not all(
        isinstance(entry, Mapping) and entry.get("metric") for entry in entries
    ):
        return None
    metrics = []
    for entry in entries:
        metric, aggregation = entry["metric"], entry.get("aggregation")
        # A metric of the library `evaluate`, or a function, is never lm-eval's own, even if the names are equal.
        is_foreign = entry.get("hf_evaluate") is True or isinstance(metric, Function) or "/" in str(metric)
        own_mean, own_direction = (None, False) if is_foreign else registered_metric(str(metric))
        # A function is judged by its name, as lm-eval does when it loads the task; numpy's mean counts.
        mean = bool(own_mean) if aggregation is None else str(aggregation).rpartition(".")[2] == "mean"
        has_direction = own_direction or entry.get("higher_is_better") is not None
        has_own_function = bool(config.get("process_results"))
        if has_own_function or kind not in _NUMBERS:  # lm-eval reports an unknown output type itself
            is_number, is_pair = True, False
        elif kind == "generate_until":  # a metric that lm-eval lacks comes from the library `evaluate`
            is_pair = not is_foreign and _is_in_registry(str(metric)) and metric not in _NUMBERS[kind]
            is_number = not is_pair
        else:
            is_number = metric in _NUMBERS[kind]
            is_pair = not is_number and metric in _PAIRS.get(kind, ())
        # The perplexity of an answer is a number per document, but lm-eval's score is not the mean of these numbers.
        is_own_sum = own_mean is False and not has_own_function
        metrics.append(
            DeclaredMetric(
                name=str(metric).rpartition(".")[2] or str(metric),
                is_mean=mean and has_direction and is_number and not is_own_sum,
                averages_pairs=mean and is_pair,
            )
        )
    return tuple(metrics)


@lru_cache(maxsize=256)
def registered_metric(metric: str) -> tuple[bool | None, bool]:
    """Return whether lm-eval averages a metric over documents (None: unknown metric) and whether it has a direction."""
    from lm_eval.api.registry import get_metric_aggregation, is_higher_better

    if not _is_in_registry(metric):  # lm-eval would log a warning
        return None, False
    aggregation = get_metric_aggregation(metric)
    return getattr(aggregation, "__name__", "") == "mean", is_higher_better(metric) is not None


def _is_in_registry(metric: str) -> bool:
    import_lean("portalocker", "lm_eval.api.metrics")  # fills the registries
    from lm_eval.api.registry import METRIC_REGISTRY

    return metric in METRIC_REGISTRY
