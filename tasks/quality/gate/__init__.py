"""Decide from paired evidence whether a merge passes: guards, perplexity drift, statistics and interim looks."""

from mergegate.tasks.quality.gate.clusters import check_clusters, clustered_difference
from mergegate.tasks.quality.gate.drift import BROKEN_LOSS, drift_findings, perplexity_drift
from mergegate.tasks.quality.gate.earlier_runs import (
    JudgedSample,
    SelectingSample,
    anchor_confidence,
    count_refusals,
    damaged_records,
    read_samples,
    record_refusal,
    record_sample,
    sample_start,
    unselected_scores,
    uses_per_document,
    wear_findings,
)
from mergegate.tasks.quality.gate.evidence import GatePlan
from mergegate.tasks.quality.gate.graded_scores import graded_difference, graded_documents_needed
from mergegate.tasks.quality.gate.power import (
    UNLIKELY,
    GatePower,
    PastGuardOutcome,
    PlannedTask,
    estimate_discordance,
    find_past_discordance,
    gate_power,
    order_by_information,
    power_findings,
    undecidable_finding,
)
from mergegate.tasks.quality.gate.references import (
    check_guards,
    comparable_parents,
    distinct_guards,
    needs_champion,
    pin_tasks,
    reference_models,
    with_anchor,
)
from mergegate.tasks.quality.gate.regression import decide_guard
from mergegate.tasks.quality.gate.sensitivity import known_reference_strength
from mergegate.tasks.quality.gate.settings import (
    ALL_PARENTS,
    ANCHOR,
    BEST_PARENT,
    CHAMPION,
    LAST_CHECKPOINT,
    MARGIN_ABOVE_MAX_DROP,
    RELEASES,
    EvaluateSettings,
    GateRule,
    Guard,
)
from mergegate.tasks.quality.gate.stage import (
    GateInputs,
    cannot_pass,
    describe_untested,
    gate,
    tasks_with_short_answers,
    undecided_tasks,
)
from mergegate.tasks.quality.gate.statistics import (
    POWER,
    Difference,
    binary_difference,
    normal_quantile,
    selection_inflation,
    share_bounds,
    student_quantile,
)
from mergegate.tasks.quality.gate.suite import reference_findings
from mergegate.tasks.quality.gate.verdict_record import (
    EVIDENCE_RECORD,
    EVIDENCE_TABLES,
    FurtherVerdict,
    RecordedEvidence,
    VerdictDifference,
    VerdictRecord,
    compare_verdicts,
    decide_again,
    joint_verdict,
    measured_values,
    plain_verdict,
    read_measurements,
    record_evidence,
    verdict_record,
    versions_here,
)
from mergegate.tasks.quality.gate.verdicts import (
    DriftVerdict,
    GateVerdict,
    GuardVerdict,
    OnInconclusive,
    StratumDrift,
    SuiteVerdict,
)
