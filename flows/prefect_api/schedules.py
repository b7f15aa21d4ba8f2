"""Read ``schedules.yaml``: the profiles that a project's server runs, their schedules and the notifications.

::

    profiles:
      - {profile: profiles/support.yaml, schedule: "0 3 * * *", timezone: Europe/Berlin}
      - {profile: profiles/coder.yaml}                       # deployed, started manually
      - {profile: profiles/search.yaml, flow: sweep, schedule: every 7 d}
      - {profile: profiles/support.yaml, flow: shadow, schedule: every 1 h}     # evaluates a watched release
    notify:
      - {to: slack, address: $SLACK_WEBHOOK, events: [refused, failed, late]}
    server: {address: "http://10.0.0.1:4200", database: "postgresql://mergegate@10.0.0.2/prefect"}

The file is validated strictly and read once. It contains no secrets: recipients are environment variables, and the
address of a database has no password.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, ClassVar, Literal, Self
from urllib.parse import urlsplit
from zoneinfo import available_timezones

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, model_validator

from mergegate.flows.profile import settings_faults
from mergegate.merge_core.errors import InvalidInput, suggest
from mergegate.merge_core.parsing import LocalPath, read_yaml_mapping
from mergegate.merge_core.wording import parse_duration

SCHEDULES_FILE = "schedules.yaml"
_FORMER_FILE = "nights.yaml"
# Names of the deployments that accept any profile, in addition to those of the profiles.
RESERVED = ("release", "sweep", "shadow")

Occasion = Literal["released", "refused", "failed", "late", "approval"]
"""Occasions of a notification. ``failed``: an error of the program, or a run without a sign of life."""

OCCASIONS: tuple[Occasion, ...] = ("released", "refused", "failed", "late", "approval")


def _known_zone(name: str) -> str:
    if name not in available_timezones():
        raise ValueError(f"no time zone; {suggest(name, [*available_timezones()])}"[:200])
    return name


class SchedulesSection(BaseModel):
    """A group of settings. It is frozen and rejects unknown keys."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class ScheduledProfile(SchedulesSection):
    """A deployed profile and its schedule."""

    profile: LocalPath = Field(description="The file, relative to the project.")
    flow: Literal["release", "sweep", "shadow"] = Field(default="release", description="What is done with it.")
    schedule: str | None = Field(
        default=None, description="Cron in five fields, or 'every 6 h'; absent: only when it is triggered."
    )
    timezone: Annotated[str, AfterValidator(_known_zone)] = Field(default="UTC", description="Of the cron.")

    @property
    def every_s(self) -> float | None:
        """Seconds between two runs, if the schedule is an interval."""
        schedule = (self.schedule or "").strip()
        return parse_duration(schedule.removeprefix("every "), "schedule") if schedule.startswith("every ") else None

    @model_validator(mode="after")
    def _require_valid_schedule(self) -> Self:
        if self.schedule is None:
            return self
        try:
            every = self.every_s
        except InvalidInput as error:
            raise ValueError(f"{self.schedule!r} is no schedule: {error.expected}") from None
        if every is None and len(self.schedule.split()) != 5:
            raise ValueError(f"{self.schedule!r} is no schedule: a cron has five fields; or say 'every 6 h'")
        if every is not None and every < 10:
            raise ValueError(f"{self.schedule!r}: at least 10 s")
        return self


class Recipient(SchedulesSection):
    """A recipient of notifications, and their occasions."""

    renamed_keys: ClassVar[Mapping[str, str]] = {"of": "events"}

    to: Literal["webhook", "slack", "mail", "block"] = Field(
        description="webhook: JSON by POST; slack: an incoming webhook (Mattermost's, too); mail: SMTP; "
        "block: a notification block that is in Prefect already."
    )
    address: str = Field(
        description="$NAME: the environment variable that holds it when it is deployed (a URL; for mail "
        "mailtos://user:password@smtp.host?to=…). Of a block: TYPE/NAME."
    )
    events: tuple[Occasion, ...] = Field(default=OCCASIONS, description="Of what; absent: all.", min_length=1)

    @property
    def variable(self) -> str | None:
        """Environment variable of the address. None if a block has it."""
        return None if self.to == "block" else self.address.removeprefix("$")

    @model_validator(mode="after")
    def _require_no_secret(self) -> Self:
        if self.to == "block" and not re.fullmatch(r"[a-z0-9-]+/[a-z0-9-]+", self.address):
            raise ValueError("address of a block is TYPE/NAME, such as slack-webhook/ops")
        if self.to != "block" and not re.fullmatch(r"\$[A-Za-z_][A-Za-z0-9_]*", self.address):
            raise ValueError("address is $NAME, an environment variable: a secret does not belong into a file")
        return self


class SiteSettings(SchedulesSection):
    """Address of a team's server, and of its database."""

    address: str | None = Field(default=None, description="What workers and people reach it by: http://host:4200.")
    database: str | None = Field(
        default=None, description="postgresql://user@host/name; the password comes from PGPASSWORD or ~/.pgpass."
    )

    @model_validator(mode="after")
    def _require_addresses_without_secrets(self) -> Self:
        if self.address is not None and not re.fullmatch(r"https?://[^/@]+/?", self.address):
            raise ValueError(f"address {self.address!r}: expected http://host:port")
        if self.database is not None:
            if urlsplit(self.database).password:
                raise ValueError("database holds a password: leave it out and set PGPASSWORD, or use ~/.pgpass")
            if not self.database.startswith("postgresql://"):
                raise ValueError("database: expected postgresql://user@host/name")
        return self


class Schedules(SchedulesSection):
    """Content of ``schedules.yaml``, which ``mergegate deploy`` applies to the server."""

    renamed_keys: ClassVar[Mapping[str, str]] = {"tell": "notify"}

    profiles: tuple[ScheduledProfile, ...] = Field(description="What is deployed.")
    notify: tuple[Recipient, ...] = Field(default=(), description="Who is told; absent: nobody.")
    server: SiteSettings = SiteSettings()


def load_schedules(file: Path) -> Schedules:
    """Load ``schedules.yaml``.

    Raises:
        InvalidInput: The file does not exist, is not YAML or is invalid. The error lists all faults.
    """
    if not file.exists():
        if (former := file.with_name(_FORMER_FILE)).exists():
            raise InvalidInput(str(former), found="a file name that was renamed", remedy=f"mv {former} {file}")
        raise InvalidInput(
            str(file),
            found="no such file",
            expected="the profiles that are deployed",
            remedy=f"write {file.name} with 'profiles: [{{profile: profiles/demo.yaml, schedule: \"0 3 * * *\"}}]', "
            "in the directory where you call mergegate",
        )
    return parse_schedules(read_yaml_mapping(file, "the profiles that are deployed (YAML)"), str(file))


def parse_schedules(data: Mapping[str, object], where: str) -> Schedules:
    """Parse the content of ``schedules.yaml`` from plain data.

    Args:
        data: Content of the file.
        where: Name of the file in messages.

    Raises:
        InvalidInput: The data is invalid. The error lists all faults.
    """
    try:
        return Schedules.model_validate(data)
    except ValidationError as error:
        raise settings_faults(error, where, Schedules) from None
