"""Define the input and output of the license rules: a case with parents and intended use, and findings about it.

The three statuses are ordered: `allowed` < `review` < `blocked`. The most severe finding decides the verdict on a
merge.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict

from mergegate.tasks.preflight.licenses.settings import Use
from mergegate.tasks.preflight.licenses.table import License, LicenseTable
from mergegate.tasks.store import NotInKey

LicenseStatus = Literal["allowed", "review", "blocked"]
SEVERITY: dict[LicenseStatus, int] = {"allowed": 0, "review": 1, "blocked": 2}


class Licensed(BaseModel):
    """Model with its license.

    Attributes:
        name: Name in the recipe or in the card of a descendant.
        license: License that the card declares. If the card declares none, the license of its license file or link.
        declared: Quote from the card, for messages.
        contradicted: License whose text is in the file next to the model, if the card declares a different one. It is
            unknown which of the two holds, so both bind.
        own_file: sha256 of the license file next to the model, in hexadecimal; None if it has none.
        revision: Commit on the Hub at which it was read; None for a local directory. It is in no cache key, because a
            later commit with the same declaration changes nothing.
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
        """All binding licenses: one, or two that contradict each other."""
        return (self.license,) if self.contradicted is None else (self.license, self.contradicted)


class Unread(BaseModel):
    """Ancestor that a card names but that could not be read, with the reason."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str
    why: Annotated[str, NotInKey] = ""


class LicensedParent(Licensed):
    """Model that goes into the merge, with all models that it was made from.

    Attributes:
        ancestors: All readable ancestors at any distance, in any order.
        unread: Ancestors that its cards name but that could not be read.
    """

    ancestors: tuple[Licensed, ...] = ()
    unread: tuple[Unread, ...] = ()


class Subject(BaseModel):
    """Subject of an acceptance: a license of a model, named by the license's identifier or by the model.

    `license` is None if an acceptance must name the model, because vouching for all unknown licenses together is
    impossible.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    model: str
    license: str | None


@dataclass(frozen=True)
class LicenseFinding:
    """Statement of one rule about a case; `about` lists everything to accept in order to settle a review."""

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
        """Return the case in canonical form. A bare license represents a parent that is named like its license."""
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
        """Known licenses that bind the merge, by identifier."""
        by_id = {entry.id: entry for model in self.models for entry in model.licenses if entry.resolved}
        return tuple(by_id[key] for key in sorted(by_id))

    @cached_property
    def unknown_licenses(self) -> tuple[str, ...]:
        """Identifiers of licenses whose text is unknown."""
        return tuple(sorted({model.license.id for model in self.models if not model.license.resolved}))

    def names(self, license: License) -> tuple[str, ...]:
        """Return the names of the models under this license, sorted."""
        return tuple(
            sorted({model.name for model in self.models for entry in model.licenses if entry.id == license.id})
        )

    def about(self, *licenses: License) -> tuple[Subject, ...]:
        """Return everything to accept before these licenses count as settled."""
        return tuple(Subject(model=name, license=entry.id) for entry in licenses for name in self.names(entry))

    def describe(self, license: License) -> str:
        """Return the license for a sentence, with its models: `gemma (of acme/a and acme/b)`."""
        names = self.names(license)
        return license.id if names == (license.id,) else f"{license.id} (of {join_words(names)})"


def join_words(words: Iterable[str]) -> str:
    """Join words as `a, b and c`."""
    *head, last = words
    return f"{', '.join(head)} and {last}" if head else last
