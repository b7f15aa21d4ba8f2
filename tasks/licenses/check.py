"""The licence check of a run: from the parents' cards to a verdict that stops the flow or says what it asks for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from merge_core.errors import Refused
from tasks.licenses.algebra import Combination, combine
from tasks.licenses.case import Parent
from tasks.licenses.resolve import lineage
from tasks.licenses.table import LicenseTable, load_table
from tasks.licenses.use import LicenseSettings, Use
from tasks.pin import Found
from tasks.stage import StageValue, stage


class LicenseVerdict(StageValue):
    """What the merged weights may be, under which licence, and what that asks for."""

    combination: Combination
    licenses: dict[str, str]  # parent's name -> licence it declares

    def summary(self) -> str:
        given = ", ".join(dict.fromkeys(self.licenses.values()))
        if self.combination.status != "allowed":
            return f"{given}: {self.combination.reasons[0].sentence}"
        asked = list(dict.fromkeys(obligation.kind.replace("_", " ") for obligation in self.combination.obligations))
        return f"{given} → {self.result}" + (f", obligations: {', '.join(asked)}" if asked else "")

    @property
    def result(self) -> str:
        """Licence of the merge, in a word."""
        return self.combination.license_name or self.combination.license or "none"

    def refusal(self) -> Refused | None:
        if self.combination.status == "allowed":
            return None
        worst, *others = [reason for reason in self.combination.reasons if reason.status != "allowed"]
        also = "".join(f"\n  also: {reason.sentence}" for reason in others)
        return Refused(f"licences ({worst.rule})", found=worst.sentence + also, remedy=worst.remedy)


@stage("licenses", version=1)
def check_licenses(
    out: Path,
    declared: Mapping[str, Sequence[Parent]],
    use: Use,
    table: LicenseTable,
    accepted: Mapping[str, str],
) -> LicenseVerdict:
    """Combine the licences of all parents and of everything they were made from.

    Args:
        declared: Per parent of the merge, itself first and then its ancestors (``read_licenses``).
    """
    everyone = [model for family in declared.values() for model in family]
    return LicenseVerdict(
        combination=combine(everyone, use, table, accepted),
        licenses={name: family[0].license.id for name, family in declared.items()},
    )


def read_licenses(parents: Sequence[Found], table: LicenseTable) -> dict[str, tuple[Parent, ...]]:
    """What the cards of the parents and of their readable ancestors declare. Reads cards and licence files only."""
    known = {key: parent.directory for parent in parents for key in (parent.ref, parent.name)}

    def find(name: str, beside: Path) -> Path | None:
        return known.get(name)

    return {parent.name: lineage(parent.directory, find, table, parent.name) for parent in parents}


def license_table(settings: LicenseSettings, root: Path) -> LicenseTable:
    """The facts that ship with mergegate, with the profile's own entries over them."""
    return load_table(root / settings.table if settings.table else None)
