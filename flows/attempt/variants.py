"""Build the quantized variants of a merge, and judge each in its own runtime with the merge as the reference.

The merge has passed all of its own judgments. Each variant is a release of its own, so the gate decides about each one
with its full error rate: a profile with three bad variants publishes one of them more often than a profile with a
single bad variant does. A failure to build or check a variant is its verdict and does not end the run.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import contextmanager
from typing import Any, Iterator

from mergegate.flows.attempt.assessment import Assessment, assess_merge
from mergegate.flows.attempt.attempt import JudgedMerge, JudgedVariant
from mergegate.flows.profile import Profile
from mergegate.merge_core.errors import CannotDecide, InvalidInput, MergegateError, suggest
from mergegate.tasks.evaluation import CountLimit, TokenizerSource, task_prompts
from mergegate.tasks.gate import Guard
from mergegate.tasks.merge import MERGED
from mergegate.tasks.perplexity import read_distinct
from mergegate.tasks.preflight import Evidence
from mergegate.tasks.runners import Runner
from mergegate.tasks.serve import Check
from mergegate.tasks.variants import VariantFormat, VariantSettings, VariantVerdict

_TEXTS = 200  # held-out documents, and documents of each task, with which a conversion is compared


def judge_variants(merge: JudgedMerge, runner: Runner | None = None) -> tuple[JudgedVariant, ...]:
    """Build and judge all variants in the profile, in order.

    Args:
        merge: Merge that passed all of its own judgments. Its evidence names the documents that judged it.
        runner: Runner that measures. Default: this process, one model after another.

    Raises:
        CannotDecide: The disk is full, a time limit has expired, or a file changed.
    """
    if not merge.profile.variants:
        return ()
    texts = _conversion_texts(merge)
    return tuple(judged for settings in merge.profile.variants for judged in _judge_entry(settings, merge, texts, runner))
