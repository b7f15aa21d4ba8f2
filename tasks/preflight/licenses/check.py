"""The licence check of a run: from the parents' cards to a verdict that stops the flow or says what it asks for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict

from mergegate.merge_core.errors import Refused
from mergegate.merge_core.recipe import is_foreign_path, name_in_path
from mergegate.tasks.checkpoints import ResolvedCheckpoint
from mergegate.tasks.preflight.licenses.algebra import Combination, combine_licenses
from mergegate.tasks.preflight.licenses.ancestors import AncestorLookup, hub_ancestors
from mergegate.tasks.preflight.licenses.case import LicensedParent
from mergegate.tasks.preflight.licenses.resolve import CardSource, NotRead, lineage, quoted
from mergegate.tasks.preflight.licenses.table import LicenseTable, load_table
from mergegate.tasks.preflight.licenses.use import LicenseSettings, Use
from mergegate.tasks.stage import StageValue, value_stage
from mergegate.tasks.store import NotInKey


class Declared(BaseModel):
    """What all cards say that could be read.

    Attributes:
        families: Per parent of the merge, by name: itself first and then its ancestors.
        texts: Content of the licence files beside them, by sha256.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    families: dict[str, tuple[LicensedParent, ...]]
    texts: Annotated[dict[str, str], NotInKey]  # the hashes are in the families


class Ancestor(BaseModel):
    """A model that a parent was made from, as it was read for the verdict.

    Attributes:
        license: Identifier in the licence table.
        revision: Commit of the Hub; None for a local directory. A later commit that declares the same keeps this one.
        own_text: Content of the licence file beside it; empty when there is none, or several.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str
    license: str
    revision: str | None
    own_text: str


class LicenseVerdict(StageValue):
    """What the merged weights may be, under which licence, and what that asks for.

    Attributes:
        combination: The verdict with its reasons, obligations and acceptances.
        licenses: Parent's name -> licence that it declares.
        ancestors: All further models that the parents go back to, by name.
        unread: Ancestors that could not be read, each with the reason.
    """

    combination: Combination
    licenses: dict[str, str]
    ancestors: tuple[Ancestor, ...]
    unread: dict[str, str]

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

    @property
    def all_names(self) -> tuple[str, ...]:
        """Names of all models in the verdict, as recipes and cards write them and as sentences quote them."""
        names = (*self.licenses, *(ancestor.name for ancestor in self.ancestors), *self.unread)
        return (*names, *map(quoted, names))

    def refusal(self) -> Refused | None:
        if self.combination.status == "allowed":
            return None
        worst, *others = [reason for reason in self.combination.reasons if reason.status != "allowed"]
        also = "".join(f"\n  also: {reason.sentence}" for reason in others)
        return Refused(f"licences ({worst.rule})", found=worst.sentence + also, remedy=worst.remedy)


@value_stage("licenses", version=2)
def check_licenses(
    declared: Declared,
    use: Use,
    table: LicenseTable,
    accepted: Mapping[str, str],
) -> LicenseVerdict:
    """Combine the licences of all parents and of everything they were made from.

    Args:
        declared: What the cards say (``read_licenses``).
    """
    everyone = [model for family in declared.families.values() for model in family]
    ancestors = {
        model.name: Ancestor(
            name=model.name,
            license=model.license.id,
            revision=model.revision,
            own_text=declared.texts.get(model.own_file or "", ""),
        )
        for family in declared.families.values()
        for model in family[1:]
        if model.name not in declared.families
    }
    return LicenseVerdict(
        combination=combine_licenses(everyone, use, table, accepted),
        licenses={name: family[0].license.id for name, family in declared.families.items()},
        ancestors=tuple(ancestors[name] for name in sorted(ancestors)),
        unread={unread.name: unread.why for model in everyone for unread in model.unread},
    )


def read_licenses(
    parents: Sequence[ResolvedCheckpoint], table: LicenseTable, look_up: AncestorLookup | None = None
) -> Declared:
    """What the cards of the parents and of their readable ancestors declare, be they here or on the Hub.

    Reads cards and licence files only, and raises nothing: what cannot be read counts as unread.

    Args:
        look_up: How ancestors on the Hub are read; it remembers, so a recipe and its remedies share one. None: anew.
    """
    known = {
        key: CardSource(parent.directory, parent.revision)
        for parent in parents
        for key in (parent.ref.partition("+")[0].partition("@")[0], parent.ref, parent.name)
    }
    # An adapter has a card of its own, and binds like the model that it is applied to.
    sources = {parent.name: CardSource(parent.directory, parent.revision) for parent in parents}
    sources |= {
        one.adapter.ref: CardSource(one.adapter.directory, one.adapter.revision) for one in parents if one.adapter
    }
    names = {parent.directory.resolve(): parent.name for parent in parents}
    look_up = look_up or hub_ancestors()

    def find(name: str, descendant: CardSource) -> CardSource | NotRead:
        if name not in known and is_foreign_path(name):
            # A path of the machine on which the descendant was trained. A parent of that name is taken for it; its
            # license binds the merge in any case.
            called = name_in_path(name)
            fitting = {
                parent.directory: CardSource(parent.directory, parent.revision)
                for parent in parents
                if called in (parent.directory.name, name_in_path(parent.ref.partition("+")[0].partition("@")[0]))
                and parent.directory != descendant.directory
            }
            if len(fitting) == 1:
                return next(iter(fitting.values()))
        return known.get(name) or look_up(name)

    found = {name: lineage(source, find, table, name, names) for name, source in sources.items()}
    return Declared(
        families={name: one.models for name, one in found.items()},
        texts={digest: text for one in found.values() for digest, text in one.texts.items()},
    )


def license_table(settings: LicenseSettings, root: Path) -> LicenseTable:
    """The facts that ship with mergegate, with the profile's own entries over them."""
    return load_table(root / settings.table if settings.table else None)
