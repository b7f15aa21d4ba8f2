"""Fixtures of the stand-in Hub, and import paths for the helpers that build it."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path += [str(Path(__file__).resolve().parents[1] / folder) for folder in ("publish", "merge_core")]

from hub_family import models, online, server

__all__ = ["models", "online", "server"]
