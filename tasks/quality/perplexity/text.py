"""Pin held-out documents by content, and read them only if the file has not changed since."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
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
from mergegate.tasks.base.store import NotInKey
from mergegate.tasks.models.checkpoints import expect_inputs
from mergegate.tasks.quality.evaluation import DocumentSet, split_documents

_MAX_CHECKED_LINES = 2000  # number of lines that are checked before anything is measured
_FIELD_SETTING = "perplexity.field"
# Fields of a jsonl line that name the stratum of a document if the profile names no field. The first one counts.
STRATUM_FIELDS = ("language", "lang", "source")
_STRATUM_CHARACTERS = 40  # longest name of a stratum


class HeldOutText(BaseModel):
    """Held-out documents pinned by content."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    path: Annotated[Path, NotInKey]  # jsonl with one document per line, or plain text with one per paragraph
    sha256: str
    field: str = "text"  # field of a jsonl line; empty for plain text
    only: DocumentSet | None = None  # document set to use; None: all documents
    conversations: bool = False  # whether a document may be a list of messages
    stratum: str = ""  # field of a jsonl line that names the document's stratum; empty: the first of STRATUM_FIELDS

    def content_key(self) -> object:
        # Optional fields enter the key only if set, so that text measured before they existed keeps its key.
        optional = ({"only"} if self.only else set()) | ({"stratum"} if self.stratum else set())
        return self.model_dump(mode="json", include={"sha256", "field"} | optional)


class ChatMessage(NamedTuple):
    """One message in a conversation."""

    role: str
    content: str


# A document as in the file: a text, or the messages of a conversation.
OwnDocument: TypeAlias = str | tuple[ChatMessage, ...]


class HeldOutDocument(NamedTuple):
    """One document of held-out text."""

    doc_id: int  # position in the file
    content: OwnDocument
    stratum: str = ""  # language or source that the document names; empty if it names none

    @property
    def text(self) -> str:
        """The text itself, or the joined messages of a conversation."""
        content = self.content
        return content if isinstance(content, str) else "\n".join(message.content for message in content)

    @property
    def hash(self) -> str:
        """16 hex digits of the text without differences in white space."""
        return hashlib.sha256(" ".join(self.text.split()).encode()).hexdigest()[:16]


class DistinctDocuments(NamedTuple):
    """Held-out documents, each text once."""

    documents: tuple[HeldOutDocument, ...]
    duplicates: int  # number of dropped documents, which repeat an earlier one


def read_distinct(documents: HeldOutText, limit: int | None) -> DistinctDocuments:
    """Return the first ``limit`` documents whose text differs from all earlier ones, to measure each text once.

    Texts that differ only in white space are equal. A repeated document adds no information, but it would count as an
    independent one.
    """
    distinct: dict[str, HeldOutDocument] = {}
    duplicates = 0
    for document in _documents_in(documents):
        text_hash = document.hash
        if text_hash in distinct:
            duplicates += 1
        elif len(distinct) == limit:
            break
        else:
            distinct[text_hash] = document
    return DistinctDocuments(tuple(distinct.values()), duplicates)


def read_texts(documents: HeldOutText, limit: int | None) -> tuple[tuple[int, str], ...]:
    """Return ``(doc_id, text)`` of the first ``limit`` documents that are not empty.

    If ``documents`` specifies a document set, only its members count. The text of a conversation joins its messages.

    Raises:
        InvalidInput: If the file changed after it was pinned, a line is malformed, or there is no document.
    """
    return tuple((document.doc_id, document.text) for document in islice(_documents_in(documents), limit))


def read_documents_verbatim(documents: HeldOutText, limit: int | None) -> tuple[OwnDocument, ...]:
    """Return the same documents as :func:`read_texts`, in their original form: texts or conversations."""
    return tuple(document.content for document in islice(_documents_in(documents), limit))


def _documents_in(documents: HeldOutText) -> Iterator[HeldOutDocument]:
    """Yield the documents that are not empty."""
    content = read_plain(documents.path, MAX_DATA_BYTES)
    if hashlib.sha256(content).hexdigest() != documents.sha256:
        raise InvalidInput(str(documents.path), found="a file that changed during the run", remedy="run again")
    found = (document for document in _split(content, documents) if document.text.strip())
    if documents.only:
        every = list(found)
        texts = [(document.doc_id, document.text) for document in every]
        selected = split_documents(texts, documents.only.division, "perplexity")[documents.only.name]
        found = (document for document in every if document.doc_id in selected)
    at_least_one = False
    for document in found:
        at_least_one = True
        yield document
    if not at_least_one:
        raise InvalidInput(str(documents.path), found="no document", expected="held-out text")


@dataclass(frozen=True)
class TextSetting:
    """Names of the settings that refer to a file of documents, for messages."""

    location: str  # location of the setting that contains the path
    field: str = _FIELD_SETTING  # setting that contains the name of the document field in a jsonl line
    relative_to: str = "profile"  # file to which a path is relative


def pin_text(
    path: Path, field: str, hashes: HashMemo, setting: TextSetting, *, conversations: bool = False, stratum: str = ""
) -> HeldOutText:
    """Hash a file of documents and check its lines.

    The file at ``path`` is jsonl with one document per line, in ``field``, or plain text with one per paragraph. If
    ``conversations`` is true, a document may be a list of messages. ``stratum`` is the field that names a document's
    stratum. Default: the first of ``STRATUM_FIELDS`` that the document has.

    Raises:
        InvalidInput: If the file is missing or empty, or a document does not match the settings.
    """
    try:
        plain_file(path, most=MAX_DATA_BYTES)
    except FileNotFoundError:
        raise InvalidInput(
            setting.location,
            found="no such file",
            expected="jsonl with one document per line, or plain text with one per paragraph, relative to the "
            + setting.relative_to,
        ) from None
    field = field if path.suffix in (".jsonl", ".json", ".ndjson") else ""
    text = HeldOutText(path=path, sha256="", field=field, conversations=conversations, stratum=stratum)
    has_stratum = False
    with open_buffered(path) as file:
        for number, line in enumerate(islice(file, _MAX_CHECKED_LINES if field else 0), start=1):
            if line.strip():
                has_stratum |= bool(_document_of_line(line, number, text, setting.field).stratum)
    if not path.stat().st_size:
        raise InvalidInput(str(path), found="an empty file", expected="held-out documents")
    if stratum and not has_stratum:
        raise InvalidInput(
            f"perplexity.stratum: {stratum}",
            found=f"no document with a name in this field in {path.name}",
            expected="a field of jsonl documents that names their language, source or another stratum",
        )
    expect_inputs(path)
    return text.model_copy(update={"sha256": hashes.sha256(path)})


def _split(content: bytes, documents: HeldOutText) -> Iterator[HeldOutDocument]:
    if documents.field:
        for number, line in enumerate(content.splitlines(), start=1):
            if line.strip():
                yield _document_of_line(line, number, documents, _FIELD_SETTING)
        return
    try:
        for doc_id, paragraph in enumerate(content.decode().replace("\r\n", "\n").split("\n\n")):
            yield HeldOutDocument(doc_id, paragraph)
    except UnicodeDecodeError as error:
        raise InvalidInput(str(documents.path), found=f"not UTF-8: {error}", expected="text") from None


def _document_of_line(line: bytes, number: int, text: HeldOutText, setting: str) -> HeldOutDocument:
    """Return the document in a line of JSON, or raise InvalidInput if there is none."""
    field = text.field
    document = parse_line(line, text.path, number)
    names = (document.get(name) for name in ((text.stratum,) if text.stratum else STRATUM_FIELDS) if name != field)
    stratum = next((" ".join(name.split()) for name in names if isinstance(name, str) and name.strip()), "")
    stratum = "".join(character for character in stratum if character.isprintable())[:_STRATUM_CHARACTERS]
    value: Any = document.get(field)
    if isinstance(value, str):
        return HeldOutDocument(number - 1, value, stratum)
    if text.conversations and isinstance(value, list):
        messages = []
        for item in value:
            match item:
                case {"role": str(role), "content": str(content)}:
                    messages.append(ChatMessage(role, content))
        if len(messages) == len(value):
            return HeldOutDocument(number - 1, tuple(messages), stratum)
    kinds = "text or messages ({role, content})" if text.conversations else "text"
    raise InvalidInput(
        line_location(text.path, number),
        found=f"no field {field!r}" if field not in document else f"{describe_kind(value)} in field {field!r}",
        expected=f"{kinds} in the field that {setting} names",
        remedy=suggest(field, document) if field not in document else "",
    )
