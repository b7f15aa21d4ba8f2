"""Held-out documents: pinned by content, and read again only if they are still what was pinned."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict

from merge_core.errors import InvalidInput, suggest
from merge_core.parsing import kind_of, line_place, parse_line
from merge_core.store import HashMemo, NotInKey
from tasks.evaluation import DocumentSet

_MOST_LOOKED_AT = 2000  # lines that are looked at before anything is measured


class HeldOutText(BaseModel):
    """Held-out documents pinned by content."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    path: Annotated[Path, NotInKey]  # jsonl with one document a line, or plain text with one a paragraph
    sha256: str
    field: str = "text"  # of a jsonl line; empty for plain text
    only: DocumentSet | None = None  # of its documents; None: all of them

    def content_key(self) -> object:
        # What was measured before there were sets keeps its key.
        return self.model_dump(mode="json", include={"sha256", "field"} | ({"only"} if self.only else set()))


def read_texts(documents: HeldOutText, most: int | None) -> tuple[tuple[int, str], ...]:
    """``(doc_id, text)`` of the first ``most`` documents that are not empty; of a set, those in it.

    Raises:
        InvalidInput: when the file changed after it was pinned, a line is not as expected, or there is no document.
    """
    content = documents.path.read_bytes()
    if hashlib.sha256(content).hexdigest() != documents.sha256:
        raise InvalidInput(str(documents.path), found="changed while the run was going on", remedy="run again")
    every = (one for one in enumerate(_split(content, documents)) if one[1] and not one[1].isspace())
    if documents.only:
        whole = list(every)
        inside = documents.only.among(whole, "perplexity")
        every = (one for one in whole if one[0] in inside)
    texts = list(islice(every, most))
    if not texts:
        raise InvalidInput(str(documents.path), found="no document", expected="held-out text")
    return tuple(texts)


def pin_text(
    path: Path,
    field: str,
    hashes: HashMemo,
    *,
    where: str,
    relative_to: str = "profile",
    named: str = "perplexity.field",
) -> HeldOutText:
    """A file of documents with its sha256.

    Args:
        path: Of the file: jsonl with one document a line, or plain text with one a paragraph.
        field: Of a jsonl line.
        hashes: Of files that were hashed before.
        where: What messages call its place; ``relative_to``, what a path is relative to; ``named``, what names the
            field.

    Raises:
        InvalidInput: when there is no such file, or a document is not as the settings say.
    """
    if not path.is_file():
        raise InvalidInput(
            where,
            found="no such file",
            expected="jsonl with one document a line, or plain text with one a paragraph, "
            f"relative to the {relative_to}",
        )
    field = field if path.suffix in (".jsonl", ".json", ".ndjson") else ""
    with path.open("rb") as file:
        for number, line in enumerate(islice(file, _MOST_LOOKED_AT if field else 0), start=1):
            if line.strip():
                text_of_line(line, field, path, number, named)
    if not path.stat().st_size:
        raise InvalidInput(str(path), found="an empty file", expected="held-out documents")
    return HeldOutText(path=path, sha256=hashes.sha256(path), field=field)


def _split(content: bytes, documents: HeldOutText) -> Iterator[str]:
    if documents.field:
        for number, line in enumerate(content.splitlines(), start=1):
            yield text_of_line(line, documents.field, documents.path, number) if line.strip() else ""
        return
    try:
        yield from content.decode().replace("\r\n", "\n").split("\n\n")
    except UnicodeDecodeError as error:
        raise InvalidInput(str(documents.path), found=f"not UTF-8: {error}", expected="text") from None


def text_of_line(line: bytes, field: str, path: Path, number: int, named: str = "perplexity.field") -> str:
    """The text in ``field`` of a line of JSON, which ``named`` names. Raises InvalidInput where there is none."""
    document = parse_line(line, path, number)
    text = document.get(field)
    if not isinstance(text, str):
        found = f"no field {field!r}" if field not in document else f"{kind_of(text)} in field {field!r}"
        remedy = suggest(field, document) if field not in document and document else ""
        expected = f"text, in the field that {named} names"
        raise InvalidInput(line_place(path, number), found=found, expected=expected, remedy=remedy)
    return text
