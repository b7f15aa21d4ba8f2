"""Provide license texts, verbatim as in `texts/`, and identify the license in a file next to a model.

Identification is conservative. A file counts as a license only if its words are those of the text in `texts/`. Case,
line breaks, punctuation, copyright lines, a title and the names that a template leaves open do not matter. A file also
counts if it begins with the title of an agreement whose editions all bind in the same way (`titles` in `table.yaml`).
With any additional condition, the file stays unknown.
"""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

from mergegate.tasks.preflight.licenses.table import License, LicenseTable

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
