"""Decide when the kill switch takes a candidate off the traffic, without waiting for a judge or for statistics.

The switch reacts if too many of the candidate's requests fail, or if its first bytes arrive much later than the
parent's. Both checks are pure functions of the last ``window`` requests, so older failures and older successes have no
effect.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import ClassVar

import numpy as np
from pydantic import BaseModel, ConfigDict, Field

from mergegate.tasks.shadow.arms import ArmRow, is_fault, is_refusal, own_rows

_SLOW = 0.95  # the quantile at which users notice delays


class SwitchRule(BaseModel):
    """Limits at which the kill switch takes a candidate off the traffic. In a profile: ``shadow: kill_switch``."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    renamed_keys: ClassVar[Mapping[str, str]] = {
        "errors": "max_error_percent",
        "of": "window",
        "slower": "max_slowdown",
    }

    max_error_percent: float = Field(
        default=5.0, gt=0, le=100, description="Percent of the candidate's last requests that may fail; more ends it."
    )
    window: int = Field(default=200, ge=20, description="Number of recent requests of each model that count.")
    max_slowdown: float = Field(
        default=2.0,
        gt=1,
        description="Largest ratio of the 95th percentiles of the time to the first byte, candidate to parent.",
    )


def kill_reason(candidate: Sequence[ArmRow], parent: Sequence[ArmRow], rule: SwitchRule) -> str | None:
    """Return why the candidate has to be taken off the traffic now, or None if it may stay.

    **Errors**: the switch counts faults (no answer, 5xx, 408, 429, a fallback). It counts other refusals (4xx) only as
    far as they exceed the parent's rate, because users' own mistakes affect both arms. Before the candidate has
    received ``window`` requests, the missing ones count as answered. A candidate that answers nothing is therefore
    stopped at the first request above ``max_error_percent`` percent of ``window`` (by default the 11th), and a single
    early error does not stop it.

    **First bytes**: the switch compares the 95th percentiles once each arm has answered ``window`` requests. With
    fewer, a 95th percentile would depend on a few requests.

    Args:
        candidate: Rows of the candidate, in the order in which the requests ended. Only the last ``window`` count.
        parent: Rows of the parent, in the same order. Only the last ``window`` count.

    Returns:
        A sentence with the numbers, or None.
    """
    candidate_rows, parent_rows = own_rows(tuple(candidate[-rule.window :])), own_rows(tuple(parent))[-rule.window :]
    return _too_many_errors(candidate_rows, parent_rows, rule) or _too_slow(candidate, parent, rule)


def _too_many_errors(candidate: Sequence[ArmRow], parent: Sequence[ArmRow], rule: SwitchRule) -> str | None:
    faults = [row for row in candidate if is_fault(row)]
    refusals = [row for row in candidate if is_refusal(row)]
    usual = sum(map(is_refusal, parent)) / len(parent) if parent else 0.0
    excess = max(0.0, len(refusals) - usual * len(candidate))
    if len(faults) + excess <= rule.max_error_percent / 100 * rule.window:
        return None
    kinds = Counter(row.error or f"HTTP {row.status}" for row in [*faults, *(refusals if excess else ())])
    failures = ", ".join(f"{count} times {kind}" for kind, count in kinds.most_common(3))
    parent_note = f"; the parent refused {100 * usual:.1f} % of its own" if excess and usual else ""
    return (
        f"{sum(kinds.values())} of the candidate's last {len(candidate)} requests failed ({failures}{parent_note}), "
        f"more than {rule.max_error_percent:g} % of {rule.window}"
    )


def _too_slow(candidate: Sequence[ArmRow], parent: Sequence[ArmRow], rule: SwitchRule) -> str | None:
    candidate_seconds, parent_seconds = _first_bytes(candidate, rule.window), _first_bytes(parent, rule.window)
    if min(len(candidate_seconds), len(parent_seconds)) < rule.window:
        return None
    slow, usual = float(np.quantile(candidate_seconds, _SLOW)), float(np.quantile(parent_seconds, _SLOW))
    if slow <= rule.max_slowdown * usual:
        return None
    return (
        f"95 % of the candidate's last {rule.window} first bytes came within {slow:.3g} s, of the parent's within "
        f"{usual:.3g} s: more than {rule.max_slowdown:g} times as late"
    )


def _first_bytes(rows: Sequence[ArmRow], most: int) -> list[float]:
    """Return the seconds to the first byte of the last ``most`` requests that were answered well."""
    seconds = []
    for row in reversed(rows):
        if row.first_byte is not None and not row.fallback and not is_fault(row) and not is_refusal(row):
            seconds.append(row.first_byte)
            if len(seconds) == most:
                break
    return seconds
