"""Pairs that the candidate lost, in words: what was asked, what both answered, and why the judge liked the parent's.

For people only; nothing is decided by it. It holds users' text, so it is kept no longer than the records are, and only
the newest few.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from pydantic import BaseModel, ConfigDict, TypeAdapter

from mergegate.merge_core.errors import shown
from mergegate.merge_core.files import Damaged, read_state, set_aside_damaged, state_directory, write_state
from mergegate.tasks.judge import Judgment
from mergegate.tasks.shadow.pairs import SampledPair

KEPT = 20
_SAID = 2000  # characters


class LostPair(BaseModel):
    """A pair that the candidate lost in both orders."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    id: str  # of the request
    at: float  # unix
    question: str
    parent: str
    candidate: str
    reasoning: str


_KEPT = TypeAdapter(tuple[str, tuple[LostPair, ...]])  # of which candidate, and what


def lost_pair(pair: SampledPair, said: Sequence[Judgment]) -> LostPair:
    """What is kept of it. Of long texts their end is what was asked last, of answers their beginning."""
    question, given = shown(pair.given.question[-_SAID:]), pair.given
    return LostPair(
        id=given.id,
        at=pair.at,
        question=question if len(given.question) <= _SAID else f"…{question}",
        parent=_cut(given.reference),
        candidate=_cut(given.merge),
        reasoning=_cut(next((one.reasoning for one in said if one.reasoning), "")),
    )


def read_lost(file: Path, candidate: str) -> tuple[LostPair, ...]:
    """The newest that were lost, the newest first; of another candidate none."""
    found = read_state(file, _KEPT.validate_json)
    if isinstance(found, Damaged):
        set_aside_damaged(file, found.why)
    return () if found is None or isinstance(found, Damaged) or found[0] != candidate else found[1]


def keep_lost(file: Path, candidate: str, new: Sequence[LostPair], *, since: float) -> tuple[LostPair, ...]:
    """Those that were lost before and ``new``, without what is older than ``since``."""
    known = {one.id: one for one in (*read_lost(file, candidate), *new) if one.at >= since}
    lost = tuple(sorted(known.values(), key=lambda one: -one.at)[:KEPT])
    state_directory(file.parent, private=True)
    write_state(file, _KEPT.dump_json((candidate, lost)))
    return lost


def _cut(text: str) -> str:
    return shown(text if len(text) <= _SAID else f"{text[:_SAID]}…")
