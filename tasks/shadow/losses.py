"""Store the newest pairs that the candidate lost: the question, both answers and the judge's reasoning.

Reviewers read these pairs; no decision depends on them. They contain user text, so mergegate keeps only the newest few
and deletes them no later than the records.
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
_MAX_CHARACTERS = 2000  # characters


class LostPair(BaseModel):
    """A pair that the candidate lost in both orders."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    id: str  # request ID
    at: float  # Unix time
    question: str
    parent: str
    candidate: str
    reasoning: str


_STATE = TypeAdapter(tuple[str, tuple[LostPair, ...]])  # candidate version and its lost pairs


def lost_pair(pair: SampledPair, judgments: Sequence[Judgment]) -> LostPair:
    """Return the stored form of a lost pair.

    Long texts are cut: a question keeps its end, which holds the last message, and an answer keeps its beginning.
    """
    question, answers = shown(pair.given.question[-_MAX_CHARACTERS:]), pair.given
    return LostPair(
        id=answers.id,
        at=pair.at,
        question=question if len(answers.question) <= _MAX_CHARACTERS else f"…{question}",
        parent=_cut(answers.reference),
        candidate=_cut(answers.merge),
        reasoning=_cut(next((judgment.reasoning for judgment in judgments if judgment.reasoning), "")),
    )


def read_lost(file: Path, candidate: str) -> tuple[LostPair, ...]:
    """Return the stored lost pairs, newest first. Return none if the file belongs to another candidate."""
    state = read_state(file, _STATE.validate_json)
    if isinstance(state, Damaged):
        set_aside_damaged(file, state.why)
    return () if state is None or isinstance(state, Damaged) or state[0] != candidate else state[1]


def keep_lost(file: Path, candidate: str, new: Sequence[LostPair], *, since: float) -> tuple[LostPair, ...]:
    """Add ``new`` to the stored lost pairs and return the result, newest first.

    Args:
        since: Unix time. Older pairs are dropped.
    """
    by_id = {loss.id: loss for loss in (*read_lost(file, candidate), *new) if loss.at >= since}
    lost = tuple(sorted(by_id.values(), key=lambda loss: -loss.at)[:KEPT])
    state_directory(file.parent, private=True)
    write_state(file, _STATE.dump_json((candidate, lost)))
    return lost


def _cut(text: str) -> str:
    return shown(text if len(text) <= _MAX_CHARACTERS else f"{text[:_MAX_CHARACTERS]}…")
