"""What the licence rules look at (the parents, the intended use) and what they say about it.

Three findings, ordered: `allowed` < `review` < `blocked`. The verdict over a merge is the worst of all findings.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict

from mergegate.tasks.preflight.licenses.table import License, LicenseTable
from mergegate.tasks.preflight.licenses.use import Use
from mergegate.tasks.store import NotInKey

LicenseStatus = Literal["allowed", "review", "blocked"]
_RANK: dict[LicenseStatus, int] = {"allowed": 0, "review": 1, "blocked": 2}


def worst_status(statuses: Iterable[LicenseStatus]) -> LicenseStatus:
    """The highest of the statuses; `allowed` when there are none."""
    return max(statuses, key=_RANK.__getitem__, default="allowed")


class Licensed(BaseModel):
    """A model under a licence.

    Attributes:
        name: As its user or its descendant's card names it.
        license: What its card declares, or where the card says nothing, what its licence file or its link is.
        declared: Quotes what its card says, for messages.
        contradicted: The licence that the file beside it is the text of, where its card declares another one. Which of
            the two holds is not known, so both bind.
        own_file: sha256 of the licence file beside it, hexadecimal; None when it has none.
        revision: Commit of the Hub at which it was read; None for a local directory. Not in any key: a later commit
            that declares the same changes nothing.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str
    license: License
    declared: str = ""
    contradicted: License | None = None
    own_file: str | None = None
    revision: Annotated[str | None, NotInKey] = None

    @property
    def licenses(self) -> tuple[License, ...]:
        """All that bind: one, or two that contradict each other."""
        return (self.license,) if self.contradicted is None else (self.license, self.contradicted)


class Unread(BaseModel):
    """An ancestor that a card names and that could not be read, and why."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str
    why: Annotated[str, NotInKey] = ""


class LicensedParent(Licensed):
    """A model that goes into the merge, with every model it was made from.

    Attributes:
        ancestors: All ancestors that could be read, however far up, in any order.
        unread: Ancestors that its cards name but that could not be read.
    """

    ancestors: tuple[Licensed, ...] = ()
    unread: tuple[Unread, ...] = ()


class Subject(BaseModel):
    """One thing that a person can accept: a licence at a model, by the licence's identifier or the model's name.

    `license` is None where an acceptance must name the model: nobody can vouch for every unknown licence at once.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    model: str
    license: str | None


@dataclass(frozen=True)
class LicenseFinding:
    """What one rule says about a case, in words; `about` lists all that must be accepted to settle a review."""

    status: LicenseStatus
    sentence: str
    about: tuple[Subject, ...] = ()


@dataclass(frozen=True)
class Case:
    """A merge to be judged: its parents without order or repetition, its use, and the known licences."""

    parents: tuple[LicensedParent, ...]
    use: Use
    table: LicenseTable

    @classmethod
    def of(cls, parents: Sequence[License | LicensedParent], use: Use, table: LicenseTable) -> Case:
        """The case in canonical form; a bare licence stands for a parent that is named like its licence."""
        named = {LicensedParent(name=p.id, license=p) if isinstance(p, License) else p for p in parents}
        return cls(tuple(sorted(named, key=lambda parent: parent.model_dump_json())), use, table)

    @property
    def public(self) -> bool:
        return self.use.visibility == "public"

    @cached_property
    def models(self) -> tuple[Licensed, ...]:
        """The parents and all their ancestors: the licences of all of them bind the merge."""
        return tuple(model for parent in self.parents for model in (parent, *parent.ancestors))

    @cached_property
    def resolved(self) -> tuple[License, ...]:
        """The known licences that bind the merge, by identifier."""
        found = {entry.id: entry for model in self.models for entry in model.licenses if entry.resolved}
        return tuple(found[key] for key in sorted(found))

    @cached_property
    def unresolved(self) -> tuple[str, ...]:
        """Identifiers of the licences of which the text is not known."""
        return tuple(sorted({model.license.id for model in self.models if not model.license.resolved}))

    def names(self, license: License) -> tuple[str, ...]:
        """The models under this licence, sorted."""
        return tuple(
            sorted({model.name for model in self.models for entry in model.licenses if entry.id == license.id})
        )

    def about(self, *licenses: License) -> tuple[Subject, ...]:
        """Everything to accept before these licences count as settled."""
        return tuple(Subject(model=name, license=entry.id) for entry in licenses for name in self.names(entry))

    def called(self, license: License) -> str:
        """The licence for a sentence, with the models that are under it: `gemma (of acme/a and acme/b)`."""
        names = self.names(license)
        return license.id if names == (license.id,) else f"{license.id} (of {listed(names)})"


def listed(words: Iterable[str]) -> str:
    """`a, b and c`."""
    *head, last = words
    return f"{', '.join(head)} and {last}" if head else last
