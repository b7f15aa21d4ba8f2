"""Spend the allowed error of comparisons with an anchor over all merges that it has refused.

Each of many runs may lose a little against yesterday's release. The anchor is a release that does not change, and all
runs together may not lose more against it than one run may. Every run compares with the anchor on the same documents,
so a team that retries with other merges until one passes has selected that merge by these documents. At 95 % each time,
a hundred runs that lose half a point each end 5 to 17 points below the anchor. mergegate therefore records refusals and
makes each one tighten the next comparison::

    alpha / ((refusals + 1) * (refusals + 2))         1/2, 1/6, 1/12, … of alpha; all of them sum to alpha

Runs that pass cost nothing. Each anchor has one file with the digests of the merges that it refused. Without this file
(another machine, a new home directory) counting starts again.
"""

from __future__ import annotations

import json
from pathlib import Path

from mergegate.merge_core.files import Damaged, hold_lock, read_state, set_aside_damaged, state_directory, write_state
from mergegate.tasks.stage import home


def anchor_confidence(confidence: float, refusals: int) -> float:
    """Return the one-sided confidence of a comparison with an anchor that has refused this many merges."""
    return 1 - (1 - confidence) / ((refusals + 1) * (refusals + 2))


def count_refusals(anchor: str, except_merge: str = "") -> int:
    """Return the number of merges that the anchor with this digest has refused.

    ``except_merge`` is the digest of a merge that does not count, because it is being judged again.
    """
    return len(_read_refusals(_record_path(anchor)) - {except_merge})


def record_refusal(anchor: str, merge: str) -> None:
    """Record that the anchor refused a merge, both given by digest. Recording the same merge again changes nothing."""
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
    """Return the unreadable anchor records; with them, counting would start again."""
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
