"""Convert tokens to the bytes that they represent, so that tokens of two tokenizers can be compared.

``Ġthe`` of a byte-level tokenizer and ``▁the`` of SentencePiece are two spellings of the same token.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any

from mergegate.merge_core.checkpoint.vocabulary.definition import TokenizerDefinition


def token_bytes(tokenizer: TokenizerDefinition) -> dict[bytes, int]:
    """Return the id of every token by the bytes that it represents.

    Added tokens are listed by their text with a leading zero byte, which does not occur in texts. If several tokens
    represent the same bytes, the first one counts.
    """
    byte_level = "ByteLevel" in set(_types(tokenizer.content.get("decoder"))) | set(
        _types(tokenizer.content.get("pre_tokenizer"))
    )
    metaspace = not byte_level and any("▁" in token for token in tokenizer.model_ids)
    ids: dict[bytes, int] = {}
    for token, number in tokenizer.ids.items():
        if token in tokenizer.added:
            ids.setdefault(b"\0" + token.encode(), number)
        elif byte_level:
            ids.setdefault(_byte_level_bytes(token), number)
        elif metaspace:
            ids.setdefault(_metaspace_bytes(token), number)
        else:
            ids.setdefault(token.encode(), number)
    return ids


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
    """Return GPT-2's table: printable Latin-1 characters are their own bytes, U+0100 and up are the other bytes."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    table = {chr(byte): byte for byte in printable}
    others = [byte for byte in range(256) if byte not in set(printable)]
    return table | {chr(0x100 + index): byte for index, byte in enumerate(others)}


def _byte_level_bytes(token: str) -> bytes:
    table = _byte_of_character()
    if all(character in table for character in token):
        return bytes(table[character] for character in token)
    return token.encode()


def _metaspace_bytes(token: str) -> bytes:
    if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
        try:
            return bytes([int(token[3:5], 16)])
        except ValueError:
            pass
    return token.replace("▁", " ").encode()
