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

if TYPE_CHECKING:  # the aliases tell type checkers that the names are public
    from mergegate.api import check as check
    from mergegate.api import compare as compare
    from mergegate.api import export as export
    from mergegate.api import gate as gate
    from mergegate.api import load_profile as load_profile
    from mergegate.api import merge as merge
    from mergegate.api import plan as plan
    from mergegate.api import reproduce as reproduce
    from mergegate.api import run as run
    from mergegate.api import sweep as sweep
    from mergegate.api import verify as verify
    from mergegate.flows.operations.check import CheckReport as CheckReport
    from mergegate.flows.operations.plan import MergeForecast as MergeForecast
    from mergegate.flows.operations.releases import ExportResult as ExportResult
    from mergegate.flows.profile import Profile as Profile
    from mergegate.merge_core.errors import CannotDecide as CannotDecide
    from mergegate.merge_core.errors import ChangedInput as ChangedInput
    from mergegate.merge_core.errors import DiskUnavailable as DiskUnavailable
    from mergegate.merge_core.errors import Finding as Finding
    from mergegate.merge_core.errors import InvalidInput as InvalidInput
    from mergegate.merge_core.errors import MergegateError as MergegateError
    from mergegate.merge_core.errors import OutOfTime as OutOfTime
    from mergegate.merge_core.errors import Refused as Refused
    from mergegate.results import MergeResult as MergeResult
    from mergegate.results import RunResult as RunResult
    from mergegate.tasks.base.stage import StageEnd as StageEnd
    from mergegate.tasks.quality.gate import GuardVerdict as GuardVerdict
    from mergegate.tasks.release.explain import Remedy as Remedy
    from mergegate.tasks.release.publish.releases import ReproducedRelease as ReproducedRelease
    from mergegate.tasks.release.publish.releases import VerifiedRelease as VerifiedRelease

# Public name → the module that defines it.
_HOMES = {
    **dict.fromkeys(("load_profile", "check", "plan", "merge", "run", "compare", "gate"), "api"),
    **dict.fromkeys(("sweep", "verify", "reproduce", "export"), "api"),
    **dict.fromkeys(("MergeResult", "RunResult"), "results"),
    **dict.fromkeys(("CannotDecide", "ChangedInput", "DiskUnavailable", "Finding"), "merge_core.errors"),
    **dict.fromkeys(("InvalidInput", "MergegateError", "OutOfTime", "Refused"), "merge_core.errors"),
    **dict.fromkeys(("ReproducedRelease", "VerifiedRelease"), "tasks.release.publish.releases"),
    "CheckReport": "flows.operations.check",
    "ExportResult": "flows.operations.releases",
    "GuardVerdict": "tasks.quality.gate",
    "MergeForecast": "flows.operations.plan",
    "Profile": "flows.profile",
    "Remedy": "tasks.release.explain",
    "StageEnd": "tasks.base.stage",
}

__all__ = sorted(_HOMES)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
