"""Everything that can be wrong, found before any weight is read: compatibility, machine, licences."""

from tasks.preflight.compat import Compatibility, check_compatibility, header_digests, open_and_plan
from tasks.preflight.custom_code import CodeSettings, custom_code_findings
from tasks.preflight.evidence import Evidence, JudgeQuestions, check_references, pin_evidence
from tasks.preflight.machine import machine_findings, this_machine
from tasks.preflight.segmentation import cut_shares, with_shares
from tasks.preflight.tokenizers import TokenizerSettings

__all__ = [
    "CodeSettings",
    "Compatibility",
    "Evidence",
    "JudgeQuestions",
    "TokenizerSettings",
    "check_compatibility",
    "check_references",
    "custom_code_findings",
    "cut_shares",
    "header_digests",
    "machine_findings",
    "open_and_plan",
    "pin_evidence",
    "this_machine",
    "with_shares",
]
