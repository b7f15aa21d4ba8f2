"""Build the quantized variants of a merge, and evaluate each in its own runtime with the merge as the reference."""

from __future__ import annotations

from dataclasses import dataclass

from mergegate.flows.attempt.assessment import Assessment
from mergegate.tasks.store import Artifact
from mergegate.tasks.variants import VariantFormat, VariantRecord, VariantVerdict


@dataclass(frozen=True)
class JudgedVariant:
    """A quantized variant of a merge, with its verdict.

    ``artifact`` is None if the variant could not be built. ``assessment`` is None if a check refused it before it was
    evaluated.
    """

    settings: VariantFormat
    verdict: VariantVerdict
    artifact: Artifact[VariantRecord] | None = None
    assessment: Assessment | None = None
