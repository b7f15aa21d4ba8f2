"""Everything that can be wrong, found before any weight is read: compatibility, machine, licences.

And what can be known of a night before it: how much its documents can tell.
"""

from mergegate.tasks.preflight.compat import (
    Compatibility,
    HeaderDigest,
    check_compatibility,
    header_digests,
    open_and_plan,
    plan_once,
)
from mergegate.tasks.preflight.custom_code import CodeSettings, custom_code_findings
from mergegate.tasks.preflight.duration import (
    AROUND,
    STARTING,
    AskedTexts,
    NetworkSize,
    asking_seconds,
    merging_seconds,
)
from mergegate.tasks.preflight.evidence import (
    Evidence,
    JudgeQuestions,
    check_references,
    in_computed_dtype,
    pin_evidence,
    stored_dtypes,
)
from mergegate.tasks.preflight.foresight import night_power, planned_looks, planned_tasks
from mergegate.tasks.preflight.machine import machine_findings, this_machine
from mergegate.tasks.preflight.own_texts import overlap_findings, texts_read
from mergegate.tasks.preflight.sample_text import SAMPLE
from mergegate.tasks.preflight.segmentation import cut_shares, with_shares
from mergegate.tasks.preflight.tokenizers import TokenizerSettings

__all__ = [
    "AROUND",
    "SAMPLE",
    "STARTING",
    "AskedTexts",
    "CodeSettings",
    "Compatibility",
    "Evidence",
    "HeaderDigest",
    "JudgeQuestions",
    "NetworkSize",
    "TokenizerSettings",
    "asking_seconds",
    "check_compatibility",
    "check_references",
    "custom_code_findings",
    "cut_shares",
    "header_digests",
    "in_computed_dtype",
    "machine_findings",
    "merging_seconds",
    "night_power",
    "open_and_plan",
    "overlap_findings",
    "pin_evidence",
    "plan_once",
    "planned_looks",
    "planned_tasks",
    "stored_dtypes",
    "texts_read",
    "this_machine",
    "with_shares",
]
