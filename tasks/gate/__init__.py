"""The gate: from paired evidence to a verdict. Guards, drift, statistics, looks; pure decisions."""

from mergegate.tasks.gate.bounded import graded_difference, graded_documents_needed
from mergegate.tasks.gate.clusters import check_clusters, clustered_difference
from mergegate.tasks.gate.discordance import Discordance, PastGuard, known_discordance, past_discordance
from mergegate.tasks.gate.drift import DriftVerdict
from mergegate.tasks.gate.guards import ANCHOR, CHAMPION, MARGIN_ABOVE_MAX_DROP, RELEASES, GateRule, Guard
from mergegate.tasks.gate.power import GatePower, PlannedTask, gate_power, power_finding, soonest_decided
from mergegate.tasks.gate.ratchet import anchor_confidence, anchor_faults, anchor_refused, note_refusal, refused_by
from mergegate.tasks.gate.references import (
    check_guards,
    comparable_parents,
    distinct_guards,
    needs_champion,
    reference_models,
    with_anchor,
)
from mergegate.tasks.gate.regression import GuardVerdict, decide_guard
from mergegate.tasks.gate.settings import EvaluateSettings, pin_tasks
from mergegate.tasks.gate.stage import (
    GateVerdict,
    NotRun,
    OnInconclusive,
    gate,
    lost_for_good,
    perplexity_drift,
    undecided_tasks,
)
from mergegate.tasks.gate.statistics import POWER, Difference, binary_difference, normal_quantile, student_quantile
from mergegate.tasks.gate.suite import SuiteVerdict

__all__ = [
    "ANCHOR",
    "CHAMPION",
    "MARGIN_ABOVE_MAX_DROP",
    "POWER",
    "RELEASES",
    "Difference",
    "Discordance",
    "DriftVerdict",
    "EvaluateSettings",
    "GatePower",
    "GateRule",
    "GateVerdict",
    "Guard",
    "GuardVerdict",
    "NotRun",
    "OnInconclusive",
    "PastGuard",
    "PlannedTask",
    "SuiteVerdict",
    "anchor_confidence",
    "anchor_faults",
    "anchor_refused",
    "binary_difference",
    "check_clusters",
    "check_guards",
    "clustered_difference",
    "comparable_parents",
    "decide_guard",
    "distinct_guards",
    "gate",
    "gate_power",
    "graded_difference",
    "graded_documents_needed",
    "known_discordance",
    "lost_for_good",
    "needs_champion",
    "normal_quantile",
    "note_refusal",
    "past_discordance",
    "perplexity_drift",
    "pin_tasks",
    "power_finding",
    "reference_models",
    "refused_by",
    "soonest_decided",
    "student_quantile",
    "undecided_tasks",
    "with_anchor",
]
