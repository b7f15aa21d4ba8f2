"""``mergegate check``: everything that can be wrong, found before any weight is read; all at once, worst first."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from pydantic import BaseModel, ConfigDict
from rich.console import Console
from rich.text import Text

from flows.profile import is_recipe, load_profile
from merge_core import Recipe, load_recipe
from merge_core.errors import MergegateError
from tasks.compat import Remark, check_compatibility, require_disk
from tasks.licenses.check import check_licenses, license_table, read_licenses
from tasks.licenses.use import LicenseSettings
from tasks.pin import Found, find_parents
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
    reports = []
    for candidate in profile.candidates():
        found = find_parents(candidate.recipe)
        if not candidate.remedy:
            profile.pin_evidence(found, store().hashes)
        licences = _license_remarks(found, profile.checks.license, profile.root, profile.name)
        reports.append(_report(file, candidate.recipe, found, licences))
    return _joined(reports)


def _joined(reports: Sequence[CheckReport]) -> CheckReport:
    """One report of a recipe and its remedies; what is found of several is said once."""
    remarks = dict.fromkeys(remark for report in reports for remark in report.remarks)
    return CheckReport(
        file=reports[0].file,
        remarks=tuple(sorted(remarks, key=lambda remark: _ORDER.index(remark.severity))),
        summary=tuple(dict.fromkeys(line for report in reports for line in report.summary)),
    )


def _check_recipe(file: Path) -> CheckReport:
    recipe = load_recipe(file)
    found = find_parents(recipe)
    # A recipe does not say what the merge is for: the strictest use is assumed, and its refusal is only a warning.
    remarks, summary = _license_remarks(found, LicenseSettings(), file.parent, file.stem)
    unsure = [
        remark.model_copy(update={"severity": "warn", "remedy": "say in a profile what the merge is for"})
        for remark in remarks
    ]
    return _report(file, recipe, found, (unsure, summary))


def _report(
    file: Path, recipe: Recipe, found: tuple[Found, ...], licences: tuple[list[Remark], list[str]]
) -> CheckReport:
    compatibility = check_compatibility.work(file, recipe, (), found)
    remarks, summary = [*compatibility.remarks, *licences[0]], licences[1]
    try:
        require_disk(compatibility)
    except MergegateError as error:
        remarks.append(_blocking(error))
    if not compatibility.blocking():
        summary = [f"{recipe.summary()}: {compatibility.summary()}", *summary]
    remarks.sort(key=lambda remark: _ORDER.index(remark.severity))
    return CheckReport(file=str(file), remarks=tuple(remarks), summary=tuple(summary))


def _license_remarks(
    found: tuple[Found, ...], settings: LicenseSettings, root: Path, name: str
) -> tuple[list[Remark], list[str]]:
    table = license_table(settings, root)
    licence = check_licenses.work(root, read_licenses(found, table), settings.use(name), table, settings.accepted)
    refusal = licence.refusal()
    return ([_blocking(refusal)], []) if refusal else ([], [f"licences: {licence.summary()}"])


def _blocking(error: MergegateError) -> Remark:
    return Remark(severity="block", where=error.where, found=error.found, expected=error.expected, remedy=error.remedy)
