"""Define the permanent record of a run: a small frozen value, stored as one line of JSON with a checksum.

Records only inform users; no run depends on them. Text from user input (names, messages) is untrusted: its length is
limited here, and pages escape it. New fields need a default, because older lines lack them.
"""

from __future__ import annotations

import hashlib
import json
from typing import Annotated

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from mergegate.merge_core.errors import Status
from mergegate.merge_core.recipe import RunWindow
from mergegate.tasks.report import wording

RunStatus = Status

# Largest length of a message and of a recipe, in characters. The recipe is stored to list its changed lines.
_MAX_MESSAGE, _MAX_RECIPE = 2000, 6000
# Largest number of tasks, stages and parents. An lm-eval group has dozens of tasks, and a suite may have hundreds.
_MAX_ITEMS = 200
_CHECKSUM = b',"sum":"'


def _cut(length: int) -> AfterValidator:
    return AfterValidator(lambda text: text if len(text) <= length else f"{text[: length - 1]}…")


Short = Annotated[str, _cut(200)]
Finite = Annotated[float, Field(allow_inf_nan=False)]


class _RecordPart(BaseModel):
    # A newer mergegate version may add fields. The known fields of its lines are still valid.
    model_config = ConfigDict(frozen=True, extra="ignore")


class RunStage(_RecordPart):
    """All calls of one stage in a run."""

    name: Short
    seconds: Finite = Field(ge=0)  # sum over all calls; parallel calls take less time in total
    calls: int = Field(ge=0)
    cached: int = Field(ge=0)  # number of calls whose artifact was in the store
    status: Short  # most severe status of all calls: made, cached, rebuilt, refused, failed


class RunScore(_RecordPart):
    """One guard: the merge against its reference on a task or a suite of tasks. Points are hundredths of a score."""

    task: Short
    reference: Short
    merge: Finite | None = None  # score in points; None for a suite, which only has a drop
    drop: Finite  # points below the reference; negative if the merge is better
    low: Finite
    high: Finite
    max_drop: Finite  # largest drop that the profile allows, in points
    margin: Finite
    outcome: Short
    # Number of documents that both were scored on; 0 for a suite and in records of older versions.
    documents: int = Field(default=0, ge=0)
    differing: int = Field(default=0, ge=0)  # number of these documents on which merge and reference differ

    @property
    def limit(self) -> str:
        """The limit as text: '3', or '3, margin 4' if the two differ."""
        margin = f", margin {wording.plain(self.margin)}" if self.margin != self.max_drop else ""
        return wording.plain(self.max_drop) + margin


class RunVariant(_RecordPart):
    """A quantized variant of the merge and its verdict."""

    type: Short  # 'Q8_0'
    outcome: Short
    published: bool  # whether its verdict allows publication
    drop: Finite | None = None  # mean drop of a suite, or else the largest drop, in points; None if not evaluated


class RunParent(_RecordPart):
    """A model that went into the merge."""

    name: Short
    ref: Short
    revision: Short | None = None
    digest: Short  # first digits of the digest of its files


class RunRecord(_RecordPart):
    """A run of a flow and its result."""

    run: Short  # id of the run; Prefect's id if Prefect ran it
    flow: Short  # release, compare, sweep
    profile: Short
    ended: Finite  # seconds since the epoch; the clock may be wrong, so runs are ordered by line instead
    seconds: Finite = Field(ge=0)  # duration, measured by a monotonic clock
    status: Short  # a RunStatus, or a status of a newer mergegate version
    message: Annotated[str, _cut(_MAX_MESSAGE)]
    overrides: tuple[Short, ...] = Field(default=(), max_length=_MAX_ITEMS)  # overrides of profile settings: KEY=VALUE
    version: Short | None = None
    method: Short = ""  # 'ties of 3 over llama-base'
    recipe: Annotated[str, _cut(_MAX_RECIPE)] = ""
    parents: tuple[RunParent, ...] = Field(default=(), max_length=_MAX_ITEMS)
    # Checkpoints of each training run, by name.
    windows: Annotated[tuple[RunWindow, ...], Field(max_length=_MAX_ITEMS, exclude_if=lambda windows: not windows)] = ()
    scores: tuple[RunScore, ...] = Field(default=(), max_length=_MAX_ITEMS)
    variants: Annotated[
        tuple[RunVariant, ...], Field(max_length=_MAX_ITEMS, exclude_if=lambda variants: not variants)
    ] = ()
    perplexity: Finite | None = None  # perplexity of the merge over that of the better parent
    perplexity_limit: Finite | None = None
    stages: tuple[RunStage, ...] = Field(default=(), max_length=_MAX_ITEMS)
    bytes_made: int = Field(default=0, ge=0)  # size of the artifacts that were new in the store
    bytes_merged: int = Field(default=0, ge=0)  # size of the merged checkpoint
    location: Annotated[str, _cut(500)] = ""  # directory or address of the release
    machine: Short = ""  # 'build-7, 16 cores, Linux x86_64'
    seen_at: Annotated[str, _cut(500)] = ""  # page of the run on the Prefect server, if any
    report: Short = ""  # path of the page, relative to the directory of reports; empty if it could not be archived

    @property
    def why(self) -> str:
        """Reason for the status: the message's first line, or the second if the first only says "not released"."""
        first, *rest = self.message.splitlines() or [""]
        return rest[0].strip() if rest and first.endswith("is not released") else first

    def line(self) -> bytes:
        """Return the record as stored: JSON on one line, whose last field is a checksum of everything before it."""
        fields = self.model_dump(mode="json", exclude_defaults=True)
        body = json.dumps(fields, separators=(",", ":")).encode().removesuffix(b"}")
        return body + _CHECKSUM + _digits(body) + b'"}'


def parse_record(line: bytes) -> RunRecord:
    """Return the record in ``line``.

    Raises:
        ValueError: The line was altered after it was written.
    """
    body, _, ending = line.rpartition(_CHECKSUM)
    if ending != _digits(body) + b'"}':
        raise ValueError("the checksum of the line does not match its content")
    return RunRecord.model_validate(json.loads(body + b"}"))


def _digits(body: bytes) -> bytes:
    return hashlib.sha256(body).hexdigest()[:16].encode()
