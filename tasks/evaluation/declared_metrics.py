"""The metrics that a task's configuration lists, and what lm-eval gets of each document for each of them.

lm-eval's own metrics belong to output types: a choice task has no BLEU, whatever it lists. Some hand on what was asked
and answered, to be scored together at the end (F1, Matthews' correlation, BLEU): of those there is no mean, and lm-eval
fails where a task asks for one. What a function of the task returns is known when it is called, and not before.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import lru_cache
from typing import Any

from mergegate.tasks.checkpoints import import_lean
from mergegate.tasks.evaluation.task_file import Function

_DEFAULTS = {  # lm-eval's, where a task lists none
    "multiple_choice": ("acc", "acc_norm"),
    "loglikelihood": ("perplexity", "acc"),
    "generate_until": ("exact_match",),
}
# What lm-eval computes of a document itself, by output type: as numbers, and as pairs for the end.
_NUMBERS = {
    "multiple_choice": ("acc", "acc_norm", "acc_bytes", "acc_mutual_info", "exact_match"),
    "loglikelihood": ("acc", "perplexity"),
    "generate_until": ("exact_match",),
}
_PAIRS = {"multiple_choice": ("f1", "mcc", "brier_score", "likelihood")}


class _OfADocument(Enum):
    NUMBER = 1
    PAIR = 2
    NOTHING = 3


@dataclass(frozen=True)
class DeclaredMetric:
    """A metric of a task, from its configuration alone."""

    name: str
    is_mean: bool  # of numbers by document, with a direction
    averages_pairs: bool  # it is to be the mean of what is no number


def declared_metrics(config: Mapping[str, Any], kind: str) -> tuple[DeclaredMetric, ...] | None:
    """The metrics that a task lists, or lm-eval's own where it lists none; None where they cannot be read.

    Args:
        config: As its YAML says it, functions as text.
        kind: Its output type.
    """
    entries = config.get("metric_list")
    if entries is None:
        entries = [{"metric": name} for name in _DEFAULTS.get(kind, ())]
    if not isinstance(entries, Sequence) or not all(isinstance(one, Mapping) and one.get("metric") for one in entries):
        return None
    return tuple(_declared(entry, config, kind) for entry in entries)


def _declared(entry: Mapping[str, Any], config: Mapping[str, Any], kind: str) -> DeclaredMetric:
    said, stated = entry["metric"], entry.get("aggregation")
    # Of the library `evaluate`, or a function: none of lm-eval's own, whatever it is called.
    is_foreign = entry.get("hf_evaluate") is True or isinstance(said, Function) or "/" in str(said)
    own_mean, own_direction = (None, False) if is_foreign else _registered(str(said))
    # A function is judged by its name, as when it is loaded; numpy's mean is one.
    mean = bool(own_mean) if stated is None else str(stated).rpartition(".")[2] == "mean"
    directed = own_direction or entry.get("higher_is_better") is not None
    gives = _OfADocument.NUMBER if config.get("process_results") else _given(str(said), kind, is_foreign)
    # Perplexity of an answer is a number of each document, which is not what it is the mean of.
    is_own_sum = own_mean is False and not config.get("process_results")
    return DeclaredMetric(
        name=str(said).rpartition(".")[2] or str(said),
        is_mean=mean and directed and gives is _OfADocument.NUMBER and not is_own_sum,
        averages_pairs=mean and gives is _OfADocument.PAIR,
    )


def _given(metric: str, kind: str, is_foreign: bool) -> _OfADocument:
    """What lm-eval has of a document for ``metric``, where the task has no function for its results."""
    if kind not in _NUMBERS:
        return _OfADocument.NUMBER  # which is for lm-eval to say
    if kind == "generate_until":  # one that lm-eval does not have comes from the library `evaluate`
        is_pair = not is_foreign and _is_known(metric) and metric not in _NUMBERS[kind]
        return _OfADocument.PAIR if is_pair else _OfADocument.NUMBER
    if metric in _NUMBERS[kind]:
        return _OfADocument.NUMBER
    return _OfADocument.PAIR if metric in _PAIRS.get(kind, ()) else _OfADocument.NOTHING


def _is_known(metric: str) -> bool:
    import_lean("portalocker", "lm_eval.api.metrics")  # fills the registries
    from lm_eval.api.registry import METRIC_REGISTRY

    return metric in METRIC_REGISTRY


def is_registered_mean(metric: str) -> bool | None:
    """Return whether lm-eval averages ``metric`` over documents where a task does not say; None if it has no such
    metric."""
    return _registered(metric)[0]


@lru_cache(maxsize=256)
def _registered(metric: str) -> tuple[bool | None, bool]:
    """Of a metric of lm-eval's own: whether it is averaged over documents (None: unknown), and has a direction."""
    from lm_eval.api.registry import get_metric_aggregation, is_higher_better

    if not _is_known(metric):  # lm-eval would warn of it
        return None, False
    aggregation = get_metric_aggregation(metric)
    return getattr(aggregation, "__name__", "") == "mean", is_higher_better(metric) is not None
