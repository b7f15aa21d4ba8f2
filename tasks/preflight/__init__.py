"""Check everything that can be wrong before any weight is read: compatibility, machine and licenses.

The package also forecasts the statistical power and the duration of a run.
"""

from mergegate.tasks.preflight.compatibility import (
    EXAMPLES,
    NEXT_TOKENS,
    Compatibility,
    HeaderDigest,
    KindDemand,
    check_compatibility,
    custom_code_findings,
    describe_judging,
    header_digests,
    kind_findings,
    plan_cached,
)
from mergegate.tasks.preflight.evidence import (
    Comparisons,
    Evidence,
    check_references,
    collect_calibration_texts,
    collect_variant_texts,
    evidence_for_variant,
    overlap_findings,
    pin_evidence,
    stored_dtypes,
    with_next_samples,
    with_supported_dtype,
)
from mergegate.tasks.preflight.machine import (
    AROUND,
    STARTING,
    NetworkSize,
    PromptLoad,
    evaluation_seconds,
    machine_findings,
    measure_machine_capacity,
    merge_seconds,
)
from mergegate.tasks.preflight.power_forecast import (
    forecast_power,
    forecast_undecidable,
    forecast_variant_power,
    plan_interim_looks,
    planned_tasks,
    sensitivity_findings,
)
from mergegate.tasks.preflight.sample_text import SAMPLE, sample_queries
from mergegate.tasks.preflight.segmentation import add_segmentation_shares, segmentation_shares
from mergegate.tasks.preflight.settings import CodeSettings, CopySettings, TokenizerSettings
