"""The ratchet: an anchor is asked night after night on the same documents, so each no makes the next yes harder.

Many nights may each lose a little against yesterday's release; against an anchor that stays what it is, all of them
together may not lose more than one. But who is refused and comes back with another merge until one passes has chosen it
by these very documents: asked at 95 % each time, a hundred nights of losing half a point end 5 to 17 points below. So
what has been refused is remembered, and the allowed error is spent over it::

    alpha / ((refusals + 1) * (refusals + 2))         1/2, 1/6, 1/12, … of alpha; all of them sum to alpha

The nights that pass cost nothing. What is kept is one file for each anchor, with the digests of the merges that it
refused; without it (another machine, a new home) counting starts again.
"""

from __future__ import annotations

import json
from pathlib import Path

from mergegate.merge_core.files import Damaged, locked, read_state, set_aside_damaged, state_directory, write_state
from mergegate.tasks.gate.guards import ANCHOR
from mergegate.tasks.gate.stage import GateVerdict
from mergegate.tasks.stage import home


def anchor_confidence(confidence: float, refusals: int) -> float:
    """One-sided, of a comparison with an anchor that has refused so many merges before."""
    return 1 - (1 - confidence) / ((refusals + 1) * (refusals + 2))


def is_refused_by_anchor(verdict: GateVerdict) -> bool:
    """Whether anything that was compared with the anchor did not pass."""
    suites = [suite.outcome for suite in verdict.suites if suite.reference == ANCHOR]
    guards = [guard.outcome for guard in verdict.guards if guard.reference == ANCHOR]
    return any(outcome != "pass" for outcome in (*suites, *guards))


def count_refusals(anchor: str, but: str = "") -> int:
    """How many merges the anchor with that digest has refused.

    Args:
        but: Digest of a merge that does not count: it is asked about again.
    """
    return len(_refused(_record(anchor)) - {but})


def record_refusal(anchor: str, merge: str) -> None:
    """Remember that the anchor refused a merge, both by digest; once, however often it is asked."""
    record = _record(anchor)
    state_directory(record.parent, private=True)
    with locked(record.parent):
        refused = _refused(record)
        if merge in refused:
            return
        write_state(record, json.dumps(sorted({*refused, merge}), indent=1).encode())


def _record(anchor: str) -> Path:
    return home() / "anchors" / f"{anchor[:32]}.json"


def anchor_faults() -> list[Damaged]:
    """Records of anchors that cannot be read; counting would start again with them."""
    found = (read_state(record, _digests) for record in sorted((home() / "anchors").glob("*.json")))
    return [damage for damage in found if isinstance(damage, Damaged)]


def _refused(record: Path) -> set[str]:
    """What stands in the record; nothing where it is not there, or is none: then it is set aside, and begun anew."""
    found = read_state(record, _digests)
    if isinstance(found, Damaged):
        set_aside_damaged(record, found.why)
        return set()
    return found or set()


def _digests(content: bytes) -> set[str]:
    known = json.loads(content)
    if not isinstance(known, list) or not all(isinstance(one, str) for one in known):
        raise ValueError("no list of digests")
    return set(known)
