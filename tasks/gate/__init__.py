"""Decide from paired evidence whether a merge passes: guards, perplexity drift, statistics and interim looks."""

from mergegate.tasks.gate.alpha_spending import (
    anchor_confidence,
    count_refusals,
    damaged_anchor_records,
    record_refusal,
)
from mergegate.tasks.gate.clusters import check_clusters, clustered_difference
from mergegate.tasks.gate.discordance import PastGuardOutcome, estimate_discordance, find_past_discordance
from mergegate.tasks.gate.drift import DriftVerdict
from mergegate.tasks.gate.evidence import GuardVerdict
from mergegate.tasks.gate.graded_scores import graded_difference, graded_documents_needed
from mergegate.tasks.gate.power import (
    GatePower,
    PlannedTask,
    gate_power,
    order_by_information,
    power_finding,
    undecidable_finding,
)
from mergegate.tasks.gate.references import (
    check_guards,
    comparable_parents,
    distinct_guards,
    needs_champion,
    pin_tasks,
    reference_models,
    with_anchor,
)
from mergegate.tasks.gate.regression import decide_guard
from mergegate.tasks.gate.sample_record import (
    WORN,
    JudgedSample,
    damaged_sample_records,
    read_samples,
    record_sample,
    sample_start,
    uses_per_document,
)
from mergegate.tasks.gate.settings import (
    ANCHOR,
    CHAMPION,
    MARGIN_ABOVE_MAX_DROP,
    RELEASES,
    EvaluateSettings,
    GateRule,
    Guard,
)
from mergegate.tasks.gate.stage import (
    GatePlan,
    GateVerdict,
    OnInconclusive,
    cannot_pass,
    gate,
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
    "WORN",
    "Difference",
    "DriftVerdict",
    "EvaluateSettings",
    "GatePlan",
    "GatePower",
    "GateRule",
    "GateVerdict",
    "Guard",
    "GuardVerdict",
    "JudgedSample",
    "OnInconclusive",
    "PastGuardOutcome",
    "PlannedTask",
    "SuiteVerdict",
    "anchor_confidence",
    "binary_difference",
    "cannot_pass",
    "check_clusters",
    "check_guards",
    "clustered_difference",
    "comparable_parents",
    "count_refusals",
    "damaged_anchor_records",
    "damaged_sample_records",
    "decide_guard",
    "distinct_guards",
    "estimate_discordance",
    "find_past_discordance",
    "gate",
    "gate_power",
    "graded_difference",
    "graded_documents_needed",
    "needs_champion",
    "normal_quantile",
    "order_by_information",
    "perplexity_drift",
    "pin_tasks",
    "power_finding",
    "read_samples",
    "record_refusal",
    "record_sample",
    "reference_models",
    "sample_start",
    "student_quantile",
    "undecidable_finding",
    "undecided_tasks",
    "uses_per_document",
    "with_anchor",
]
