"""Define the profile settings for comparing a release with its parent on user traffic."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal
from urllib.parse import urlsplit

from pydantic import BaseModel, ConfigDict, Field, field_validator

from mergegate.tasks.http import plain_address
from mergegate.tasks.judge import JudgeServer, JudgmentSettings
from mergegate.tasks.publish import ApprovalSettings
from mergegate.tasks.shadow.evidence import ShadowRule
from mergegate.tasks.shadow.switch import SwitchRule
from mergegate.tasks.store import NotInKey

_FUNCTION = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")


class ShadowServer(BaseModel):
    """OpenAI-compatible server of one arm."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    url: Annotated[str, NotInKey] = Field(description="Of an OpenAI-compatible server: http://localhost:8000/v1")
    model: str | None = Field(
        default=None, min_length=1, description="What it calls the model; absent: as the client says."
    )
    api_key_env: Annotated[str | None, NotInKey] = Field(
        default=None, min_length=1, description="Environment variable that holds its key; absent: the client's own."
    )

    @field_validator("url")
    @classmethod
    def _check_url(cls, url: str) -> str:
        return plain_address(url).rstrip("/")


class ShadowJudge(JudgmentSettings, JudgeServer):
    """Judge that compares the answers of both servers."""


class ShadowSettings(BaseModel):
    """Settings for watching a release on user traffic before it is promoted."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    renamed_keys: ClassVar[Mapping[str, str]] = {
        "in_flight": "max_requests",
        "copies": "max_copies",
        "queue": "record_queue",
        "body_limit": "max_body_bytes",
        "redact_with": "redactor",
        "keep_days": "retention_days",
        "switch": "kill_switch",
    }

    parent: ShadowServer = Field(description="What serves users today.")
    candidate: ShadowServer = Field(description="What serves the release that is watched.")
    listen: str = Field(default="127.0.0.1:8100", pattern=r"^[\w.:\[\]-]+:\d{1,5}$", description="Host and port.")
    mode: Literal["mirror", "split"] = Field(
        default="mirror", description="mirror: the candidate gets copies; split: it answers its share of the users."
    )
    share: float = Field(default=0.1, ge=0, le=1, description="Of the traffic that the candidate sees.")
    session_header: str = Field(default="x-session-id", min_length=1, description="The header that names a session.")
    timeout: float = Field(default=600.0, gt=0, description="Seconds that a server may take for its next byte.")
    max_requests: int = Field(
        default=256, ge=1, description="Most requests at a time. Further ones are answered with 503."
    )
    max_copies: int = Field(
        default=64, ge=1, description="Most copies at a time. Further ones are skipped and counted."
    )
    record_queue: int = Field(default=10_000, ge=1, description="Most records that may wait for the database.")
    max_body_bytes: int = Field(
        default=1 << 20, ge=1024, description="Bytes of a body that is kept; of a longer one nothing is."
    )
    records: str | None = Field(
        default=None,
        description="sqlite:///FILE or postgresql://USER@HOST/DATABASE (PGPASSWORD); absent: a file of the project.",
    )
    redact: tuple[str, ...] = Field(default=(), description="Regular expressions: what they match is not kept.")
    redactor: str | None = Field(default=None, description="package.module:function that takes a text to a text.")
    retention_days: float = Field(default=30.0, gt=0, description="Days after which records go.")
    rule: ShadowRule = ShadowRule()
    kill_switch: SwitchRule = SwitchRule()
    judge: ShadowJudge = Field(description="Who compares the answers.")
    alias: str | None = Field(
        default="production",
        min_length=1,
        description="What a promoted release is called at its target; null: nothing.",
    )
    approval: ApprovalSettings | bool = Field(default=False, description="Whether a person says yes before.")

    @field_validator("records")
    @classmethod
    def _check_records(cls, records: str | None) -> str | None:
        if records is None:
            return None
        parts = urlsplit(records)
        if parts.scheme.partition("+")[0] not in ("sqlite", "postgresql"):
            raise ValueError("sqlite:///FILE or postgresql://USER@HOST/DATABASE is expected")
        if parts.password:
            raise ValueError("holds a password; set PGPASSWORD, or use ~/.pgpass")
        return records

    @field_validator("redact")
    @classmethod
    def _check_redact(cls, redact: tuple[str, ...]) -> tuple[str, ...]:
        for pattern in redact:
            try:
                re.compile(pattern)
            except re.error as error:
                raise ValueError(f"{pattern!r} is no regular expression: {error}") from None
        return redact

    @field_validator("redactor")
    @classmethod
    def _check_redactor(cls, function: str | None) -> str | None:
        if function is not None and not _FUNCTION.fullmatch(function):
            raise ValueError("package.module:function is expected")
        return function

    @property
    def address(self) -> tuple[str, int]:
        """Host and port of the proxy."""
        host, _, port = self.listen.rpartition(":")
        return host.strip("[]"), int(port)
