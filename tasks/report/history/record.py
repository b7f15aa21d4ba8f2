"""What is kept of a run for the years to come: one small frozen value, a line of JSON with a sum that vouches for it.

Nothing in it is needed by any run: it tells people. What it says of a person's input (names, messages) is a stranger's
text, bounded here and escaped where it is shown. A field that is added later needs a default: older lines lack it.
"""

from __future__ import annotations

import hashlib
import json
from typing import Annotated

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from mergegate.merge_core.errors import Status
from mergegate.tasks.report import wording

RunStatus = Status

# Characters: of a message, and of a recipe, which is kept to say which of its lines were changed.
_MESSAGE, _RECIPE = 2000, 6000
# Of tasks, stages and parents: a group of lm-eval has dozens, a suite may have hundreds.
_MOST = 200
_SUM = b',"sum":"'


def _cut(length: int) -> AfterValidator:
    return AfterValidator(lambda text: text if len(text) <= length else f"{text[: length - 1]}…")


Short = Annotated[str, _cut(200)]
Finite = Annotated[float, Field(allow_inf_nan=False)]


class _Kept(BaseModel):
    # A newer program may have said more: what is known of its lines is still true.
    model_config = ConfigDict(frozen=True, extra="ignore")


class RunStage(_Kept):
    """All calls of one stage in a run."""

    name: Short
    seconds: Finite = Field(ge=0)  # of all calls together; side by side they take less
    calls: int = Field(ge=0)
    cached: int = Field(ge=0)  # of the calls: how many found their artifact in the store
    status: Short  # the worst of the calls': made, cached, rebuilt, refused, failed


class RunScore(_Kept):
    """One guard: the merge against its reference on one task, or on all of a suite. Points: hundredths of a score."""

    task: Short
    reference: Short
    merge: Finite | None = None  # score, points; None of a suite, which has a drop only
    drop: Finite  # points below the reference; negative where the merge is better
    low: Finite
    high: Finite
    max_drop: Finite  # what the profile allows, points
    margin: Finite
    outcome: Short
    documents: int = Field(default=0, ge=0)  # that both were scored on; 0 of a suite, and of what older programs kept
    differing: int = Field(default=0, ge=0)  # of them: on how many merge and reference differ

    @property
    def limit(self) -> str:
        """'3', or '3, margin 4' where the two differ."""
        two = f", margin {wording.plain(self.margin)}" if self.margin != self.max_drop else ""
        return wording.plain(self.max_drop) + two


class RunParent(_Kept):
    """A model that went into the merge."""

    name: Short
    ref: Short
    revision: Short | None = None
    digest: Short  # first digits of what its files come to


class RunRecord(_Kept):
    """One run of a flow, as it ended."""

    run: Short  # its id; of Prefect, where that ran it
    flow: Short  # release, compare, sweep
    profile: Short
    ended: Finite  # seconds since the epoch, by a clock that may be wrong: order is that of the lines, not of this
    seconds: Finite = Field(ge=0)  # that it took, by a clock that never jumps
    status: Short  # a RunStatus, or one of a newer program
    message: Annotated[str, _cut(_MESSAGE)]
    overrides: tuple[Short, ...] = Field(default=(), max_length=_MOST)  # what it was told otherwise: KEY=VALUE
    version: Short | None = None
    method: Short = ""  # 'ties of 3 over llama-base'
    recipe: Annotated[str, _cut(_RECIPE)] = ""
    parents: tuple[RunParent, ...] = Field(default=(), max_length=_MOST)
    scores: tuple[RunScore, ...] = Field(default=(), max_length=_MOST)
    perplexity: Finite | None = None  # of the merge over that of the better parent
    perplexity_limit: Finite | None = None
    stages: tuple[RunStage, ...] = Field(default=(), max_length=_MOST)
    bytes_made: int = Field(default=0, ge=0)  # of artifacts that were not in the store before
    bytes_merged: int = Field(default=0, ge=0)  # of the merged checkpoint
    location: Annotated[str, _cut(500)] = ""  # of the release: a directory, or an address
    machine: Short = ""  # 'build-7, 16 cores, Linux x86_64'
    seen_at: Annotated[str, _cut(500)] = ""  # the run's page on a server of Prefect's, where there is one
    report: Short = ""  # page, relative to the directory of reports; empty where none could be kept

    @property
    def why(self) -> str:
        """What a person reads first: the message's first line, or the next where that says only that nothing came."""
        first, *rest = self.message.splitlines() or [""]
        return rest[0].strip() if rest and first.endswith("is not released") else first

    def line(self) -> bytes:
        """As it is kept: JSON on one line, whose last field is a sum over all before it."""
        fields = self.model_dump(mode="json", exclude_defaults=True)
        body = json.dumps(fields, separators=(",", ":")).encode().removesuffix(b"}")
        return body + _SUM + _digits(body) + b'"}'


def parse_record(line: bytes) -> RunRecord:
    """What a line says.

    Raises:
        ValueError: when it is not what was written.
    """
    body, _, ending = line.rpartition(_SUM)
    if ending != _digits(body) + b'"}':
        raise ValueError("a line that is not as it was written")
    return RunRecord.model_validate(json.loads(body + b"}"))


def _digits(body: bytes) -> bytes:
    return hashlib.sha256(body).hexdigest()[:16].encode()
