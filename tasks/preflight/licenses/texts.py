"""The texts of licences, verbatim as shipped in `texts/`, and which licence a file beside a model is the text of.

Recognition is conservative. A file counts as a licence only when its words are those of the shipped text, whatever
their case, line breaks and punctuation, and apart from copyright lines, a title, and the names that a template leaves
open; or when it begins with the title of an agreement whose editions bind alike (`titles` in `table.yaml`). One more
condition in it, and it stays unknown.
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
_OWNER = re.compile(r"\bname of (?:\w+ ){1,12}?nor\b")  # templates leave open whose name must not be used
# What stands around the terms in files as people write them; everything else is a condition that we do not know.
_TITLE = re.compile(
    r"(?:(?:a|an|the|mit|expat|isc|bsd|2|3|clause|new|revised|simplified|clear|zlib|ncsa|boost|software|license|licence|"
    r"version|spdx|identifier|of|for|see|text)(?: |$)){0,12}"
)
_FIRST_LINES = 5  # that hold a title
_AGREEMENT = 200  # words: a shorter file only mentions the agreement that it names


def license_texts(license: License) -> dict[str, str]:
    """The texts to ship for a licence, by the identifier they are of; empty when they are unavailable."""
    found = {name: _text(name) for name in license.texts or (license.id,)}
    return {name: text for name, text in found.items() if text is not None} if all(found.values()) else {}


def recognised(text: str, table: LicenseTable, expected: License | None = None) -> License | None:
    """The licence that a file is the text of; None when that cannot be said.

    Args:
        text: The content of a licence file.
        expected: The licence that it most likely is; asked first, because comparing with all takes a tenth of a second.
    """
    words = _words(text)
    if expected is not None and _is_text_of(words, expected.id):
        return expected
    for entry in table.licenses.values():
        if _is_text_of(words, entry.id):
            return entry
    titled = [entry for entry in table.licenses.values() if _bears_title(text, words, entry)]
    return titled[0] if len(titled) == 1 else None


def linked(link: str, table: LicenseTable) -> License | None:
    """The licence whose published address `link` is. The address itself is not read."""
    found = [entry for entry in table.licenses.values() if _address(link) in map(_address, entry.links)]
    return found[0] if len(found) == 1 else None


def _address(link: str) -> str:
    return re.sub(r"^https?://(www\.)?", "", link.strip().lower()).rstrip("/")


@cache
def _text(name: str) -> str | None:
    file = _TEXTS / f"{name}.txt"
    return file.read_text(encoding="utf-8") if file.is_file() else None


@cache
def _words_of(name: str) -> str | None:
    text = _text(name)
    return None if text is None else _words(text)


def _words(text: str) -> str:
    """The words of a text in one line, without copyright lines and list marks."""
    lines = (line.strip().lstrip("#>* ") for line in text.lstrip("\ufeff").splitlines())
    kept = " ".join(_MARK.sub("", line) for line in lines if not _is_copyright(line))
    words = _OWNER.sub("name of the owner nor", " ".join(_WORD.findall(kept.lower())))
    return words.replace("copyright owner or contributors", "copyright holder or contributors")


def _is_copyright(line: str) -> bool:
    """Whether a line only says whose the work is. One that goes on to say what may be done with it is a condition."""
    return bool(_COPYRIGHT.match(line)) and not _CONDITION.search(line)


def _is_text_of(words: str, name: str) -> bool:
    shipped = _words_of(name)
    if shipped is None:
        return False
    # How to apply a licence is often left out, or filled in, behind its end.
    core, end, appendix = shipped.partition("end of terms and conditions")
    before, found, after = words.partition(core.strip())
    before, after = before.strip(), after.strip().removeprefix(end).strip()
    return bool(found) and _TITLE.fullmatch(before) is not None and after in ("", appendix.strip())


def _bears_title(text: str, words: str, entry: License) -> bool:
    lines = [line for line in text.lstrip("\ufeff").splitlines() if line.strip()][:_FIRST_LINES]
    titles = {_words(title) for title in entry.titles}
    return any(_words(line) in titles for line in lines) and len(words.split()) >= _AGREEMENT
