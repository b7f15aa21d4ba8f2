# stand-in of h-G
"""What a profile says about watching a release: which two servers, how much of the traffic, when it is promoted."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from merge_core.store import NotInKey
from tasks.judge import JudgeServer, Judging
from tasks.publish import ApprovalSettings
from tasks.shadow.evidence import ShadowRule
from tasks.shadow.switch import SwitchRule


class ShadowServer(BaseModel):
    """One of the two servers."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    url: Annotated[str, NotInKey] = Field(description="Of an OpenAI-compatible server: http://localhost:8000/v1")
    model: str | None = Field(default=None, description="What it calls the model; absent: as the client says.")
    api_key_env: Annotated[str | None, NotInKey] = Field(
        default=None, description="Environment variable that holds its key."
    )


class ShadowJudge(Judging, JudgeServer):
    """Who compares the answers."""


class ShadowSettings(BaseModel):
    """How a release is watched on users' traffic before it is promoted."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    parent: ShadowServer = Field(description="What users are served by today.")
    candidate: ShadowServer = Field(description="The release that is watched.")
    listen: str = Field(default="127.0.0.1:8100", description="Where the proxy listens.")
    mode: Literal["mirror", "split"] = Field(default="mirror", description="Copies to the candidate, or its share.")
    share: float = Field(default=0.1, ge=0, le=1, description="Of the traffic that the candidate sees.")
    session_header: str = Field(default="x-session-id", description="What names a session.")
    in_flight: int = Field(default=256, ge=1, description="Requests at a time.")
    copies: int = Field(default=64, ge=0, description="Copies at a time.")
    queue: int = Field(default=10_000, ge=1, description="Records that wait to be written.")
    body_limit: int = Field(default=1 << 20, ge=0, description="Bytes of a body that are kept.")
    records: str | None = Field(default=None, description="SQLAlchemy URL; absent: a file of the project.")
    redact: tuple[str, ...] = Field(default=(), description="Regular expressions of what is not kept.")
    redact_with: str | None = Field(default=None, description="package.module:function, text to text.")
    keep_days: float = Field(default=30, gt=0, description="After which records go.")
    rule: ShadowRule = ShadowRule()
    switch: SwitchRule = SwitchRule()
    judge: ShadowJudge = Field(description="Who compares the answers.")
    alias: str | None = Field(default="production", description="Name of what is promoted, at its target.")
    approval: ApprovalSettings | bool = Field(default=False, description="Whether a person says yes first.")
