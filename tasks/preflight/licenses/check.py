"""Check the licenses in a run: turn the parents' cards into a verdict that stops the flow or lists obligations."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, Field

from mergegate.merge_core.errors import Finding, Refused
from mergegate.merge_core.recipe import name_in_path
from mergegate.tasks.base.stage import StageValue, value_stage
from mergegate.tasks.base.store import NotInKey
from mergegate.tasks.models.checkpoints import ResolvedAdapter, ResolvedCheckpoint, card_directory, read_card
from mergegate.tasks.preflight.licenses.combination import Combination, combine_licenses
from mergegate.tasks.preflight.licenses.resolve import (
    AncestorLookup,
    CardSource,
    NotRead,
    hub_ancestors,
    lineage,
    quote_text,
)
from mergegate.tasks.preflight.licenses.rules import LicensedParent
from mergegate.tasks.preflight.licenses.table import LicenseTable, load_table
from mergegate.tasks.preflight.licenses.weight_relations import (
    KnownModels,
    UndeclaredRelation,
    find_undeclared,
    with_undeclared,
)
from mergegate.tasks.preflight.settings import LicenseSettings, Use


class Declared(BaseModel, frozen=True, extra="forbid"):
    """Declarations in all readable cards.

    ``families`` holds, for each parent of the merge, by name, the parent and then its ancestors. ``texts`` holds the
    content of their license files, by sha256. ``undeclared`` holds relations of the weights that no card declares.
    ``families`` includes those ancestors.
    """

    families: dict[str, tuple[LicensedParent, ...]]
    texts: Annotated[dict[str, str], NotInKey]  # The hashes are in the families.
    undeclared: tuple[UndeclaredRelation, ...] = ()

    def content_key(self) -> object:
        """Return the fields that count in a key. Without undeclared relations, the key is that of the cards alone."""
        fields = {"families": self.families}
        return {**fields, "undeclared": self.undeclared} if self.undeclared else fields


class Ancestor(BaseModel, frozen=True, extra="forbid"):
    """A model that a parent descends from, as it was read for the verdict."""

    name: str
    license: str  # Identifier in the license table.
    # Commit on the Hub; None for a local directory. A cached verdict keeps this commit as long as the declaration does
    # not change.
    revision: str | None
    own_text: str  # Content of the license file next to the model; empty if there is none, or several.


class LicenseVerdict(StageValue):
    """License verdict on the merged weights: permission, license and obligations."""

    combination: Combination  # Verdict with its reasons, obligations and acceptances.
    licenses: dict[str, str]  # Declared license of each parent, by the parent's name.
    ancestors: tuple[Ancestor, ...]  # All further models that the parents descend from.
    unread: dict[str, str]  # Reason for each ancestor that could not be read, by its name.
    # Relations of the parents' weights that no card declares.
    undeclared: Annotated[tuple[UndeclaredRelation, ...], Field(exclude_if=lambda relations: not relations)] = ()

    def summary(self) -> str:
        declared_licenses = ", ".join(dict.fromkeys(self.licenses.values()))
        if self.combination.status != "allowed":
            return f"{declared_licenses}: {self.combination.reasons[0].sentence}"
        kinds = dict.fromkeys(obligation.kind.replace("_", " ") for obligation in self.combination.obligations)
        return f"{declared_licenses} → {self.result}" + (f", obligations: {', '.join(kinds)}" if kinds else "")

    @property
    def result(self) -> str:
        """Name or identifier of the merge's license, or `none`."""
        return self.combination.license_name or self.combination.license or "none"

    @property
    def all_names(self) -> tuple[str, ...]:
        """Names of all models in the verdict, both as written in recipes and cards and as quoted in sentences."""
        related = (relation.model for relation in self.undeclared)
        names = (*self.licenses, *(ancestor.name for ancestor in self.ancestors), *self.unread, *related)
        return (*names, *map(quote_text, names))

    def warnings(self) -> tuple[Finding, ...]:
        """Return a warning for each undeclared relation that no user has dismissed."""
        return tuple(finding for relation in self.undeclared if (finding := relation.finding()))

    def refusal(self) -> Refused | None:
        if self.combination.status == "allowed":
            return None
        worst, *other_reasons = [reason for reason in self.combination.reasons if reason.status != "allowed"]
        relations = [relation for relation in self.undeclared if not relation.dismissed]
        sentences = [reason.sentence for reason in other_reasons] + [relation.sentence for relation in relations]
        details = "".join(f"\n  also: {sentence}" for sentence in sentences)
        remedy = "; ".join([worst.remedy, *(relation.dismissal for relation in relations)])
        return Refused(f"licenses ({worst.rule})", found=worst.sentence + details, remedy=remedy)


@value_stage("licenses", version=3)
def check_licenses(
    declared: Declared,
    use: Use,
    table: LicenseTable,
    accepted: Mapping[str, str],
) -> LicenseVerdict:
    """Combine the licenses of all parents and ancestors that ``read_licenses`` has read."""
    models = [model for family in declared.families.values() for model in family]
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
        combination=combine_licenses(models, use, table, accepted),
        licenses={name: family[0].license.id for name, family in declared.families.items()},
        ancestors=tuple(ancestors[name] for name in sorted(ancestors)),
        unread={unread.name: unread.why for model in models for unread in model.unread},
        undeclared=declared.undeclared,
    )


def _source(model: ResolvedCheckpoint | ResolvedAdapter) -> CardSource:
    directory = model.directory if model.revision else card_directory(model.directory)
    card = read_card(directory)
    if directory == model.directory or card.problem:
        return CardSource(directory, model.revision)
    # The card of a training run declares the license, and a card that PEFT has written to a checkpoint only its base.
    values = [each.metadata.get("base_model") or [] for each in (card, read_card(model.directory))]
    names = [name for value in values for name in (value if isinstance(value, list) else [value])]
    return CardSource(directory, None, {**card.metadata, "base_model": names})


def read_licenses(
    parents: Sequence[ResolvedCheckpoint], table: LicenseTable, look_up: AncestorLookup | None = None
) -> Declared:
    """Return the declarations in the cards of the parents and of their readable ancestors, local or on the Hub.

    This function reads only cards and license files. It never raises; anything unreadable is listed as unread.

    ``look_up`` finds ancestors on the Hub. It caches, so a recipe and its remedies share one. Default: a new one.
    """
    sources_by_name = {
        key: _source(parent)
        for parent in parents
        for key in (parent.ref.partition("+")[0].partition("@")[0], parent.ref, parent.name)
    }
    # An adapter has its own card and binds like the model that it is applied to.
    sources = {parent.name: _source(parent) for parent in parents}
    sources |= {family.adapter.ref: _source(family.adapter) for family in parents if family.adapter}
    names = {parent.directory.resolve(): parent.name for parent in parents}
    look_up = look_up or hub_ancestors()

    def find(name: str, descendant: CardSource) -> CardSource | NotRead:
        has_drive = name[:1].isascii() and name[:1].isalpha() and name[1:3] == ":/"
        is_path = name.startswith(("/", ".", "~")) or "\\" in name or name.count("/") > 1 or has_drive
        if name not in sources_by_name and is_path:
            # The entry is a path on the machine that trained the descendant. A parent with the same name is assumed to
            # be that model. The parent's license binds the merge in any case.
            path_name = name_in_path(name)
            candidates = {
                parent.directory: _source(parent)
                for parent in parents
                if path_name in (parent.directory.name, name_in_path(parent.ref.partition("+")[0].partition("@")[0]))
                and parent.directory != descendant.directory
            }
            if len(candidates) == 1:
                return next(iter(candidates.values()))
        return sources_by_name.get(name) or look_up(name)

    lineages = {name: lineage(source, find, table, name, names) for name, source in sources.items()}
    return Declared(
        families={name: family.models for name, family in lineages.items()},
        texts={digest: text for family in lineages.values() for digest, text in family.texts.items()},
    )


def compare_weights(
    declarations: Declared,
    parents: Sequence[ResolvedCheckpoint],
    known_models: KnownModels,
    settings: LicenseSettings,
    table: LicenseTable,
) -> Declared:
    """Return the declarations with all ancestors that only the weights reveal, or ``declarations`` if none do."""
    relations = find_undeclared(
        parents, declarations.families, known_models.index, settings.unrelated, known_models.sample
    )
    if not relations:
        return declarations
    families = with_undeclared(declarations.families, relations, known_models.index, table)
    return declarations.model_copy(update={"families": families, "undeclared": relations})


def license_table(settings: LicenseSettings, root: Path) -> LicenseTable:
    """Return mergegate's license facts, overridden by the profile's table."""
    return load_table(root / settings.table if settings.table else None)
