"""Read the ids of all tokens of a checkpoint, and compare them between checkpoints.

Merging embeddings row by row is only correct if each row belongs to the same token in every model. If it does not, the
merge succeeds, but its result generates nonsense.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from mergegate.merge_core.checkpoint.companions import Companions, is_binary_vocabulary, list_companions
from mergegate.merge_core.checkpoint.vocabulary.definition import added_ids, read_settings, read_tokenizer


@dataclass(frozen=True)
class Vocabulary:
    """Tokens and their ids, including added tokens such as special tokens and chat markers.

    Args:
        ids: Ids by token. Contains only added tokens unless ``is_complete`` is true.
        digests: SHA-256 digests of binary vocabulary files (such as SentencePiece), by file name.
        is_complete: Whether ``ids`` contains every token.
        model_tokens: Tokens of the tokenizer's own vocabulary, without added tokens. None if they are unknown.
    """

    ids: Mapping[str, int]
    digests: Mapping[str, str] = field(default_factory=dict)
    is_complete: bool = True
    model_tokens: frozenset[str] | None = None


def read_vocabulary(source: Companions | Path) -> Vocabulary | None:
    """Return the vocabulary of a checkpoint, given its files or its directory. None if it has no tokenizer files.

    Raises:
        InvalidInput: A tokenizer file has the wrong format, or is not a plain file in its directory.
    """
    files = list_companions(source) if isinstance(source, Path) else source
    contents = {name: files.read(name) for name in files if is_binary_vocabulary(name)}
    digests = {name: hashlib.sha256(content).hexdigest() for name, content in contents.items()}
    if (definition := read_tokenizer(files)) is not None:
        return Vocabulary(definition.ids, digests, model_tokens=frozenset(definition.model_ids))
    if not digests:
        return None
    pieces = next((items for content in contents.values() if (items := read_pieces(content)) is not None), None)
    added = added_ids(files, read_settings(files))
    return Vocabulary(added, digests, is_complete=False, model_tokens=None if pieces is None else frozenset(pieces))


def vocabulary_differences(first: Vocabulary, second: Vocabulary) -> tuple[list[str], list[str], list[str]]:
    """Compare the ids of two vocabularies. If one of them is incomplete, only added tokens are compared.

    Returns:
        Tokens with different ids, tokens only in ``first``, and tokens only in ``second``. If only one vocabulary has a
        token, and the other uses its id for a different token, it counts as a token with different ids, because that
        embedding row has two meanings.
    """
    ids_1, ids_2 = first.ids, second.ids
    if not (first.is_complete and second.is_complete):
        model_tokens = (first.model_tokens or frozenset()) | (second.model_tokens or frozenset())
        ids_1, ids_2 = (
            {token: number for token, number in ids.items() if token not in model_tokens} for ids in (ids_1, ids_2)
        )
    tokens_1 = {number: token for token, number in ids_1.items()}
    tokens_2 = {number: token for token, number in ids_2.items()}
    moved = [token for token, number in ids_1.items() if token in ids_2 and ids_2[token] != number]
    moved_set = set(moved)
    clashing = [
        token
        for number, token in tokens_1.items()
        if number in tokens_2 and tokens_2[number] != token and token not in moved_set and token not in ids_2
    ]
    clashing_set = set(clashing)
    only_1 = [token for token in ids_1 if token not in ids_2 and token not in clashing_set]
    only_2 = [token for token, number in ids_2.items() if token not in ids_1 and number not in tokens_1]
    return moved + clashing, only_1, only_2


def read_pieces(content: bytes) -> tuple[str, ...] | None:
    """Return the pieces of a SentencePiece model in the order of their ids, or None for other content.

    The file is a protocol buffer (https://github.com/google/sentencepiece, ``sentencepiece_model.proto``). Field 1 of
    the message is repeated, once per piece. Field 1 of a piece is its text.
    """
    try:
        pieces = [
            text.decode()
            for number, message in _fields(content)
            if number == 1
            for field, text in _fields(message)
            if field == 1
        ]
    except (ValueError, IndexError):  # UnicodeDecodeError is a ValueError.
        return None
    return tuple(pieces) or None


def _fields(content: bytes) -> list[tuple[int, bytes]]:
    """Return the numbers and bytes of a message's length-delimited fields. Invalid content raises an exception."""
    fields, position = [], 0
    while position < len(content):
        key, position = _varint(content, position)
        kind, number = key & 7, key >> 3
        if kind == 2:
            length, position = _varint(content, position)
            fields.append((number, content[position : position + length]))
            position += length
        elif kind in (1, 5):
            position += 8 if kind == 1 else 4
        elif kind == 0:
            _, position = _varint(content, position)
        else:
            raise ValueError("not a protocol buffer")
    if position != len(content):
        raise IndexError("a field ends after the message")
    return fields


def _varint(content: bytes, position: int) -> tuple[int, int]:
    """Return the variable-length integer at a position, and the position after it."""
    value = shift = 0
    while True:
        byte = content[position]
        value |= (byte & 127) << shift
        position, shift = position + 1, shift + 7
        if byte < 128:
            return value, position
        if shift > 63:
            raise ValueError("a number of more than 64 bits")
