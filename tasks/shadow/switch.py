"""The kill switch: what cannot wait for a judge or for statistics. A pure function of the last requests.

Two things take a candidate off the traffic at once: too many of its requests fail, or its first bytes come much later
than the parent's. Both are counts over a window of the last ``of`` requests, so that what was mended long ago, or was
well long ago, says nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np
from pydantic import BaseModel, ConfigDict, Field

from mergegate.tasks.shadow.arms import ArmRow, is_fault, is_refusal, own_rows

_SLOW = 0.95  # the quantile that users notice


class SwitchRule(BaseModel):
    """When a candidate is taken off the traffic at once, in a profile under ``shadow: switch``."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    errors: float = Field(
        default=5.0, gt=0, le=100, description="Percent of the candidate's last requests that may fail; more ends it."
    )
    of: int = Field(default=200, ge=20, description="How many requests of each are looked back at.")
    slower: float = Field(
        default=2.0, gt=1, description="Times the parent's 95th percentile of the first byte; slower ends it."
    )


def kill_reason(candidate: Sequence[ArmRow], parent: Sequence[ArmRow], rule: SwitchRule) -> str | None:
    """Why the candidate is to be taken off the traffic now, as a sentence with its numbers; None: it is not.

    **Errors**: faults (no answer, 5xx, 408, 429, a fallback), and other refusals (4xx) as far as they are more than the
    parent has, because users' own mistakes meet both. Until there were ``of`` requests, those to come count as
    answered: so a candidate that answers nothing ends at the first request above ``errors`` percent of ``of`` (the
    11th, by default), and one early error ends none.

    **First bytes**: from ``of`` answered requests of each arm on; with fewer a 95th percentile is a few requests' luck.

    Args:
        candidate, parent: Rows in the order in which they came to an end; only the last ``of`` are read.
    """
    ours, theirs = own_rows(tuple(candidate[-rule.of :])), own_rows(tuple(parent))[-rule.of :]
    return _too_many_errors(ours, theirs, rule) or _too_slow(candidate, parent, rule)


def _too_many_errors(candidate: Sequence[ArmRow], parent: Sequence[ArmRow], rule: SwitchRule) -> str | None:
    faults = [row for row in candidate if is_fault(row)]
    refused = [row for row in candidate if is_refusal(row)]
    usual = sum(map(is_refusal, parent)) / len(parent) if parent else 0.0
    excess = max(0.0, len(refused) - usual * len(candidate))
    if len(faults) + excess <= rule.errors / 100 * rule.of:
        return None
    kinds = Counter(row.error or f"HTTP {row.status}" for row in [*faults, *(refused if excess else ())])
    what = ", ".join(f"{count} times {kind}" for kind, count in kinds.most_common(3))
    beside = f"; the parent refused {100 * usual:.1f} % of its own" if excess and usual else ""
    return (
        f"{sum(kinds.values())} of the candidate's last {len(candidate)} requests failed ({what}{beside}), "
        f"more than {rule.errors:g} % of {rule.of}"
    )


def _too_slow(candidate: Sequence[ArmRow], parent: Sequence[ArmRow], rule: SwitchRule) -> str | None:
    ours, theirs = _first_bytes(candidate, rule.of), _first_bytes(parent, rule.of)
    if min(len(ours), len(theirs)) < rule.of:
        return None
    slow, usual = float(np.quantile(ours, _SLOW)), float(np.quantile(theirs, _SLOW))
    if slow <= rule.slower * usual:
        return None
    return (
        f"95 % of the candidate's last {rule.of} first bytes came within {slow:.3g} s, of the parent's within "
        f"{usual:.3g} s: more than {rule.slower:g} times as late"
    )


def _first_bytes(rows: Sequence[ArmRow], most: int) -> list[float]:
    """Seconds to the first byte of the last ``most`` requests that were answered well."""
    found = []
    for row in reversed(rows):
        if row.first_byte is not None and not row.fallback and not is_fault(row) and not is_refusal(row):
            found.append(row.first_byte)
            if len(found) == most:
                break
    return found
