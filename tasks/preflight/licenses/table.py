"""The licence facts, typed: `table.yaml` as shipped, with the entries that a profile overrides.

What each field means stands at the head of `table.yaml`. An override file has the same form and says only what differs:

    licenses:
      qwen: {cap: "none: agreement of 2026-03-01"}        # some fields of a known entry
      acme-internal: {kind: permissive, basis: primary, source: "contract 17"}
    aliases: {acme: acme-internal}
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from mergegate.merge_core.errors import InvalidInput, suggest
from mergegate.merge_core.parsing import read_yaml_mapping

SHIPPED = Path(__file__).with_name("table.yaml")
UNKNOWN, OTHER = "unknown", "other"

LicenseKind = Literal[
    "public-domain",
    "permissive",
    "attribution",
    "copyleft",
    "noncommercial",
    "no-derivatives",
    "rail",
    "community",
    "research",
    "data",
    "unknown",
]
_WEAK: tuple[LicenseKind, ...] = ("public-domain", "permissive", "attribution")
_SECTIONS = ("sources", "policies", "licenses", "aliases")


class License(BaseModel):
    """The facts about one licence, as far as merged weights are concerned. Fields: see the head of `table.yaml`."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    id: str
    kind: LicenseKind
    spdx: str | None = None
    family: str | None = None
    hub: bool = True
    derivatives: Literal["allowed", "private-only", "forbidden"] = "allowed"
    sharing: Literal["allowed", "noncommercial-only", "forbidden"] = "allowed"
    commercial: Literal["allowed", "capped", "forbidden"] = "allowed"
    cap: str | None = None
    territory: str | None = None
    only_with: tuple[str, ...] = ()
    outer: tuple[str, ...] = ()
    never_under: tuple[str, ...] = ()
    text: bool = True
    texts: tuple[str, ...] = ()
    titles: tuple[str, ...] = ()
    links: tuple[str, ...] = ()
    credit: bool = False
    state_changes: bool = False
    use_policy: str | None = None
    name_prefix: str | None = None
    display: str | None = None
    notice: str | None = None
    review: str | None = None
    basis: Literal["primary", "secondary", "assumed"]
    source: str = Field(min_length=1)
    confidence: Literal["high", "medium", "low"] = "medium"

    @property
    def resolved(self) -> bool:
        """Whether it is known which text applies. If not, the other facts say nothing."""
        return self.kind != "unknown"

    @property
    def restrictive(self) -> bool:
        """Whether it restricts the use or the look of what is made from it, beyond credit, texts and share-alike."""
        terms = (self.use_policy, self.name_prefix, self.display, self.territory, self.only_with)
        return self.kind in ("rail", "community", "research") or self.commercial == "capped" or any(terms)

    @property
    def weak(self) -> bool:
        """Whether merged weights may carry another licence, with this one's text and credit beside it."""
        return self.kind in _WEAK and not self.restrictive


class LicenseTable(BaseModel):
    """All known licences. `policies` says where use restrictions stand, `sources` where the facts were read."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    sources: dict[str, str]
    policies: dict[str, str]
    licenses: dict[str, License]
    aliases: dict[str, str]

    def lookup(self, license: object, license_name: object = None) -> License:
        """The licence that a model card declares; the entry `unknown` or `other` when that cannot be said.

        Args:
            license: The card's `license`, of whatever type YAML made of it: identifier, alias or SPDX identifier in any
                case. The Hub gives a list no meaning (and? or?), so a list counts only when all its entries agree.
            license_name: The card's `license_name`. It decides where `license` is `other`, `unknown` or missing; where
                it names another known licence than `license` does, the card contradicts itself and nothing is known.
        """
        if isinstance(license, list | tuple):
            found = {self.lookup(entry, license_name).id for entry in license} or {UNKNOWN}
            return self.licenses[found.pop() if len(found) == 1 else UNKNOWN]
        first, name = self._identify(license), self._identify(license_name)
        named = isinstance(license_name, str) and license_name.strip()
        if first is None and license is not None:
            return self.licenses[OTHER if isinstance(license, str) and license.strip() else UNKNOWN]
        if first in (None, OTHER, UNKNOWN):
            return self.licenses[name or (OTHER if named else first) or UNKNOWN]
        agree = name in (None, OTHER, UNKNOWN, first)
        return self.licenses[first if first and agree else UNKNOWN]

    def _identify(self, word: object) -> str | None:
        if not isinstance(word, str):
            return None
        key = re.sub(r"[\s_]+", "-", word.strip().lower())
        key = self.aliases.get(key, key)
        if key in self.licenses:
            return key
        return next((entry.id for entry in self.licenses.values() if entry.spdx and entry.spdx.lower() == key), None)


def load_table(override: Path | None = None) -> LicenseTable:
    """The shipped table, with the entries of `override` laid over it field by field.

    Raises:
        InvalidInput: The override cannot be read, is no table, or names a field, licence, family or policy that does
            not exist.
    """
    if override is None:
        return _shipped()
    shipped, changes = _read(SHIPPED), _read(override)
    merged = {section: {**shipped[section], **changes[section]} for section in _SECTIONS}
    for name, fields in changes["licenses"].items():
        before = shipped["licenses"].get(name)
        if isinstance(before, dict) and isinstance(fields, dict):
            merged["licenses"][name] = {**before, **fields}
    return _typed(merged, str(override))


@cache
def _shipped() -> LicenseTable:
    return _typed(_read(SHIPPED), SHIPPED.name)


def _read(path: Path) -> dict[str, dict[str, object]]:
    """The sections of a table file as YAML gives them; sections that are missing are empty."""
    content = read_yaml_mapping(path, "a licence table", remedy="check checks.license.table")
    for section in content:
        if section not in _SECTIONS:
            raise InvalidInput(
                f"{path}: {section}", found="an unknown section", remedy=suggest(str(section), _SECTIONS)
            )
    sections = {section: {} if content.get(section) is None else content[section] for section in _SECTIONS}
    for section, entries in sections.items():
        if not isinstance(entries, dict):
            raise InvalidInput(f"{path}: {section}", found=f"a {type(entries).__name__}", expected="a mapping")
    return sections


def _typed(sections: Mapping[str, Mapping[str, object]], where: str) -> LicenseTable:
    licenses = {name: _license(name, fields, where) for name, fields in sections["licenses"].items()}
    try:
        table = LicenseTable.model_validate({**sections, "licenses": licenses})
    except ValidationError as error:
        first = error.errors()[0]
        raise InvalidInput(
            f"{where}: {'.'.join(map(str, first['loc']))}", found=repr(first["input"]), expected="text"
        ) from error
    _check_references(table, where)
    return table


def _license(name: str, fields: object, where: str) -> License:
    if not isinstance(name, str) or not isinstance(fields, dict):
        raise InvalidInput(f"{where}: licenses.{name}", found=repr(fields), expected="a mapping of facts")
    known = set(License.model_fields) - {"id"}
    for field in fields:
        if field not in known:
            raise InvalidInput(
                f"{where}: licenses.{name}.{field}", found="an unknown field", remedy=suggest(str(field), known)
            )
    values = {field: tuple(value) if isinstance(value, list) else value for field, value in fields.items()}
    try:
        return License.model_validate({"id": name, **values})
    except ValidationError as error:
        first = error.errors()[0]
        found = "nothing" if first["type"] == "missing" else repr(first["input"])
        trap = " (YAML reads a bare yes or no as true or false)" if isinstance(first["input"], bool) else ""
        raise InvalidInput(
            f"{where}: licenses.{name}.{'.'.join(map(str, first['loc']))}", found=found + trap, expected=first["msg"]
        ) from error


def _check_references(table: LicenseTable, where: str) -> None:
    """Every name that an entry uses must exist, or a typing error would quietly lift a restriction."""
    families = {entry.family for entry in table.licenses.values() if entry.family}
    for entry in table.licenses.values():
        used: tuple[tuple[str, Sequence[str], set[str]], ...] = (
            ("outer", entry.outer, set(table.licenses)),
            ("never_under", entry.never_under, set(table.licenses)),
            ("only_with", entry.only_with, families),
            ("use_policy", (entry.use_policy,) if entry.use_policy else (), set(table.policies)),
        )
        for field, names, known in used:
            for name in names:
                if name not in known:
                    raise InvalidInput(
                        f"{where}: licenses.{entry.id}.{field}", found=repr(name), remedy=suggest(name, known)
                    )
    for alias, target in table.aliases.items():
        if target not in table.licenses or alias in table.licenses:
            raise InvalidInput(
                f"{where}: aliases.{alias}",
                found=repr(target),
                expected="a licence of the table, under a name that is not itself one",
                remedy=suggest(target, table.licenses),
            )
