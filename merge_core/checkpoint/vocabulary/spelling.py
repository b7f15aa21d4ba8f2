"""The bytes that a token stands for, so that tokens of two tokenizers can be told to be the same.

``Ġthe`` of a byte-level tokenizer and ``▁the`` of SentencePiece are one token, written in two ways.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any

from mergegate.merge_core.checkpoint.vocabulary.definition import TokenizerDefinition


def token_bytes(tokenizer: TokenizerDefinition) -> dict[bytes, int]:
    """Bytes → id of every ordinary token; added tokens by their text, with a zero byte in front that no text has.

    Of several tokens that stand for the same bytes the first counts.
    """
    byte_level = "ByteLevel" in set(_types(tokenizer.content.get("decoder"))) | set(
        _types(tokenizer.content.get("pre_tokenizer"))
    )
    metaspace = not byte_level and any("▁" in token for token in tokenizer.model_ids)
    found: dict[bytes, int] = {}
    for token, number in tokenizer.ids.items():
        if token in tokenizer.added:
            found.setdefault(b"\0" + token.encode(), number)
        elif byte_level:
            found.setdefault(_of_byte_level(token), number)
        elif metaspace:
            found.setdefault(_of_metaspace(token), number)
        else:
            found.setdefault(token.encode(), number)
    return found


def _types(part: Any) -> Iterator[str]:
    if isinstance(part, Mapping):
        yield str(part.get("type"))
        for inner in part.values():
            yield from _types(inner)
    elif isinstance(part, list):
        for inner in part:
            yield from _types(inner)


@cache
def _byte_of_character() -> dict[str, int]:
    """GPT-2's table: printable characters of Latin-1 stand for themselves, the other bytes for those from U+0100."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    table = {chr(byte): byte for byte in printable}
    others = [byte for byte in range(256) if byte not in set(printable)]
    return table | {chr(0x100 + place): byte for place, byte in enumerate(others)}


def _of_byte_level(token: str) -> bytes:
    table = _byte_of_character()
    if all(character in table for character in token):
        return bytes(table[character] for character in token)
    return token.encode()


def _of_metaspace(token: str) -> bytes:
    if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
        try:
            return bytes([int(token[3:5], 16)])
        except ValueError:
            pass
    return token.replace("▁", " ").encode()
