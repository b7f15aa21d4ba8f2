"""The gate: from paired evidence to a verdict. Guards, drift, statistics, looks; pure decisions."""

from tasks.gate.bounded import graded_difference, graded_documents_needed
from tasks.gate.drift import DriftVerdict
from tasks.gate.guards import CHAMPION, MARGIN_ABOVE_MAX_DROP, GateRule, Guard
from tasks.gate.references import check_guards, needs_champion, reference_models
from tasks.gate.regression import GuardVerdict, decide_guard
from tasks.gate.settings import EvaluateSettings, pin_tasks
from tasks.gate.stage import GateVerdict, OnInconclusive, gate, perplexity_drift, undecided_tasks
from tasks.gate.statistics import Difference, normal_quantile

__all__ = [
    "CHAMPION",
    "MARGIN_ABOVE_MAX_DROP",
    "Difference",
    "DriftVerdict",
    "EvaluateSettings",
    "GateRule",
    "GateVerdict",
    "Guard",
    "GuardVerdict",
    "OnInconclusive",
    "check_guards",
    "decide_guard",
    "gate",
    "graded_difference",
    "graded_documents_needed",
    "needs_champion",
    "normal_quantile",
    "perplexity_drift",
    "pin_tasks",
    "reference_models",
    "undecided_tasks",
]
