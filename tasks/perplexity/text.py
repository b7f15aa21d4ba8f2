"""Held-out documents: pinned by content, and read again only if they are still what was pinned."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Annotated, Any, NamedTuple, TypeAlias

from pydantic import BaseModel, ConfigDict

from mergegate.merge_core.errors import InvalidInput, suggest
from mergegate.merge_core.files import HashMemo
from mergegate.merge_core.parsing import (
    MAX_DATA_BYTES,
    describe_kind,
    line_location,
    open_buffered,
    parse_line,
    plain_file,
    read_plain,
)
from mergegate.tasks.evaluation import DocumentSet
from mergegate.tasks.store import NotInKey

_MOST_LOOKED_AT = 2000  # lines that are looked at before anything is measured
_NAMED = "perplexity.field"


class HeldOutText(BaseModel):
    """Held-out documents pinned by content."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    path: Annotated[Path, NotInKey]  # jsonl with one document a line, or plain text with one a paragraph
    sha256: str
    field: str = "text"  # of a jsonl line; empty for plain text
    only: DocumentSet | None = None  # of its documents; None: all of them
    conversations: bool = False  # whether a document may be a list of messages

    def content_key(self) -> object:
        # What was measured before there were sets keeps its key.
        return self.model_dump(mode="json", include={"sha256", "field"} | ({"only"} if self.only else set()))


class ChatMessage(NamedTuple):
    """What one side says in a conversation."""

    role: str
    content: str


# As it stands in a file: a text, or the messages of a conversation.
OwnDocument: TypeAlias = str | tuple[ChatMessage, ...]


def read_texts(documents: HeldOutText, most: int | None) -> tuple[tuple[int, str], ...]:
    """``(doc_id, text)`` of the first ``most`` documents that are not empty; of a set, those in it. Of a conversation,
    what is said in it.

    Raises:
        InvalidInput: when the file changed after it was pinned, a line is not as expected, or there is no document.
    """
    return tuple((at, _text_in(document)) for at, document in _chosen(documents, most))


def read_documents_verbatim(documents: HeldOutText, most: int | None) -> tuple[OwnDocument, ...]:
    """The same documents as :func:`read_texts`, as they stand in the file."""
    return tuple(document for _, document in _chosen(documents, most))


def _text_in(document: OwnDocument) -> str:
    return document if isinstance(document, str) else "\n".join(message.content for message in document)


def _chosen(documents: HeldOutText, most: int | None) -> list[tuple[int, OwnDocument]]:
    content = read_plain(documents.path, MAX_DATA_BYTES)
    if hashlib.sha256(content).hexdigest() != documents.sha256:
        raise InvalidInput(str(documents.path), found="changed while the run was going on", remedy="run again")
    every = (one for one in enumerate(_split(content, documents)) if _text_in(one[1]).strip())
    if documents.only:
        whole = list(every)
        inside = documents.only.among([(at, _text_in(one)) for at, one in whole], "perplexity")
        every = (one for one in whole if one[0] in inside)
    found = list(islice(every, most))
    if not found:
        raise InvalidInput(str(documents.path), found="no document", expected="held-out text")
    return found


def pin_text(
    path: Path,
    field: str,
    hashes: HashMemo,
    *,
    where: str,
    relative_to: str = "profile",
    named: str = _NAMED,
    conversations: bool = False,
) -> HeldOutText:
    """A file of documents with its sha256.

    Args:
        path: Of the file: jsonl with one document a line, or plain text with one a paragraph.
        field: Of a jsonl line.
        hashes: Of files that were hashed before.
        where: What messages call its place; ``relative_to``, what a path is relative to; ``named``, what names the
            field.
        conversations: Whether a document may be a list of messages.

    Raises:
        InvalidInput: when there is no such file, or a document is not as the settings say.
    """
    try:
        plain_file(path, most=MAX_DATA_BYTES)
    except FileNotFoundError:
        raise InvalidInput(
            where,
            found="no such file",
            expected="jsonl with one document a line, or plain text with one a paragraph, "
            f"relative to the {relative_to}",
        ) from None
    field = field if path.suffix in (".jsonl", ".json", ".ndjson") else ""
    with open_buffered(path) as file:
        for number, line in enumerate(islice(file, _MOST_LOOKED_AT if field else 0), start=1):
            if line.strip():
                _document_of_line(line, field, path, number, named, conversations)
    if not path.stat().st_size:
        raise InvalidInput(str(path), found="an empty file", expected="held-out documents")
    return HeldOutText(path=path, sha256=hashes.sha256(path), field=field, conversations=conversations)


def _split(content: bytes, documents: HeldOutText) -> Iterator[OwnDocument]:
    if documents.field:
        talks = documents.conversations
        for number, line in enumerate(content.splitlines(), start=1):
            empty = not line.strip()
            yield "" if empty else _document_of_line(line, documents.field, documents.path, number, _NAMED, talks)
        return
    try:
        yield from content.decode().replace("\r\n", "\n").split("\n\n")
    except UnicodeDecodeError as error:
        raise InvalidInput(str(documents.path), found=f"not UTF-8: {error}", expected="text") from None


def _document_of_line(line: bytes, field: str, path: Path, number: int, named: str, conversations: bool) -> OwnDocument:
    """What stands in ``field`` of a line of JSON, which ``named`` names. Raises InvalidInput where that is nothing."""
    document = parse_line(line, path, number)
    said = document.get(field)
    if isinstance(said, str):
        return said
    if conversations and isinstance(said, list) and (messages := _messages(said)) is not None:
        return messages
    found = f"no field {field!r}" if field not in document else f"{describe_kind(said)} in field {field!r}"
    remedy = suggest(field, document) if field not in document and document else ""
    expected = f"text, in the field that {named} names"
    if conversations:
        expected = f"text or messages ({{role, content}}), in the field that {named} names"
    raise InvalidInput(line_location(path, number), found=found, expected=expected, remedy=remedy)


def _messages(said: list[Any]) -> tuple[ChatMessage, ...] | None:
    """The messages of a conversation; None where it is none."""
    found = []
    for one in said:
        match one:
            case {"role": str(role), "content": str(content)}:
                found.append(ChatMessage(role, content))
            case _:
                return None
    return tuple(found)
