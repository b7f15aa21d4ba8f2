"""Define the input and output of the license rules: a case with parents and intended use, and findings about it.

The three statuses are ordered: `allowed` < `review` < `blocked`. The most severe finding decides the verdict on a
merge.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import combinations
from typing import Annotated, Literal

from pydantic import BaseModel

from mergegate.tasks.base.store import NotInKey
from mergegate.tasks.preflight.licenses.table import License, LicenseTable
from mergegate.tasks.preflight.settings import Use

LicenseStatus = Literal["allowed", "review", "blocked"]
SEVERITY: dict[LicenseStatus, int] = {"allowed": 0, "review": 1, "blocked": 2}


class Licensed(BaseModel, frozen=True, extra="forbid"):
    """A model with its license."""

    name: str  # Name in the recipe or in the card of a descendant.
    license: License  # License that the card declares, or else the license in the license file or at the license link.
    declared: str = ""  # Quote from the card, for messages.
    # License whose text is in the file next to the model, if the card declares a different one. It is unknown which of
    # the two holds, so both bind.
    contradicted: License | None = None
    # sha256 of the license file next to the model, in hexadecimal; None without such a file.
    own_file: str | None = None
    # Commit on the Hub; None for a local directory. It is in no cache key, because a later commit with the same
    # declaration changes nothing.
    revision: Annotated[str | None, NotInKey] = None

    @property
    def licenses(self) -> tuple[License, ...]:
        """All binding licenses: one, or two if card and license file contradict each other."""
        return (self.license,) if self.contradicted is None else (self.license, self.contradicted)


class Unread(BaseModel, frozen=True, extra="forbid"):
    """An ancestor that a card names but that could not be read, with the reason."""

    name: str
    why: Annotated[str, NotInKey] = ""


class LicensedParent(Licensed):
    """A model that goes into the merge, with the models that it descends from."""

    ancestors: tuple[Licensed, ...] = ()  # All readable ancestors at any distance, in any order.
    unread: tuple[Unread, ...] = ()  # Ancestors that a card names but that could not be read.


class Subject(BaseModel, frozen=True, extra="forbid"):
    """A license of a model that a user can accept, by the license's identifier or by the model's name.

    `license` is None if an acceptance must name the model, because no one can vouch for all unknown licenses together.
    """

    model: str
    license: str | None


@dataclass(frozen=True)
class LicenseFinding:
    """Result of one rule for a case. To settle a review, a user must accept everything in `about`."""

    status: LicenseStatus
    sentence: str
    about: tuple[Subject, ...] = ()


@dataclass(frozen=True)
class Case:
    """Merge to judge: its parents without order or repetition, its use, and the known licenses."""

    parents: tuple[LicensedParent, ...]
    use: Use
    table: LicenseTable

    @classmethod
    def create(cls, parents: Sequence[License | LicensedParent], use: Use, table: LicenseTable) -> Case:
        """Return the case in canonical form. A bare license becomes a parent that has the license's name."""
        unique_parents = {
            LicensedParent(name=parent.id, license=parent) if isinstance(parent, License) else parent
            for parent in parents
        }
        return cls(tuple(sorted(unique_parents, key=lambda parent: parent.model_dump_json())), use, table)

    @property
    def public(self) -> bool:
        return self.use.visibility == "public"

    @cached_property
    def models(self) -> tuple[Licensed, ...]:
        """Parents and all their ancestors, whose licenses all bind the merge."""
        return tuple(model for parent in self.parents for model in (parent, *parent.ancestors))

    @cached_property
    def known_licenses(self) -> tuple[License, ...]:
        """Known licenses that bind the merge, sorted by identifier, each once."""
        by_id = {entry.id: entry for model in self.models for entry in model.licenses if entry.resolved}
        return tuple(by_id[key] for key in sorted(by_id))

    @cached_property
    def unknown_licenses(self) -> tuple[str, ...]:
        """Identifiers of licenses whose text is unknown."""
        return tuple(sorted({model.license.id for model in self.models if not model.license.resolved}))

    def names(self, license: License) -> tuple[str, ...]:
        """Return the names of the models under ``license``, sorted."""
        return tuple(
            sorted({model.name for model in self.models for entry in model.licenses if entry.id == license.id})
        )

    def about(self, *licenses: License) -> tuple[Subject, ...]:
        """Return everything that a user must accept before ``licenses`` count as settled."""
        return tuple(Subject(model=name, license=entry.id) for entry in licenses for name in self.names(entry))

    def describe(self, license: License) -> str:
        """Return the license with its models, for a sentence: `gemma (of acme/a and acme/b)`."""
        names = self.names(license)
        return license.id if names == (license.id,) else f"{license.id} (of {join_words(names)})"


def join_words(words: Iterable[str]) -> str:
    *head, last = words
    return f"{', '.join(head)} and {last}" if head else last


@dataclass(frozen=True)
class LicenseRule:
    """License rule: its number and subject, its decision function, and the remedy after a refusal."""

    id: str
    subject: str
    judge: Callable[[Case], Iterator[LicenseFinding]]
    remedy: str


def _known(case: Case) -> Iterator[LicenseFinding]:
    """Require a review of an unresolved or contradicted license, and of an entry that asks for one."""
    for model in case.models:
        if not model.license.resolved:
            why = model.license.review or f"the license text that {model.license.id!r} stands for is unknown"
            quoted = f" ({model.declared})" if model.declared else ""
            yield LicenseFinding("review", f"{model.name}: {why}{quoted}", (Subject(model=model.name, license=None),))
        if model.contradicted is not None:
            sentence = (
                f"{model.name} declares {model.license.id}, but the license file next to it contains the text of "
                f"{model.contradicted.id}. mergegate assumes that both bind"
            )
            yield LicenseFinding("review", sentence, (Subject(model=model.name, license=None),))
    for entry in case.known_licenses:
        if entry.review:
            yield LicenseFinding("review", f"{case.describe(entry)}: {entry.review}", case.about(entry))


def _derivatives(case: Case) -> Iterator[LicenseFinding]:
    """Require permission for the merge and, for a public model, for its distribution."""
    for entry in case.known_licenses:
        name = case.describe(entry)
        if entry.derivatives == "forbidden":
            yield LicenseFinding("blocked", f"{name} does not permit modified or merged weights", case.about(entry))
        elif entry.derivatives == "private-only" and case.public:
            yield LicenseFinding(
                "blocked", f"{name} does not permit sharing modified or merged weights", case.about(entry)
            )
        elif entry.derivatives == "private-only":
            sentence = f"{name} permits merged weights only as long as they are never shared"
            yield LicenseFinding("review", sentence, case.about(entry))
        elif entry.sharing == "forbidden" and case.public:
            yield LicenseFinding("blocked", f"{name} does not permit redistribution of the weights", case.about(entry))


def _for_each_license(
    status: LicenseStatus, applies: Callable[[Use, License], bool], words: Callable[[License], str]
) -> Callable[[Case], Iterator[LicenseFinding]]:
    """Return a rule about each license on its own. ``words`` completes a sentence that begins with the license."""

    def judge(case: Case) -> Iterator[LicenseFinding]:
        for entry in case.known_licenses:
            if applies(case.use, entry):
                yield LicenseFinding(status, f"{case.describe(entry)} {words(entry)}", case.about(entry))

    return judge


# Commercial use is limited to the permission of the strictest parent.
_commercial = _for_each_license(
    "blocked",
    lambda use, entry: use.purpose == "commercial" and entry.commercial == "forbidden",
    lambda _: "forbids commercial use",
)
# Some research licenses count any distribution by a company as commercial.
_company_distributes = _for_each_license(
    "blocked",
    lambda use, entry: use.visibility == "public" and use.commercial_entity and entry.sharing == "noncommercial-only",
    lambda _: "does not permit distribution by a commercial entity, even free of charge",
)
# A license that grants nothing in some territory or to some users needs a review.
_territory = _for_each_license(
    "review", lambda _, entry: bool(entry.territory), lambda entry: f"is limited: {entry.territory}"
)


def _improving_others(case: Case) -> Iterator[LicenseFinding]:
    """Enforce bans on improving other models, which admit only models of the named families or their descendants."""
    for entry in case.known_licenses:
        if not entry.only_with:
            continue
        outsiders = set()
        for parent in case.parents:
            family = [license for model in (parent, *parent.ancestors) for license in model.licenses]
            if not any(license.id == entry.id or license.family in entry.only_with for license in family):
                id = parent.license.id
                outsiders.add(parent.name if parent.name == id else f"{parent.name} ({id})")
        if outsiders:
            sentence = (
                f"{case.describe(entry)} may not be used to improve models outside {join_words(entry.only_with)}, "
                f"but this merge includes {join_words(sorted(outsiders))}"
            )
            yield LicenseFinding("blocked", sentence, case.about(entry))


def _name(case: Case) -> Iterator[LicenseFinding]:
    """Require that name prefixes contain each other, and that the name of the merge begins with the longest."""
    prefixed = [entry for entry in case.known_licenses if entry.name_prefix]
    status: LicenseStatus = "blocked" if case.public else "allowed"
    suffix = "" if case.public else ", once the model is shared"
    for first, second in combinations(prefixed, 2):
        if not _begins(first.name_prefix, second.name_prefix) and not _begins(second.name_prefix, first.name_prefix):
            sentence = (
                f"the name would have to begin with {first.name_prefix!r} for {case.describe(first)} and with "
                f"{second.name_prefix!r} for {case.describe(second)}{suffix}"
            )
            yield LicenseFinding(status, sentence, case.about(first, second))
    name = case.use.name.rsplit("/", 1)[-1]
    for entry in prefixed:
        if not _begins(name, entry.name_prefix):
            need = f"as {case.describe(entry)} requires{suffix}"
            sentence = f"the name {name!r} does not begin with {entry.name_prefix!r}, {need}"
            yield LicenseFinding(status, sentence, case.about(entry))


def _begins(name: str | None, prefix: str | None) -> bool:
    """Return whether `name` begins with `prefix`, ignoring case and hyphens ("Llama 3" begins "llama-3.1-mix")."""
    return _letters(name).startswith(_letters(prefix))


def _letters(name: str | None) -> str:
    return re.sub(r"[^a-z0-9.]", "", (name or "").lower())


def _share_alike(case: Case) -> Iterator[LicenseFinding]:
    """Require a license that satisfies every share-alike parent; none of them tolerates further restrictions."""
    share_alike = _share_alike_parents(case)
    if not share_alike or share_alike_licenses(case):
        return
    extra = _extra_restrictions(case)
    conflicting = [entry for entry in case.known_licenses if entry.kind == "noncommercial" or entry.never_under]
    share_alike_names = _describe_all(case, share_alike)
    if extra:
        sentence = f"{share_alike_names}: share-alike forbids the further restrictions of {_describe_all(case, extra)}"
    elif not _compatible_outer_licenses(share_alike):
        sentence = f"{share_alike_names}: no license satisfies all of these share-alike licenses"
    else:
        sentence = f"{share_alike_names}: no license satisfies both share-alike and {_describe_all(case, conflicting)}"
        # Name every conflicting license, so that an old acceptance never suffices after another parent is added.
    involved = {entry.id: entry for entry in (*share_alike, *extra, *conflicting)}
    yield LicenseFinding("blocked" if case.public else "review", sentence, case.about(*involved.values()))


def share_alike_licenses(case: Case) -> tuple[str, ...]:
    """Return the licenses that the merge may carry under its share-alike parents, in table order.

    The result is empty if no license satisfies all share-alike parents, or if there is no share-alike parent.
    """
    share_alike = _share_alike_parents(case)
    if not share_alike or _extra_restrictions(case):
        return ()
    noncommercial = any(entry.kind == "noncommercial" for entry in case.known_licenses)
    never = {outer for entry in case.known_licenses for outer in entry.never_under}
    return tuple(
        key
        for key, outer in case.table.licenses.items()
        if key in _compatible_outer_licenses(share_alike) - never
        and (not noncommercial or outer.commercial == "forbidden")
    )


def _extra_restrictions(case: Case) -> list[License]:
    """Return restrictions beyond share-alike. Share-alike permits its own kind, which is listed in `outer`."""
    return [entry for entry in case.known_licenses if entry.restrictive or entry.kind == "no-derivatives"]


def _share_alike_parents(case: Case) -> list[License]:
    return [entry for entry in case.known_licenses if entry.kind == "copyleft"]


def _compatible_outer_licenses(share_alike: list[License]) -> set[str]:
    return set.intersection(*({entry.id, *entry.outer} for entry in share_alike))


def _describe_all(case: Case, licenses: list[License]) -> str:
    return join_words(case.describe(entry) for entry in licenses)


def _ancestry(case: Case) -> Iterator[LicenseFinding]:
    """Require a review of restrictions that a parent drops, since it cannot grant more than its ancestors do.

    An ancestor that could not be read needs a review too. Like a model without a declaration (R0), it may forbid what
    its descendant's card permits, and a gate that opens when the Hub does not respond is useless.
    """
    permission = {"allowed": 0, "capped": 1, "private-only": 1, "noncommercial-only": 1, "forbidden": 2}
    for parent in case.parents:
        declared = parent.license
        pairs = [(ancestor, license) for ancestor in parent.ancestors for license in ancestor.licenses]
        for ancestor, license in pairs:
            if not declared.resolved or not license.resolved or declared.id == license.id:
                continue
            prefix = license.name_prefix is not None and not _begins(declared.name_prefix, license.name_prefix)
            drops = {
                "its limits on derivatives": permission[license.derivatives] > permission[declared.derivatives],
                "its limits on sharing": permission[license.sharing] > permission[declared.sharing],
                "its limits on commercial use": permission[license.commercial] > permission[declared.commercial],
                "its use restrictions": license.use_policy not in (None, declared.use_policy),
                "its ban on improving other models": bool(license.only_with) and not declared.only_with,
                "its territory limits": license.territory not in (None, declared.territory),
                "its share-alike": license.kind == "copyleft" and declared.id not in license.outer,
                "its rule for names": prefix,
            }
            if any(drops.values()):
                dropped = join_words(words for words, is_dropped in drops.items() if is_dropped)
                sentence = (
                    f"{parent.name} declares {declared.id}, but was derived from {ancestor.name} under {license.id}, "
                    f"which it drops: {dropped}"
                )
                yield LicenseFinding("review", sentence, (Subject(model=parent.name, license=None),))
        for unread in parent.unread:
            why = f" ({unread.why})" if unread.why else ""
            sentence = f"{parent.name} was derived from {unread.name}, whose license could not be read{why}"
            yield LicenseFinding("review", sentence, (Subject(model=unread.name, license=None),))


_REMOVE = "remove that parent"
RULES: tuple[LicenseRule, ...] = (
    LicenseRule("R0", "all licenses are known", _known, "read the license"),
    LicenseRule("R1", "merging and sharing are permitted", _derivatives, _REMOVE),
    LicenseRule("R2", "commercial use", _commercial, f"{_REMOVE}, or set 'purpose: research' if that is the purpose"),
    LicenseRule("R3", "distribution by a company", _company_distributes, f"{_REMOVE}, or keep the model private"),
    LicenseRule(
        "R4", "ban on improving other models", _improving_others, f"{_REMOVE}, or merge within its family only"
    ),
    LicenseRule("R5", "name of the merged model", _name, "rename the merged model"),
    LicenseRule("R6", "share-alike", _share_alike, _REMOVE),
    # R7 to R9 derive the license, the use policies and the obligations. They cannot refuse: see combination.py.
    LicenseRule("R10", "territory", _territory, "check that the limit does not concern this model and its users"),
    LicenseRule(
        "R11", "no weaker than its ancestors", _ancestry, "compare with the license of its ancestor, or ask its authors"
    ),
)
