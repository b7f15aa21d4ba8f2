"""Load the typed license facts in `table.yaml`, with the entries that a profile overrides, and the license texts.

The head of `table.yaml` explains each field. An override file has the same form and contains only the differences:

    licenses: qwen: {cap: "none: agreement of 2026-03-01"}        # some fields of a known entry acme-internal: {kind:
    permissive, basis: primary, source: "contract 17"} aliases: {acme: acme-internal}

The texts are in `texts/`, verbatim. The license in a file next to a model is identified conservatively: a file counts
as a license only if its words are those of the text in `texts/`. Case, line breaks, punctuation, copyright lines, a
title and the names that a template leaves open do not matter. A file also counts if it begins with the title of an
agreement whose editions all bind in the same way (`titles` in `table.yaml`). With any additional condition, the file
stays unknown.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, Field, ValidationError

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
# Kinds of licenses under which merged weights may carry another license, in ascending strength.
WEAK_KINDS: tuple[LicenseKind, ...] = ("public-domain", "permissive", "attribution")
_SECTIONS = ("sources", "policies", "licenses", "aliases")


class License(BaseModel, frozen=True, extra="forbid", strict=True):
    """Facts about one license that matter for merged weights. The head of `table.yaml` explains the fields."""

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
        """Whether the license text is known. If not, the other facts are meaningless."""
        return self.kind != "unknown"

    @property
    def restrictive(self) -> bool:
        """Whether the license restricts use or presentation of derivatives, beyond credit, texts and share-alike."""
        terms = (self.use_policy, self.name_prefix, self.display, self.territory, self.only_with)
        return self.kind in ("rail", "community", "research") or self.commercial == "capped" or any(terms)


class LicenseTable(BaseModel, frozen=True, extra="forbid", strict=True):
    """All known licenses. `policies` locates the use restrictions, `sources` the origin of the facts."""

    sources: dict[str, str]
    policies: dict[str, str]
    licenses: dict[str, License]
    aliases: dict[str, str]

    def lookup(self, license: object, license_name: object = None) -> License:
        """Return the license that a model card declares, or the entry `unknown` or `other` if it cannot be determined.

        Args:
            license: Value of `license` in the card, of any type that YAML produces: identifier, alias or SPDX
                identifier in any case. The Hub does not define whether a list means *and* or *or*, so a list counts
                only if all its entries agree.
            license_name: Value of `license_name` in the card. It decides if `license` is `other`, `unknown` or missing.
                If the two name different known licenses, the card contradicts itself and the license is unknown.
        """
        if isinstance(license, list | tuple):
            identifiers = {self.lookup(entry, license_name).id for entry in license} or {UNKNOWN}
            return self.licenses[identifiers.pop() if len(identifiers) == 1 else UNKNOWN]
        first, name = self._identify(license), self._identify(license_name)
        has_name = isinstance(license_name, str) and license_name.strip()
        if first is None and license is not None:
            return self.licenses[OTHER if isinstance(license, str) and license.strip() else UNKNOWN]
        if first in (None, OTHER, UNKNOWN):
            return self.licenses[name or (OTHER if has_name else first) or UNKNOWN]
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
    """Return the table in this package, overridden field by field by the entries in `override`.

    Raises:
        InvalidInput: The override cannot be read, is not a table, or names a field, license, family or policy that does
            not exist.
    """
    if override is None:
        return _shipped()
    shipped, changes = _read(SHIPPED), _read(override)
    merged = {section: {**shipped[section], **changes[section]} for section in _SECTIONS}
    for name, fields in changes["licenses"].items():
        shipped_fields = shipped["licenses"].get(name)
        if isinstance(shipped_fields, dict) and isinstance(fields, dict):
            merged["licenses"][name] = {**shipped_fields, **fields}
    return _typed(merged, str(override))


@cache
def _shipped() -> LicenseTable:
    return _typed(_read(SHIPPED), SHIPPED.name)


def _read(path: Path) -> dict[str, dict[str, object]]:
    """Return the sections of a table file as YAML provides them; missing sections are empty."""
    content = read_yaml_mapping(path, "a license table", remedy="check checks.license.table")
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


def _typed(sections: Mapping[str, Mapping[str, object]], location: str) -> LicenseTable:
    licenses = {name: _license(name, fields, location) for name, fields in sections["licenses"].items()}
    try:
        table = LicenseTable.model_validate({**sections, "licenses": licenses})
    except ValidationError as error:
        first = error.errors()[0]
        raise InvalidInput(
            f"{location}: {'.'.join(map(str, first['loc']))}", found=repr(first["input"]), expected="text"
        ) from error
    # Every name must exist, because a typo would silently lift a restriction.
    families = {entry.family for entry in table.licenses.values() if entry.family}
    for entry in table.licenses.values():
        used: tuple[tuple[str, Sequence[str], set[str]], ...] = (
            ("outer", entry.outer, set(table.licenses)),
            ("never_under", entry.never_under, set(table.licenses)),
            ("only_with", entry.only_with, families),
            ("use_policy", (entry.use_policy,) if entry.use_policy else (), set(table.policies)),
        )
        for field, names, existing in used:
            for name in names:
                if name not in existing:
                    raise InvalidInput(
                        f"{location}: licenses.{entry.id}.{field}", found=repr(name), remedy=suggest(name, existing)
                    )
    for alias, target in table.aliases.items():
        if target not in table.licenses or alias in table.licenses:
            raise InvalidInput(
                f"{location}: aliases.{alias}",
                found=repr(target),
                expected="a license of the table, and an alias that is not itself a license",
                remedy=suggest(target, table.licenses),
            )
    return table


def _license(name: str, fields: object, location: str) -> License:
    if not isinstance(name, str) or not isinstance(fields, dict):
        raise InvalidInput(f"{location}: licenses.{name}", found=repr(fields), expected="a mapping of facts")
    field_names = set(License.model_fields) - {"id"}
    for field in fields:
        if field not in field_names:
            raise InvalidInput(
                f"{location}: licenses.{name}.{field}",
                found="an unknown field",
                remedy=suggest(str(field), field_names),
            )
    values = {field: tuple(value) if isinstance(value, list) else value for field, value in fields.items()}
    try:
        return License.model_validate({"id": name, **values})
    except ValidationError as error:
        first = error.errors()[0]
        value = "nothing" if first["type"] == "missing" else repr(first["input"])
        hint = " (YAML reads a bare yes or no as true or false)" if isinstance(first["input"], bool) else ""
        raise InvalidInput(
            f"{location}: licenses.{name}.{'.'.join(map(str, first['loc']))}", found=value + hint, expected=first["msg"]
        ) from error


_TEXTS = Path(__file__).with_name("texts")
_COPYRIGHT = re.compile(
    r"copyright (\(c\)|©|.{0,12}(\d{4}|yyyy|year))|(\(c\)|©) ?\d{4}|all rights reserved", re.IGNORECASE
)
_CONDITION = re.compile(
    r"\b(us(e|ed|es|ing|age)|commercial\w*|licen\w+|permi\w+|prohibit\w*|restrict\w*|only)\b", re.IGNORECASE
)
_MARK = re.compile(r"^[\s>*•-]*(\d{1,2}[.)]|\([a-z0-9]{1,2}\)|[*•-])\s+", re.IGNORECASE)
_WORD = re.compile(r"[^\W_]+(?:\.\d+)*")
_OWNER = re.compile(r"\bname of (?:\w+ ){1,12}?nor\b")  # Templates leave the name of the owner open.
# Words around the terms in real files. Anything else is an unknown condition.
_TITLE = re.compile(
    r"(?:(?:a|an|the|mit|expat|isc|bsd|2|3|clause|new|revised|simplified|clear|zlib|ncsa|boost|software|license|licence|"
    r"version|spdx|identifier|of|for|see|text)(?: |$)){0,12}"
)
_FIRST_LINES = 5  # Lines that may contain a title.
_AGREEMENT = 200  # Number of words. A shorter file only mentions an agreement.


def license_texts(license: License) -> dict[str, str]:
    """Return the texts to ship for a license, by identifier. The result is empty if one of them is unavailable."""
    texts = {name: _shipped_text(name)[0] for name in license.texts or (license.id,)}
    return texts if all(texts.values()) else {}


def identify_license(text: str, table: LicenseTable, expected: License | None = None) -> License | None:
    """Return the license whose text is ``text``, or None if it cannot be identified.

    ``expected`` is the most likely license. It is compared first, because comparing with all takes a tenth of a second.
    """
    words = _words(text)
    if expected is not None and _is_text_of(words, expected.id):
        return expected
    for entry in table.licenses.values():
        if _is_text_of(words, entry.id):
            return entry
    if len(words.split()) < _AGREEMENT:
        return None
    lines = [line for line in text.lstrip("\ufeff").splitlines() if line.strip()][:_FIRST_LINES]
    first_lines = set(map(_words, lines))
    titled = [entry for entry in table.licenses.values() if not first_lines.isdisjoint(map(_words, entry.titles))]
    return titled[0] if len(titled) == 1 else None


def license_by_link(link: str, table: LicenseTable) -> License | None:
    """Return the license that is published at the address `link`. The address itself is not read."""
    matches = [entry for entry in table.licenses.values() if _address(link) in map(_address, entry.links)]
    return matches[0] if len(matches) == 1 else None


def _address(link: str) -> str:
    return re.sub(r"^https?://(www\.)?", "", link.strip().lower()).rstrip("/")


@cache
def _shipped_text(name: str) -> tuple[str, str]:
    """Return a text and its words. Both are empty if there is no such text."""
    file = _TEXTS / f"{name}.txt"
    text = file.read_text(encoding="utf-8") if file.is_file() else ""
    return text, _words(text)


def _words(text: str) -> str:
    """Return the words of a text in one line, without copyright lines and list markers."""
    lines = (line.strip().lstrip("#>* ") for line in text.lstrip("\ufeff").splitlines())
    # A copyright line only names the owner. A line that also mentions use or permission is a condition.
    terms = (line for line in lines if not _COPYRIGHT.match(line) or _CONDITION.search(line))
    text_without_notices = " ".join(_MARK.sub("", line) for line in terms)
    words = _OWNER.sub("name of the owner nor", " ".join(_WORD.findall(text_without_notices.lower())))
    return words.replace("copyright owner or contributors", "copyright holder or contributors")


def _is_text_of(words: str, name: str) -> bool:
    shipped = _shipped_text(name)[1]
    if not shipped:
        return False
    # Files often omit the appendix on how to apply a license, or fill it in.
    core, end, appendix = shipped.partition("end of terms and conditions")
    before, match, after = words.partition(core.strip())
    before, after = before.strip(), after.strip().removeprefix(end).strip()
    return bool(match) and _TITLE.fullmatch(before) is not None and after in ("", appendix.strip())
