"""JSON, read with bounds: size, count of values, depth, digits; and JSON lines, one at a time.

Plain ``json.loads`` takes up to 25 times the text's size in memory, lets RecursionError out at a thousand brackets,
accepts half characters, and makes of 4,000 digits a number that most arithmetic then refuses.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

from mergegate.merge_core.errors import InvalidInput
from mergegate.merge_core.parsing.files import content_of, open_plain
from mergegate.merge_core.parsing.input_errors import MAX_DIGITS, parsing_errors, require_printable

# The closing quote may be missing: so every quote begins a match, and no start is tried in vain.
_STRINGS = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"?', re.DOTALL)
# Every digit as the same one: then a long number is found as a text is, ten times as fast as by a pattern.
_DIGITS, _LONG_NUMBER = bytes.maketrans(b"123456789", b"0" * 9), b"0" * (MAX_DIGITS + 1)
_NO_BRACKETS = bytes(sorted(set(range(256)) - set(b"[]{}")))
_STEP = {ord("["): 1, ord("{"): 1, ord("]"): -1, ord("}"): -1}


@dataclass(frozen=True)
class JsonBounds:
    """What honest files of a kind need, and some.

    Args:
        size: Bytes.
        values: Numbers, texts, lists and objects in all; each may take 100 bytes of memory.
        depth: Of lists and objects in each other.
    """

    size: int = 16 << 20
    values: int = 1_000_000
    depth: int = 64


@dataclass(frozen=True)
class _Numbers:
    """Reads whole numbers of a bounded length."""

    where: str

    def __call__(self, text: str) -> int:
        if len(text) > MAX_DIGITS:
            raise InvalidInput(
                self.where, found=f"a number of {len(text)} digits", expected=f"at most {MAX_DIGITS} digits"
            )
        return int(text)


Pairs = Callable[[list[tuple[str, Any]]], Any]
SMALL = JsonBounds()


def parse_json(
    content: bytes, where: str, *, bounds: JsonBounds = SMALL, pairs: Pairs | None = None, expected: str = ""
) -> Any:
    """The value that a JSON text of UTF-8 says.

    Args:
        content: The text.
        where: What messages call it.
        bounds: What is refused before it is parsed.
        pairs: What makes a value of the pairs of each object; absent: a dict in which the last of a key wins.
        expected: What it should be, for messages.

    Raises:
        InvalidInput: Not JSON, or beyond the bounds.
    """
    _check_bounds(content, where, bounds)
    with parsing_errors(where, "not JSON", expected=expected):
        # Digits are counted number by number only where there are so many beside each other: a table of tensors has
        # half a million numbers.
        numbers = _Numbers(where) if _LONG_NUMBER in content.translate(_DIGITS) else None
        # Not bytes: json.loads would let halves of characters through.
        value = json.loads(content.decode("utf-8-sig"), object_pairs_hook=pairs, parse_int=numbers)
        if b"\\ud" in content or b"\\uD" in content:  # the only way for half a character into a text of UTF-8
            require_printable(value, where)
    return value


def parse_json_object(content: bytes, where: str, *, bounds: JsonBounds = SMALL) -> dict[str, Any]:
    """As :func:`parse_json`, which must be an object.

    Raises:
        InvalidInput: As :func:`parse_json`, or something else.
    """
    value = parse_json(content, where, bounds=bounds)
    if not isinstance(value, dict):
        raise InvalidInput(where, found="not a JSON object")
    return value


def read_json(path: Path, *, bounds: JsonBounds = SMALL) -> dict[str, Any]:
    """The JSON object in the file at ``path``, which must lie in its directory: no link out of it is followed.

    Raises:
        InvalidInput: Missing, unreadable, no plain file, not JSON, beyond the bounds, not an object.
    """
    try:
        with open_plain(path, within=path.parent) as file:
            content = content_of(file, path, bounds.size)
    except FileNotFoundError:
        raise InvalidInput(str(path), found="no such file", expected="a Hugging Face checkpoint has it") from None
    return parse_json_object(content, str(path), bounds=bounds)


def line_location(path: Path, number: int) -> str:
    """What messages call line ``number`` (from 1) of ``path``."""
    return f"{path}: line {number}"


def parse_line(line: bytes, path: Path, number: int) -> dict[str, Any]:
    """The object in line ``number`` (from 1) of ``path``.

    Raises:
        InvalidInput: for a line that is no JSON object.
    """
    where = line_location(path, number)
    document = parse_json(line, where, expected="one JSON object a line")
    if not isinstance(document, dict):
        raise InvalidInput(where, found=type(document).__name__, expected="a JSON object")
    return document


def read_lines(path: Path, *, longest: int, most: int) -> Iterator[tuple[int, bytes]]:
    """``(number from 1, line)`` of a plain file, one at a time: memory is that of a line.

    Args:
        longest: Bytes of a line.
        most: Lines.

    Raises:
        InvalidInput: It cannot be read, or is beyond the bounds.
    """
    try:
        with open_plain(path) as raw, open(raw.fileno(), "rb", closefd=False) as file:  # a descriptor
            number = 0
            while line := file.readline(longest + 1):
                number += 1
                if len(line) > longest:
                    raise InvalidInput(
                        line_location(path, number), found=f"over {longest} bytes", expected="a shorter line"
                    )
                if number > most:
                    raise InvalidInput(str(path), found=f"over {most} lines", expected=f"at most {most}")
                yield number, line
    except FileNotFoundError:
        raise InvalidInput(str(path), found="no such file") from None
    except OSError as error:
        raise InvalidInput(str(path), found=f"cannot be read: {error.strerror}") from None


def _check_bounds(content: bytes, where: str, bounds: JsonBounds) -> None:
    if len(content) > bounds.size:
        raise InvalidInput(where, found=f"{len(content)} bytes", expected=f"at most {bounds.size} bytes")
    # Each value but the first comes after one of these, also inside texts: an upper bound, and quick.
    opened = content.count(b"[") + content.count(b"{")
    values = opened + content.count(b",")
    if values > bounds.values:
        raise InvalidInput(where, found=f"up to {values} values", expected=f"at most {bounds.values}")
    if opened > bounds.depth and (depth := _depth(content)) > bounds.depth:
        raise InvalidInput(where, found=f"{depth} levels", expected=f"at most {bounds.depth} levels")


def _depth(content: bytes) -> int:
    """The deepest nesting of brackets outside texts. Where the text is not JSON, the parser will say so."""
    brackets = _STRINGS.sub(b"", content).translate(None, delete=_NO_BRACKETS)
    return max(accumulate(map(_STEP.__getitem__, brackets)), default=0)
