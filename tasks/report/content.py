"""What a report says: one frozen value, put together by the flow, read by the page, the terminal table and Markdown.

It holds no time, duration or path of a machine: the same merge judged on the same evidence gives the same bytes.
"""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from tasks.evaluate import Scores, Scoring
from tasks.gate import Verdict
from tasks.perplexity import Likelihoods, Windows


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class ReportedModel(_Part):
    """A model of this run and what was measured of it.

    ``name`` is its name in *this* run; the verdict speaks of models by it. The names inside ``scores`` and
    ``likelihoods`` are those of the run that measured, perhaps long ago and under another name, and are never shown.
    """

    name: str
    role: Literal["parent", "base", "merge"]
    ref: str  # as the recipe writes it; for the merge, what the release will be called
    revision: str | None = None  # commit of a Hub repository
    digest: str  # 64 hex digits
    licence: str  # SPDX identifier where there is one
    scores: Scores | None = None  # None when it was not evaluated
    likelihoods: Likelihoods | None = None


class MergedFile(_Part):
    """A file of the merged checkpoint."""

    name: str
    size: int = Field(ge=0)  # bytes
    sha256: str


class Library(_Part):
    """A library whose version decides numbers of this report."""

    name: str
    version: str


class ReportContent(_Part):
    """Everything that stands in a report."""

    name: str  # of the profile
    method: str  # 'ties of 3 over llama-base'
    recipe: str  # YAML
    models: tuple[ReportedModel, ...]  # parents in the recipe's order, the merge among them
    licence: str  # that the merge may carry: 'apache-2.0'
    obligations: tuple[str, ...]  # what it asks of a publisher, a sentence each
    verdict: Verdict
    scoring: Scoring | None = None  # how the models were scored
    windows: Windows | None = None  # how the held-out text was read
    files: tuple[MergedFile, ...]
    versions: tuple[Library, ...]
    reproduce: tuple[str, ...]  # shell commands

    @property
    def parents(self) -> tuple[ReportedModel, ...]:
        """The models that went into the merge, the base among them."""
        return tuple(model for model in self.models if model.role != "merge")
