"""Define the profile settings for comparing a release with its parent on user traffic."""

from __future__ import annotations

import math
import re
from typing import Annotated, Literal, Self
from urllib.parse import urlsplit

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from mergegate.tasks.base.http import plain_address
from mergegate.tasks.base.store import NotInKey
from mergegate.tasks.quality.judge import AnswerLimits, ControlSettings, JudgeServer, JudgmentSettings
from mergegate.tasks.release.publish import ApprovalSettings

_FUNCTION = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")


class FrozenModel(BaseModel):
    """Immutable value that refuses unknown fields."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class ShadowServer(FrozenModel):
    """OpenAI-compatible server of one arm."""

    url: Annotated[str, NotInKey] = Field(
        description="Address of an OpenAI-compatible server, for example http://localhost:8000/v1."
    )
    model: str | None = Field(
        default=None, min_length=1, description="Model name at this server. Default: the name that the client sends."
    )
    api_key_env: Annotated[str | None, NotInKey] = Field(
        default=None,
        min_length=1,
        description="Environment variable with the API key of the server. Requires client_keys_env. Default: the key "
        "of the client.",
    )
    key_paths: Annotated[tuple[str, ...], NotInKey] = Field(
        default=("/v1/chat/completions", "/v1/completions", "/v1/models"),
        description="Paths of requests that are sent with the key in api_key_env. Other requests have no key.",
    )

    @field_validator("url")
    @classmethod
    def _check_url(cls, url: str) -> str:
        return plain_address(url).rstrip("/")


class ShadowJudge(JudgmentSettings, ControlSettings, JudgeServer):
    """Judge that compares the answers of both servers."""


class ShadowRule(AnswerLimits):
    """Conditions for promoting a watched candidate or rolling it back. In a profile: ``shadow: rule``."""

    margin: float = Field(
        default=3.0,
        gt=0,
        lt=50,
        description="Largest shortfall of a promoted candidate's win rate below 50 %, in points.",
    )
    confidence: float = Field(
        default=0.95, gt=0.5, lt=1, description="Confidence of each decision, over all interim looks."
    )
    minimum_hours: float = Field(
        default=24.0,
        ge=0,
        description="Hours of watching before a promotion. The default covers the users of a whole day.",
    )
    minimum_pairs: int = Field(default=100, ge=1, description="Number of judged pairs before a promotion.")
    pairs_per_look: int = Field(default=200, ge=1, description="Largest number of pairs that one look judges.")

    @property
    def bound(self) -> float:
        """Win rate that a candidate must be shown to exceed."""
        return 0.5 - self.margin / 100

    @property
    def log_threshold(self) -> float:
        """Logarithm of ``1 / alpha``, the evidence that a decision requires."""
        return -math.log1p(-self.confidence)


class SwitchRule(FrozenModel):
    """Limits at which the kill switch takes a candidate off the traffic. In a profile: ``shadow: kill_switch``."""

    max_error_percent: float = Field(
        default=5.0,
        gt=0,
        le=100,
        description="Largest failure rate of the candidate, in percent of its last requests. A higher rate kills it.",
    )
    window: int = Field(
        default=200, ge=20, description="Number of recent requests of each arm that the kill switch checks."
    )
    max_slowdown: float = Field(
        default=2.0,
        gt=1,
        description="Largest 95th percentile of the time to first byte, relative to the parent. A slower candidate is "
        "killed.",
    )


class ShadowSettings(FrozenModel):
    """Settings for watching a release on user traffic before it is promoted."""

    parent: ShadowServer = Field(description="Server of the model that users have today.")
    candidate: ShadowServer = Field(description="Server of the release that is compared.")
    listen: str = Field(
        default="127.0.0.1:8100",
        pattern=r"^[\w.:\[\]-]+:\d{1,5}$",
        description="Host and port on which the proxy listens.",
    )
    mode: Literal["mirror", "split"] = Field(
        default="mirror",
        description="With mirror, the candidate receives copies of requests. With split, it answers its share of the "
        "users.",
    )
    share: float = Field(default=0.1, ge=0, le=1, description="Share of the traffic that the candidate receives.")
    session_header: str = Field(
        default="x-session-id", min_length=1, description="Name of the header that identifies a session."
    )
    client_keys_env: Annotated[str | None, NotInKey] = Field(
        default=None,
        min_length=1,
        description="Environment variable with the keys of the clients, separated by spaces. The proxy answers 401 to "
        "requests without one of them. Default: answer all clients.",
    )
    timeout: float = Field(default=600.0, gt=0, description="Longest wait for the next byte of a server, in seconds.")
    client_timeout: float = Field(
        default=30.0,
        gt=0,
        description="Longest total wait for a client that sends its body or reads its answer, in seconds. Each 16 KiB "
        "add a second.",
    )
    max_requests: int = Field(
        default=256, ge=1, description="Largest number of concurrent requests. The proxy answers further ones with 503."
    )
    max_copies: int = Field(
        default=64, ge=1, description="Largest number of concurrent copies. The proxy skips and counts further ones."
    )
    record_queue: int = Field(default=10_000, ge=1, description="Largest number of records that wait for the database.")
    max_body_bytes: int = Field(
        default=1 << 20,
        ge=1024,
        description="Largest size of a recorded body, in bytes. Longer bodies are not recorded.",
    )
    records: str | None = Field(
        default=None,
        description="Database of the records: sqlite:///FILE or postgresql://USER@HOST/DATABASE (with PGPASSWORD). "
        "Default: a SQLite file of the project.",
    )
    redact: tuple[str, ...] = Field(
        default=(), description="Regular expressions. Matches are removed before recording."
    )
    redactor: str | None = Field(default=None, description="Function that redacts a text, as package.module:function.")
    retention_days: float = Field(default=30.0, gt=0, description="Number of days after which records are deleted.")
    rule: ShadowRule = ShadowRule()
    kill_switch: SwitchRule = SwitchRule()
    judge: ShadowJudge = Field(description="Judge that compares the answers.")
    alias: str | None = Field(
        default="production",
        min_length=1,
        description="Alias that a promoted release gets at its target. With null, none.",
    )
    approval: ApprovalSettings | bool = Field(
        default=False, description="Whether a promotion requires manual approval."
    )

    @field_validator("records")
    @classmethod
    def _check_records(cls, records: str | None) -> str | None:
        if records is None:
            return None
        parts = urlsplit(records)
        if parts.scheme.partition("+")[0] not in ("sqlite", "postgresql"):
            raise ValueError("is not an address such as sqlite:///FILE or postgresql://USER@HOST/DATABASE")
        if parts.password:
            raise ValueError("contains a password. Set PGPASSWORD or use ~/.pgpass instead")
        return records

    @field_validator("redact")
    @classmethod
    def _check_redact(cls, redact: tuple[str, ...]) -> tuple[str, ...]:
        for pattern in redact:
            try:
                re.compile(pattern)
            except re.error as error:
                raise ValueError(f"{pattern!r} is not a regular expression: {error}") from None
        return redact

    @field_validator("redactor")
    @classmethod
    def _check_redactor(cls, function: str | None) -> str | None:
        if function is not None and not _FUNCTION.fullmatch(function):
            raise ValueError("is not of the form package.module:function")
        return function

    @model_validator(mode="after")
    def _check_keys(self) -> Self:
        if self.client_keys_env is None and (self.parent.api_key_env or self.candidate.api_key_env):
            raise ValueError("'api_key_env' requires 'client_keys_env'. Without it, anyone could use the server's key")
        return self

    @property
    def address(self) -> tuple[str, int]:
        """Host and port of the proxy."""
        host, _, port = self.listen.rpartition(":")
        return host.strip("[]"), int(port)
