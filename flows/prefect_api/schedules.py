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

The file is validated strictly and read once. It contains no secrets: the address of a recipient is the name of an
environment variable, and the URL of a database has no password.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Literal, Self
from urllib.parse import urlsplit
from zoneinfo import available_timezones

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator

from mergegate.flows.profile import parse_settings
from mergegate.merge_core.errors import InvalidInput, suggest
from mergegate.merge_core.parsing import LocalPath, read_yaml_mapping
from mergegate.merge_core.wording import parse_duration

SCHEDULES_FILE = "schedules.yaml"
# Names of the deployments that accept any profile. No profile may have one of these names.
RESERVED = ("release", "sweep", "shadow")

Occasion = Literal["released", "refused", "failed", "late", "approval"]
"""Occasions of a notification. ``failed`` is an unexpected error, or a run that stopped sending events."""

OCCASIONS: tuple[Occasion, ...] = ("released", "refused", "failed", "late", "approval")


def is_server_address(address: str) -> bool:
    """Return whether ``address`` is the URL of an HTTP server that a client can connect to: a host and a valid port."""
    import httpx

    try:
        parts = urlsplit(address)
        httpx.URL(address)
        (parts.hostname or "").encode("idna")
        return parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except (ValueError, httpx.InvalidURL):
        return False


def _require_known_zone(name: str) -> str:
    if name not in available_timezones():
        raise ValueError(f"unknown time zone; {suggest(name, [*available_timezones()])}"[:200])
    return name


class SchedulesSection(BaseModel):
    """A group of settings. It is frozen and rejects unknown keys."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class ScheduledProfile(SchedulesSection):
    """A deployed profile and its schedule."""

    profile: LocalPath = Field(description="Profile file, relative to the project.")
    flow: Literal["release", "sweep", "shadow"] = Field(
        default="release", description="Flow to run: release, sweep or shadow."
    )
    schedule: str | None = Field(
        default=None,
        description="Cron in five fields, or 'every 6 h'. Default: the profile runs only when it is triggered.",
    )
    timezone: Annotated[str, AfterValidator(_require_known_zone)] = Field(
        default="UTC", description="Time zone of the cron schedule."
    )

    @property
    def every_s(self) -> float | None:
        """Seconds between two runs if the schedule is an interval, otherwise None."""
        schedule = (self.schedule or "").strip()
        return parse_duration(schedule.removeprefix("every "), "schedule") if schedule.startswith("every ") else None

    @model_validator(mode="after")
    def _require_valid_schedule(self) -> Self:
        if self.schedule is None:
            return self
        try:
            every = self.every_s
        except InvalidInput as error:
            raise ValueError(f"{self.schedule!r} is not a schedule; expected {error.expected}") from None
        if every is None and len(self.schedule.split()) != 5:
            raise ValueError(f"{self.schedule!r} is not a schedule; expected a cron in five fields, or 'every 6 h'")
        if every is not None and every < 10:
            raise ValueError(f"{self.schedule!r} is too short; expected at least 10 s")
        return self


class Recipient(SchedulesSection):
    """A recipient of notifications, and their occasions."""

    to: Literal["webhook", "slack", "mail", "block"] = Field(
        description="webhook: JSON by POST; slack: an incoming webhook (also of Mattermost); mail: SMTP; "
        "block: an existing notification block in Prefect."
    )
    address: str = Field(
        description="$NAME, the environment variable with the address during deployment (a URL; for mail "
        "mailtos://user:password@smtp.host?to=…). For a block: TYPE/NAME."
    )
    events: tuple[Occasion, ...] = Field(
        default=OCCASIONS, description="Occasions to notify of. Default: all.", min_length=1
    )

    @property
    def variable(self) -> str | None:
        """Environment variable that contains the address. None for a block, which stores its address in Prefect."""
        return None if self.to == "block" else self.address.removeprefix("$")

    @model_validator(mode="after")
    def _require_no_secret(self) -> Self:
        if self.to == "block" and not re.fullmatch(r"[a-z0-9-]+/[a-z0-9-]+", self.address):
            raise ValueError("the address of a block is TYPE/NAME, for example slack-webhook/ops")
        if self.to != "block" and not re.fullmatch(r"\$[A-Za-z_][A-Za-z0-9_]*", self.address):
            raise ValueError(
                "address must be $NAME, an environment variable, because the file must not contain secrets"
            )
        return self


class SiteSettings(SchedulesSection):
    """Address of a team's server, and of its database."""

    address: str | None = Field(default=None, description="URL of the server for workers and users: http://host:4200.")
    database: str | None = Field(
        default=None,
        description="Database of the server: postgresql://user@host/name. "
        "The password comes from PGPASSWORD or ~/.pgpass.",
    )

    @model_validator(mode="after")
    def _require_addresses_without_secrets(self) -> Self:
        is_bare = re.fullmatch(r"https?://[^/@]+/?", self.address or "")
        if self.address is not None and not (is_bare and is_server_address(self.address)):
            raise ValueError(f"address {self.address!r}: expected http://host:port")
        if self.database is not None:
            if urlsplit(self.database).password:
                raise ValueError("database contains a password; omit it, and set PGPASSWORD or use ~/.pgpass")
            if not self.database.startswith("postgresql://"):
                raise ValueError("database: expected postgresql://user@host/name")
        return self


class Schedules(SchedulesSection):
    """Content of ``schedules.yaml``, which ``mergegate deploy`` applies to the server."""

    profiles: tuple[ScheduledProfile, ...] = Field(description="Profiles to deploy.")
    notify: tuple[Recipient, ...] = Field(default=(), description="Recipients of notifications. Default: none.")
    server: SiteSettings = SiteSettings()


def load_schedules(file: Path) -> Schedules:
    """Load ``schedules.yaml``.

    Raises:
        InvalidInput: The file does not exist, is not YAML or is invalid. The error lists all faults.
    """
    if not file.exists():
        raise InvalidInput(
            str(file),
            found="no such file",
            expected="a file with the profiles to deploy",
            remedy=f"write {file.name} with 'profiles: [{{profile: profiles/demo.yaml, schedule: \"0 3 * * *\"}}]', "
            "in the directory where you run mergegate",
        )
    return parse_schedules(read_yaml_mapping(file, "the profiles to deploy (YAML)"), str(file))


def parse_schedules(data: Mapping[str, object], location: str) -> Schedules:
    """Parse the content of ``schedules.yaml``. ``location`` is the name of the file in messages.

    Raises:
        InvalidInput: The data is invalid. The error lists all faults.
    """
    return parse_settings(Schedules, data, location)
