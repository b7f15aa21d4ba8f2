"""``mergegate check``: everything that can be wrong, found before any weight is read; all at once, worst first."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path

from pydantic import BaseModel, ConfigDict
from rich.console import Console
from rich.text import Text

from flows.profile import Profile, is_recipe, load_profile
from merge_core import Recipe, load_recipe
from merge_core.errors import MergegateError
from tasks.checkpoints import ResolvedCheckpoint, search_parents
from tasks.evaluation import find_backend
from tasks.merge import MergeSettings, numerics
from tasks.preflight import Compatibility, Remark, check_compatibility, machine_remarks, remark_of, this_machine
from tasks.preflight.licenses import (
    AncestorLookup,
    LicenseSettings,
    check_licenses,
    hub_ancestors,
    license_table,
    read_licenses,
)
from tasks.publish.targets import check_target
from tasks.serve import check_server
from tasks.stage import store

_STYLES = {"block": ("✗", "bold red"), "warn": ("!", "yellow"), "info": ("·", "dim")}
_ORDER = ("block", "warn", "info")


class CheckReport(BaseModel):
    """What a check found."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    file: str
    remarks: tuple[Remark, ...]
    summary: tuple[str, ...]

    @property
    def exit_code(self) -> int:
        """3 if any finding blocks."""
        return 3 if any(remark.severity == "block" for remark in self.remarks) else 0


def check_file(file: Path, console: Console, as_json: bool) -> int:
    """Check a profile or a recipe, say what was found, and return the exit code.

    Raises:
        InvalidInput: for a file that cannot mean anything.
    """
    report = _check_recipe(file) if is_recipe(file) else _check_profile(file)
    if as_json:
        print(json.dumps(report.model_dump(mode="json"), indent=1))
        return report.exit_code
    for remark in report.remarks:
        glyph, style = _STYLES[remark.severity]
        console.print(Text(f"{glyph} {remark}", style=style))
        if remark.expected:
            console.print(f"    expected: {remark.expected}")
        if remark.remedy:
            console.print(f"    remedy:   {remark.remedy}")
    for line in report.summary:
        console.print(Text(f"✓ {line}" if report.exit_code == 0 else f"· {line}"))
    return report.exit_code


def _check_profile(file: Path) -> CheckReport:
    profile = load_profile(file)
    candidates = profile.candidates()
    search = search_parents([candidate.recipe for candidate in candidates])
    reports = [_elsewhere(file, profile, search.problems)]
    dtypes, ask = _dtypes(profile), hub_ancestors()
    for candidate, found in zip(candidates, search.found, strict=True):
        if not found:
            continue  # why not is among the problems
        licences = _license_remarks(found, profile.checks.license, profile.root, profile.name, ask)
        if len(found) < len(candidate.recipe.references()):
            # Half a family may be forbidden, but neither allowed nor compared.
            reports.append(CheckReport(file=str(file), remarks=tuple(licences[0]), summary=()))
            continue
        if not candidate.remedy:
            profile.pin_evidence(found, store().hashes)
        reports.append(_report(file, candidate.recipe, found, licences, profile.merge, dtypes))
    return _joined(reports)


def _elsewhere(file: Path, profile: Profile, problems: Sequence[MergegateError]) -> CheckReport:
    """What is wrong outside the recipe: parents that cannot be had, a target that cannot be written, no server."""
    remarks = [remark_of(problem) for problem in problems]
    for check in (partial(check_target, profile.publish), partial(check_server, profile.serve)):
        try:
            check(profile.root)
        except MergegateError as error:
            remarks.append(remark_of(error))
    return CheckReport(file=str(file), remarks=tuple(remarks), summary=())


def _dtypes(profile: Profile) -> list[str]:
    """In which the models will be loaded here to be measured."""
    found = [str(profile.perplexity.dtype)] if profile.perplexity else []
    if profile.evaluate and find_backend(profile.evaluate.scoring.backend).loads_here:
        found.append(profile.evaluate.scoring.dtype)
    return found


def _joined(reports: Sequence[CheckReport]) -> CheckReport:
    """One report of a recipe and its remedies; what is found of several is said once."""
    return CheckReport(
        file=reports[0].file,
        remarks=_worst_first(remark for report in reports for remark in report.remarks),
        summary=tuple(dict.fromkeys(line for report in reports for line in report.summary)),
    )


def _check_recipe(file: Path) -> CheckReport:
    recipe = load_recipe(file)
    search = search_parents([recipe])
    if search.problems:
        remarks = tuple(remark_of(problem) for problem in search.problems)
        return CheckReport(file=str(file), remarks=remarks, summary=())
    (found,) = search.found
    # A recipe does not say what the merge is for: the strictest use is assumed, and its refusal is only a warning.
    licences, summary = _license_remarks(found, LicenseSettings(), file.parent, file.stem, hub_ancestors())
    unsure = [
        remark.model_copy(update={"severity": "warn", "remedy": "say in a profile what the merge is for"})
        for remark in licences
    ]
    return _report(file, recipe, found, (unsure, summary), MergeSettings(), ())


def _report(
    file: Path,
    recipe: Recipe,
    found: tuple[ResolvedCheckpoint, ...],
    licences: tuple[list[Remark], list[str]],
    merging: MergeSettings,
    dtypes: Sequence[str],
) -> CheckReport:
    remarks, summary = licences
    try:
        compatibility = check_compatibility.work(file, recipe, (), found)
    except MergegateError as error:
        remarks = [*remarks, remark_of(error)]
    else:
        remarks = [*remarks, *compatibility.remarks, *_machine(compatibility, found, merging, dtypes)]
        if not compatibility.blocking():
            summary = [f"{recipe.summary()}: {compatibility.summary()}", *summary]
    return CheckReport(file=str(file), remarks=_worst_first(remarks), summary=tuple(summary))


def _machine(
    compatibility: Compatibility, found: Sequence[ResolvedCheckpoint], merging: MergeSettings, dtypes: Sequence[str]
) -> tuple[Remark, ...]:
    device = numerics(merging).where
    machine = this_machine(compatibility, found, device)
    return machine_remarks(compatibility, machine, device=device, dtypes=dtypes)


def _worst_first(remarks: Iterable[Remark]) -> tuple[Remark, ...]:
    return tuple(sorted(dict.fromkeys(remarks), key=lambda remark: _ORDER.index(remark.severity)))


def _license_remarks(
    found: tuple[ResolvedCheckpoint, ...], settings: LicenseSettings, root: Path, name: str, ask: AncestorLookup
) -> tuple[list[Remark], list[str]]:
    table = license_table(settings, root)
    licence = check_licenses.work(root, read_licenses(found, table, ask), settings.use(name), table, settings.accepted)
    refusal = licence.refusal()
    return ([remark_of(refusal)], []) if refusal else ([], [f"licences: {licence.summary()}"])
