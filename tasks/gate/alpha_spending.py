"""Tighten the comparison with an anchor after each merge that fails it, so that retries do not add up to a pass.

An anchor is a release that stays the same over many runs. All runs together may lose no more against it than one run
may. They compare with the anchor on the same documents, so a team that retries until a merge passes selects that merge
by these documents: at 95 % each time, a hundred runs that lose half a point each end 5 to 17 points below the anchor.
mergegate therefore counts refusals and spends only a part of the allowed error ``alpha`` on each comparison::

    alpha / ((refusals + 1) * (refusals + 2))         1/2, 1/6, 1/12, … of alpha, which sum to alpha

A merge that passes does not count. Each anchor has a file under the project's home directory with the digests of the
merges that it refused. On another machine, or in a new home directory, counting starts again.
"""

from __future__ import annotations

import json
from pathlib import Path

from mergegate.merge_core.files import Damaged, hold_lock, read_state, set_aside_damaged, state_directory, write_state
from mergegate.tasks.stage import home


def anchor_confidence(confidence: float, refusals: int) -> float:
    """Return the one-sided confidence for comparing with an anchor that has refused ``refusals`` merges."""
    return 1 - (1 - confidence) / ((refusals + 1) * (refusals + 2))


def count_refusals(anchor: str, except_merge: str = "") -> int:
    """Return the number of merges that the anchor with the digest ``anchor`` has refused.

    The merge with the digest ``except_merge`` does not count, for a merge that is judged again.
    """
    return len(_read_refusals(_record_path(anchor)) - {except_merge})


def record_refusal(anchor: str, merge: str) -> None:
    """Record the digest of a merge that the anchor refused. Recording the same merge again changes nothing."""
    record = _record_path(anchor)
    state_directory(record.parent, private=True)
    with hold_lock(record.parent):
        refused = _read_refusals(record)
        if merge in refused:
            return
        write_state(record, json.dumps(sorted({*refused, merge}), indent=1).encode())


def _record_path(anchor: str) -> Path:
    return home() / "anchors" / f"{anchor[:32]}.json"


def damaged_anchor_records() -> list[Damaged]:
    """Return the anchor files that cannot be read. The refusals of their anchors are counted from zero again."""
    states = (read_state(record, _parse_digests) for record in sorted((home() / "anchors").glob("*.json")))
    return [damage for damage in states if isinstance(damage, Damaged)]


def _read_refusals(record: Path) -> set[str]:
    """Return the recorded digests. A damaged record is set aside and counting starts from an empty set."""
    digests = read_state(record, _parse_digests)
    if isinstance(digests, Damaged):
        set_aside_damaged(record, digests.reason)
        return set()
    return digests or set()


def _parse_digests(content: bytes) -> set[str]:
    digests = json.loads(content)
    if not isinstance(digests, list) or not all(isinstance(digest, str) for digest in digests):
        raise ValueError("the content is not a list of digests")
    return set(digests)
