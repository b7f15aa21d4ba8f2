"""What people recognise a run by: ``support-assistant · ties of 3 · 2026-11-21``.

Names are asked for before anything is checked, also by a server that only lists runs. So they come from what can be
read at once, and never fail: of a profile that cannot be read its file's name has to do.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mergegate.flows.profile import Profile, load_profile, name_in
from mergegate.merge_core.errors import shown

_LONGEST = 60  # characters of one part


def profile_name(profile: Path | Profile | str) -> str:
    """The profile's own name, also of one that is invalid; of one that has none, its file's. Never an error."""
    if isinstance(profile, Profile):
        return profile.name
    for read in (lambda file: load_profile(file).name, name_in):
        try:
            if name := read(Path(profile)):
                return name
        except Exception:  # what is wrong with it is said by whoever needs it
            continue
    return shown(Path(profile).stem) or "profile"


def name_run() -> str:
    """Name of the flow run that begins now, from its parameters: Prefect's ``flow_run_name``. Never an error."""
    try:
        from prefect.runtime import flow_run

        return run_name(flow_run.flow_name or "run", flow_run.parameters or {}, time.strftime("%Y-%m-%d"))
    except Exception:  # no name is worth a run
        return f"run · {time.strftime('%Y-%m-%d')}"


def run_name(flow: str, parameters: Mapping[str, Any], day: str) -> str:
    """The name of a run of a flow with these parameters on that day."""
    if "candidate" in parameters:
        sides = (_last_part(str(parameters[side])) for side in ("candidate", "reference"))
        return f"{' against '.join(sides)} · {day}"
    profile = parameters.get("profile")
    if not isinstance(profile, Profile | Path | str):
        return f"{flow} · {day}"
    method = _method(profile)
    what = f"sweep of {method}" if flow == "sweep" and method else method or (flow if flow != "release" else "")
    what = flow if flow == "shadow" else what
    return " · ".join(part for part in (_cut(profile_name(profile)), _cut(what), day) if part)


def _method(profile: Profile | Path | str) -> str:
    """``ties of 3``; empty where the recipe cannot be read."""
    try:
        own = load_profile(profile if isinstance(profile, Profile) else Path(profile)).candidates()[0]
        return own.recipe.summary().partition(" over ")[0]
    except Exception:  # as above
        return ""


def _last_part(reference: str) -> str:
    return _cut(shown(Path(reference).name or reference))


def _cut(text: str) -> str:
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 1]}…"
