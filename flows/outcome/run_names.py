"""Name runs so that users recognize them: ``support-assistant · ties of 3 · 2026-11-21``.

Prefect needs the name before any check runs, even on a server that only lists runs. Building a name therefore reads
little data and never fails. If a profile cannot be read, the name of its file is used.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mergegate.flows.profile import Profile, load_profile, profile_name
from mergegate.merge_core.errors import to_printable

_LONGEST = 60  # characters of one part


def name_run() -> str:
    """Return the name of the current flow run, for Prefect's ``flow_run_name``. Never raises."""
    try:
        from prefect.runtime import flow_run

        return run_name(flow_run.flow_name or "run", flow_run.parameters or {}, time.strftime("%Y-%m-%d"))
    except Exception:  # a missing name must not fail a run
        return f"run · {time.strftime('%Y-%m-%d')}"


def run_name(flow: str, parameters: Mapping[str, Any], day: str) -> str:
    """Return the name of a run of ``flow`` with ``parameters`` on ``day``."""
    if "candidate" in parameters:
        sides = (str(parameters[side]) for side in ("candidate", "reference"))
        return f"{' against '.join(_cut(to_printable(Path(side).name or side)) for side in sides)} · {day}"
    profile = parameters.get("profile")
    if not isinstance(profile, Profile | Path | str):
        return f"{flow} · {day}"
    method = _method(profile)
    subject = f"sweep of {method}" if flow == "sweep" and method else method or (flow if flow != "release" else "")
    subject = flow if flow == "shadow" else subject
    return " · ".join(part for part in (_cut(profile_name(profile)), _cut(subject), day) if part)


def _method(profile: Profile | Path | str) -> str:
    """Return the method of a profile, such as ``ties of 3``, or an empty string if the recipe cannot be read."""
    try:
        candidate = load_profile(profile if isinstance(profile, Profile) else Path(profile)).candidates()[0]
        return candidate.summary.partition(" over ")[0]
    except Exception:  # the flow reports the error
        return ""


def _cut(text: str) -> str:
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 1]}…"
