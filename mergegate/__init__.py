"""Merge models, gate the merge and release it.

::

    import mergegate

    result = mergegate.run("profiles/demo.yaml")
    print(result.verdict, result.version)

Each function runs the command of the same name. :mod:`mergegate.api` defines the functions, and
:mod:`mergegate.results` defines their results. Both are imported when a name is first used, so importing this package
takes no time.

The code below is in three layers. Each is a folder at the top of the repository and is imported as a package of this
one: :mod:`mergegate.flows` orchestrates, :mod:`mergegate.tasks` implements one stage per package, and
:mod:`mergegate.merge_core` merges. Imports only point down.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mergegate.api import check, compare, export, gate, load_profile, merge, plan, reproduce, run, sweep, verify
    from mergegate.flows.operations.check import CheckReport
    from mergegate.flows.operations.plan import MergeForecast
    from mergegate.flows.operations.releases import ExportResult
    from mergegate.flows.profile import Profile
    from mergegate.merge_core.errors import (
        CannotDecide,
        ChangedInput,
        DiskUnavailable,
        Finding,
        InvalidInput,
        MergegateError,
        OutOfTime,
        Refused,
    )
    from mergegate.results import MergeResult, RunResult
    from mergegate.tasks.explain import Remedy
    from mergegate.tasks.gate import GuardVerdict
    from mergegate.tasks.publish.releases import ReproducedRelease, VerifiedRelease
    from mergegate.tasks.stage import StageEnd

# Public name → the module that defines it.
_HOMES = {
    **dict.fromkeys(("load_profile", "check", "plan", "merge", "run", "compare", "gate"), "api"),
    **dict.fromkeys(("sweep", "verify", "reproduce", "export"), "api"),
    **dict.fromkeys(("MergeResult", "RunResult"), "results"),
    **dict.fromkeys(("CannotDecide", "ChangedInput", "DiskUnavailable", "Finding"), "merge_core.errors"),
    **dict.fromkeys(("InvalidInput", "MergegateError", "OutOfTime", "Refused"), "merge_core.errors"),
    **dict.fromkeys(("ReproducedRelease", "VerifiedRelease"), "tasks.publish.releases"),
    "CheckReport": "flows.operations.check",
    "ExportResult": "flows.operations.releases",
    "GuardVerdict": "tasks.gate",
    "MergeForecast": "flows.operations.plan",
    "Profile": "flows.profile",
    "Remedy": "tasks.explain",
    "StageEnd": "tasks.stage",
}

__all__ = [
    "CannotDecide",
    "ChangedInput",
    "CheckReport",
    "DiskUnavailable",
    "ExportResult",
    "Finding",
    "GuardVerdict",
    "InvalidInput",
    "MergeForecast",
    "MergeResult",
    "MergegateError",
    "OutOfTime",
    "Profile",
    "Refused",
    "Remedy",
    "ReproducedRelease",
    "RunResult",
    "StageEnd",
    "VerifiedRelease",
    "check",
    "compare",
    "export",
    "gate",
    "load_profile",
    "merge",
    "plan",
    "reproduce",
    "run",
    "sweep",
    "verify",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
