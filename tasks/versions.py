"""Versions of the libraries that decide a stage's numbers; they belong into its key."""

from __future__ import annotations

from importlib.metadata import version


def versions(*distributions: str) -> dict[str, str]:
    """``{'torch': '2.13.0'}``, without importing any of them. A local build tag (``+cpu``) is part of the version."""
    return {name: version(name) for name in distributions}
