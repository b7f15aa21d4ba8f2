"""Locate the state of a profile's shadow deployment in the project's home directory."""

from __future__ import annotations

from pathlib import Path

from mergegate.tasks.shadow.settings import ShadowSettings
from mergegate.tasks.stage import home


def routing_file(profile: str) -> Path:
    """Return the path of the profile's routing file."""
    return home() / "shadow" / f"{profile}.json"


def records_url(profile: str, settings: ShadowSettings) -> str:
    """Return the URL of the database that holds the profile's records. Default: a SQLite file in the home directory."""
    return settings.records or f"sqlite:///{home() / 'shadow' / f'{profile}.sqlite'}"
