"""Read the pieces of a SentencePiece model from its file, without the library.

The file is a protocol buffer (https://github.com/google/sentencepiece, ``sentencepiece_model.proto``). Field 1 of the
message is repeated, once per piece. Field 1 of a piece is its text.
"""

from __future__ import annotations

_PIECE = 1
_TEXT = 1


def read_pieces(content: bytes) -> tuple[str, ...] | None:
    """Return the pieces in the order of their ids, or None if ``content`` is not a SentencePiece model."""
    try:
        pieces = [
            text.decode()
            for number, message in _fields(content)
            if number == _PIECE
            for field, text in _fields(message)
            if field == _TEXT
        ]
    except (ValueError, IndexError):  # UnicodeDecodeError is a ValueError.
        return None
    return tuple(pieces) or None


def _fields(content: bytes) -> list[tuple[int, bytes]]:
    """Return number and bytes of the length-delimited fields of a message. Numeric fields are skipped.

    Raises:
        ValueError: The content is not a message.
        IndexError: The content ends within a field.
    """
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
