"""Where the shadow of a profile keeps its state in the project's home."""

from __future__ import annotations

from pathlib import Path

from mergegate.tasks.shadow.settings import ShadowSettings
from mergegate.tasks.stage import home


def routing_file(profile: str) -> Path:
    """Where requests of a profile's shadow go is written here."""
    return home() / "shadow" / f"{profile}.json"


def records_url(profile: str, settings: ShadowSettings) -> str:
    """The address of the database that a profile's records are in."""
    return settings.records or f"sqlite:///{home() / 'shadow' / f'{profile}.sqlite'}"
