"""The pieces of a SentencePiece model, read from its file without the library.

The file is a protocol buffer (https://github.com/google/sentencepiece, ``sentencepiece_model.proto``): field 1 of the
message is repeated, one piece each, whose field 1 is its text.
"""

from __future__ import annotations

_PIECE = 1
_TEXT = 1


def read_pieces(content: bytes) -> tuple[str, ...] | None:
    """Return the pieces in the order of their ids; None if ``content`` is not a SentencePiece model."""
    try:
        pieces = [
            text.decode()
            for number, message in _fields(content)
            if number == _PIECE
            for field, text in _fields(message)
            if field == _TEXT
        ]
    except (ValueError, IndexError):  # UnicodeDecodeError among them
        return None
    return tuple(pieces) or None


def _fields(content: bytes) -> list[tuple[int, bytes]]:
    """Return the fields of a message: number and bytes. Numbers and floats have none.

    Raises:
        ValueError: It is not a message.
        IndexError: It ends within a field.
    """
    found, at = [], 0
    while at < len(content):
        key, at = _varint(content, at)
        kind, number = key & 7, key >> 3
        if kind == 2:
            length, at = _varint(content, at)
            found.append((number, content[at : at + length]))
            at += length
        elif kind in (1, 5):
            at += 8 if kind == 1 else 4
        elif kind == 0:
            _, at = _varint(content, at)
        else:
            raise ValueError("not a protocol buffer")
    if at != len(content):
        raise IndexError("a field ends after the message")
    return found


def _varint(content: bytes, at: int) -> tuple[int, int]:
    """Return the number that begins at a place, and the place after it."""
    value = shift = 0
    while True:
        byte = content[at]
        value |= (byte & 127) << shift
        at, shift = at + 1, shift + 7
        if byte < 128:
            return value, at
        if shift > 63:
            raise ValueError("a number of more than 64 bits")
