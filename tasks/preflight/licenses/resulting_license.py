"""What follows for a merge that may be made: the licence it carries (R7) and the obligations to fulfil (R8, R9)."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Literal

from pydantic import BaseModel, ConfigDict

from mergegate.tasks.preflight.licenses.case import Case, listed
from mergegate.tasks.preflight.licenses.rules import share_alike_licenses
from mergegate.tasks.preflight.licenses.table import OTHER, UNKNOWN, License

ObligationKind = Literal["text", "notice", "display", "use_policy", "changes", "name_prefix", "cap"]


class Obligation(BaseModel):
    """Something that must be done with the merged model.

    Attributes:
        kind: `text`: ship a licence text; `notice`: `text` stands word for word in the NOTICE file; `display`: `text`
            stands word for word in the card and the product; `use_policy`: pass use restrictions on; `changes`: say
            that files were modified; `name_prefix`: `text` is how the name begins; `cap`: a licence of its own is
            needed beyond a threshold.
        text: The wording to reproduce (notice, display, name_prefix), otherwise what to do, in words.
        because: Identifiers of the licences that ask for it, sorted.
        model: Whose own licence file must be shipped, because which text its licence stands for is not known.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    kind: ObligationKind
    text: str
    because: tuple[str, ...]
    model: str | None = None


class ResultingLicense(BaseModel):
    """The licence of the merged weights.

    Attributes:
        license: Value for the card's `license`: an identifier of the Hub, or `other`.
        license_name: Name beside `other`.
        licenses: Identifiers of all that the weights are under, of which `LICENSE` holds the texts.
        sentence: Why this one.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    license: str
    license_name: str | None
    licenses: tuple[str, ...]
    sentence: str

    @property
    def card(self) -> dict[str, str]:
        """The licence fields of the model card. `LICENSE` in the release then holds the text, or all of the texts."""
        if self.license_name is None:
            return {"license": self.license}
        return {"license": self.license, "license_name": self.license_name, "license_link": "LICENSE"}


def resulting_license(case: Case) -> ResultingLicense:
    """R7. Share-alike decides; else the licences that must stay: one as it is, several as a bundle; else the strongest
    of the permissive ones."""
    fits = share_alike_licenses(case)
    if fits:
        return _share_alike(case, fits)
    staying = tuple(entry.id for entry in case.resolved if not entry.weak)
    if not staying and not case.unresolved:
        strongest = max(case.resolved, key=lambda entry: _strength(case, entry))
        return _named(case, (strongest.id,), f"{strongest.id} is the strongest of the permissive licences")
    # `other` says nothing without a name: both words for "not known" become the same honest one.
    bundle = tuple(sorted({*staying, *(UNKNOWN if key == OTHER else key for key in case.unresolved)}))
    if len(bundle) == 1:
        return _named(case, bundle, f"the merged weights stay under {bundle[0]}")
    return _named(case, bundle, f"the merged weights stay under each of {listed(bundle)}")


def _share_alike(case: Case, fits: tuple[str, ...]) -> ResultingLicense:
    own = [key for key in fits if key in {entry.id for entry in case.resolved}]
    chosen = (own or list(fits))[0]
    return _named(case, (chosen,), f"share-alike: the merged weights stay under {chosen}")


def _strength(case: Case, entry: License) -> tuple[int, bool, bool, int]:
    """Attribution over permissive over public domain; then patent terms; then marking of changes; then table order."""
    rank = ("public-domain", "permissive", "attribution").index(entry.kind)
    return rank, bool(entry.never_under), entry.state_changes, -list(case.table.licenses).index(entry.id)


def _named(case: Case, ids: tuple[str, ...], sentence: str) -> ResultingLicense:
    if len(ids) == 1 and case.table.licenses[ids[0]].hub:
        return ResultingLicense(license=ids[0], license_name=None, licenses=ids, sentence=sentence)
    # A file name and a URL may be made of it: letters, digits, dot and hyphen only.
    name = "-and-".join(re.sub(r"[^a-z0-9.-]+", "-", key.lower().replace("+", "plus")) for key in ids)
    return ResultingLicense(license=OTHER, license_name=name, licenses=ids, sentence=sentence)


def obligations(case: Case) -> tuple[Obligation, ...]:
    """R8 and R9. The union of what all licences ask for, each once, sorted by kind and text."""
    asked: dict[tuple[ObligationKind, str, str | None], set[str]] = {}
    for entry in case.resolved:
        for kind, text in _asks(case, entry):
            asked.setdefault((kind, text, None), set()).add(entry.id)
    for model in case.models:
        if not model.license.resolved:
            text = f"ship the licence file that comes with {model.name}"
            asked.setdefault(("text", text, model.name), set()).add(model.license.id)
    found = [
        Obligation(kind=kind, text=text, because=tuple(sorted(ids)), model=model)
        for (kind, text, model), ids in asked.items()
    ]
    return tuple(sorted(found, key=lambda obligation: (obligation.kind, obligation.text)))


def _asks(case: Case, entry: License) -> Iterator[tuple[ObligationKind, str]]:
    name = case.use.name.rsplit("/", 1)[-1]
    if entry.text:
        yield "text", f"ship the text of {entry.id}"
    if entry.credit:
        yield "notice", f"Made with {listed(case.names(entry))}, licensed under {entry.spdx or entry.id}."
    if entry.notice:
        yield "notice", entry.notice
    if entry.display:
        yield "display", entry.display.replace("[name]", name)
    if entry.use_policy:
        yield "use_policy", f"pass on the use restrictions of {entry.id}: {case.table.policies[entry.use_policy]}"
    if entry.state_changes:
        yield "changes", "state that the files were modified"
    if entry.name_prefix:
        yield "name_prefix", entry.name_prefix
    if entry.commercial == "capped":
        yield "cap", f"{entry.id}: commercial use has a threshold: {entry.cap or 'ask the licensor first'}"
