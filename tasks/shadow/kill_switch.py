"""Decide when the kill switch takes a candidate off the traffic, without waiting for a judge or for statistics.

The switch reacts if too many of the candidate's requests fail, or if its first bytes arrive much later than the
parent's. It considers only the last ``window`` requests. The functions are pure.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np

from mergegate.tasks.shadow.recorded_traffic import ArmRow, is_fault, is_refusal, own_rows
from mergegate.tasks.shadow.settings import SwitchRule

_SLOW = 0.95  # the quantile at which users notice delays


def kill_reason(candidate: Sequence[ArmRow], parent: Sequence[ArmRow], rule: SwitchRule) -> str | None:
    """Return why the candidate must be taken off the traffic now, as a sentence, or None if it may stay.

    Both sequences hold requests in the order in which they ended. Only the last ``window`` of each count.

    **Errors**: the switch counts faults (no answer, 5xx, 408, 429, a fallback). It counts other refusals (4xx) only as
    far as they exceed the parent's rate, because users' own mistakes affect both arms. Before the candidate has
    received ``window`` requests, the missing ones count as answered. A candidate that answers nothing is therefore
    stopped at the first request above ``max_error_percent`` percent of ``window`` (by default the 11th), and a single
    early error does not stop it.

    **First bytes**: the switch compares the 95th percentiles once each arm has answered ``window`` requests. With
    fewer, a 95th percentile would depend on a few requests.
    """
    rows, parent_rows = own_rows(candidate[-rule.window :]), own_rows(parent)[-rule.window :]
    faults = [row for row in rows if is_fault(row)]
    refusals = [row for row in rows if is_refusal(row)]
    usual_rate = sum(map(is_refusal, parent_rows)) / len(parent_rows) if parent_rows else 0.0
    excess = max(0.0, len(refusals) - usual_rate * len(rows))
    if len(faults) + excess > rule.max_error_percent / 100 * rule.window:
        kinds = Counter(row.error or f"HTTP {row.status}" for row in [*faults, *(refusals if excess else ())])
        failures = ", ".join(f"{count} times {kind}" for kind, count in kinds.most_common(3))
        parent_note = f"; the parent refused {100 * usual_rate:.1f} % of its own" if excess and usual_rate else ""
        return (
            f"{sum(kinds.values())} of the candidate's last {len(rows)} requests failed ({failures}{parent_note}), "
            f"more than {rule.max_error_percent:g} % of {rule.window}"
        )
    seconds, parent_seconds = _first_bytes(candidate, rule.window), _first_bytes(parent, rule.window)
    if min(len(seconds), len(parent_seconds)) < rule.window:
        return None
    slow, usual = float(np.quantile(seconds, _SLOW)), float(np.quantile(parent_seconds, _SLOW))
    if slow <= rule.max_slowdown * usual:
        return None
    return (
        f"95 % of the candidate's last {rule.window} first bytes arrived within {slow:.3g} s, the parent's within "
        f"{usual:.3g} s, so the candidate is more than {rule.max_slowdown:g} times slower"
    )


def _first_bytes(rows: Sequence[ArmRow], limit: int) -> list[float]:
    """Return the seconds to the first byte of the last ``limit`` requests that were answered well."""
    seconds = []
    for row in reversed(rows):
        if row.first_byte is not None and not row.fallback and not is_fault(row) and not is_refusal(row):
            seconds.append(row.first_byte)
            if len(seconds) == limit:
                break
    return seconds
