"""Define the input and output of the license rules: a case with parents and intended use, and findings about it.

The three statuses are ordered: `allowed` < `review` < `blocked`. The most severe finding decides the verdict on a
merge.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Annotated, Literal

from pydantic import BaseModel

from mergegate.tasks.preflight.licenses.table import License, LicenseTable
from mergegate.tasks.preflight.settings import Use
from mergegate.tasks.store import NotInKey

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
    """What a user can accept: a license of a model, by the license's identifier or by the model's name.

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
