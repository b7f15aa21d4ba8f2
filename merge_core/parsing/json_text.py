"""Parse JSON with limits on size, number of values, depth and digits, and read JSON Lines files line by line.

Plain ``json.loads`` uses up to 25 times the size of the text in memory, raises RecursionError for a thousand nested
brackets, accepts unpaired surrogates, and turns 4,000 digits into a number that most arithmetic rejects.

Parsers in libraries raise exceptions of many types: RecursionError for a thousand brackets, OverflowError for 400
digits, UnicodeError for an unpaired surrogate, ValueError for a month 13. If mergegate caught only known types, an
unknown one could crash a scheduled run. Therefore, all code that parses untrusted bytes, of any format, runs inside
:func:`parsing_errors`, and no other code does.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

from mergegate.merge_core.errors import InvalidInput, MergegateError
from mergegate.merge_core.parsing.files import content_of, open_plain

# Digits of one number. ``model_max_length`` in real tokenizers has 31 digits; Python does not print more than 4,300.
MAX_DIGITS = 40
# The closing quote is optional, so that every quote begins a match and the pattern never has to backtrack.
_STRINGS = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"?', re.DOTALL)
# Translating all digits to the same one finds a long number by substring search, ten times as fast as by a pattern.
_DIGITS, _LONG_NUMBER = bytes.maketrans(b"123456789", b"0" * 9), b"0" * (MAX_DIGITS + 1)
_NO_BRACKETS = bytes(sorted(set(range(256)) - set(b"[]{}")))
_STEP = {ord("["): 1, ord("{"): 1, ord("]"): -1, ord("}"): -1}


@contextmanager
def parsing_errors(location: str, problem: str, *, expected: str = "", remedy: str = "") -> Iterator[None]:
    """Turn every exception in the ``with`` block into InvalidInput, except mergegate's own errors.

    Only parse inside the block, so that it does not hide errors in other code.
    """
    try:
        yield
        return
    except MergegateError:
        raise
    except OSError as error:
        found = f"cannot be read: {error.strerror or error}"
    except RecursionError:
        found = f"{problem}: nested too deeply"
    except MemoryError:
        found = f"{problem}: too large for the memory"
    except json.JSONDecodeError as error:  # Its own text also gives the character offset, which is omitted.
        line = f"line {error.lineno}, " if error.lineno > 1 else ""
        found = f"{problem}: {error.msg[:1].lower()}{error.msg[1:]} at {line}column {error.colno}"
    except Exception as error:  # Libraries do not document which exceptions their parsers raise.
        # The messages of these exceptions are not clear without the type. A KeyError, for example, has only a name.
        needs_type = isinstance(error, LookupError | TypeError | AttributeError) or not str(error)
        found = f"{problem}: {f'{type(error).__name__}: ' if needs_type else ''}{error}"
    raise InvalidInput(location, found=found, expected=expected, remedy=remedy) from None


def require_printable(value: object, location: str) -> None:
    """Raise InvalidInput if a string in plain data contains an unpaired surrogate.

    Such a string cannot be printed, hashed or used as a file name.
    """
    pending = [value]
    while pending:
        item = pending.pop()
        if isinstance(item, str):
            if not item.isascii():
                try:
                    item.encode()
                except UnicodeEncodeError:
                    raise InvalidInput(
                        location, found=f"{item!r:.60} contains an incomplete character", expected="Unicode text"
                    ) from None
        elif isinstance(item, Mapping):
            pending += item.keys()
            pending += item.values()
        elif isinstance(item, (list, tuple)):
            pending += item


@dataclass(frozen=True)
class JsonBounds:
    """Limits for one kind of file, larger than any legitimate file needs.

    Args:
        size: Size in bytes. Default: 16 MiB.
        values: Number of all numbers, strings, lists and objects, which take up to 100 bytes of memory each. Default:
            1,000,000.
        depth: Nesting depth of lists and objects. Default: 64.
    """

    size: int = 16 << 20
    values: int = 1_000_000
    depth: int = 64


Pairs = Callable[[list[tuple[str, Any]]], Any]
SMALL = JsonBounds()


def parse_json(
    content: bytes, location: str, *, bounds: JsonBounds = SMALL, pairs: Pairs | None = None, expected: str = ""
) -> Any:
    """Parse JSON text in UTF-8.

    ``pairs`` builds a value from the key-value pairs of each object; by default, a dict in which the last of several
    equal keys wins. Error messages show the name of the text, ``location``, and its ``expected`` content.
    """
    _check_bounds(content, location, bounds)

    def parse_int(text: str) -> int:
        if len(text) > MAX_DIGITS:
            raise InvalidInput(
                location, found=f"a number of {len(text)} digits", expected=f"at most {MAX_DIGITS} digits"
            )
        return int(text)

    with parsing_errors(location, "not JSON", expected=expected):
        # Check each number only if the text has a long run of digits, because a table of tensors has half a million
        # numbers.
        numbers = parse_int if _LONG_NUMBER in content.translate(_DIGITS) else None
        # Decode first, because json.loads accepts unpaired surrogates in bytes.
        value = json.loads(content.decode("utf-8-sig"), object_pairs_hook=pairs, parse_int=numbers)
        if b"\\ud" in content or b"\\uD" in content:  # UTF-8 text can only contain a surrogate as an escape.
            require_printable(value, location)
    return value


def parse_json_object(
    content: bytes, location: str, *, bounds: JsonBounds = SMALL, pairs: Pairs | None = None
) -> dict[str, Any]:
    """Parse JSON text that contains an object. The arguments are those of :func:`parse_json`."""
    value = parse_json(content, location, bounds=bounds, pairs=pairs)
    if not isinstance(value, dict):
        raise InvalidInput(location, found="not a JSON object")
    return value


def unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return the pairs of a JSON object as a dict, for ``parse_json``. Raise ValueError if two keys are equal."""
    result = dict(pairs)
    if len(result) < len(pairs):
        key, _ = Counter(key for key, _ in pairs).most_common(1)[0]
        raise ValueError(f"duplicate key {key!r:.80}")
    return result


def read_json(path: Path, *, bounds: JsonBounds = SMALL) -> dict[str, Any]:
    """Return the JSON object in a file that is inside its directory, without following links that lead out of it."""
    try:
        with open_plain(path, within=path.parent) as file:
            content = content_of(file, path, bounds.size)
    except FileNotFoundError:
        expected = "a file that every Hugging Face checkpoint has" if path.name == "config.json" else ""
        raise InvalidInput(str(path), found="no such file", expected=expected) from None
    return parse_json_object(content, str(path), bounds=bounds)


def line_location(path: Path, number: int) -> str:
    """Return the name for line ``number`` (from 1) of ``path`` in error messages."""
    return f"{path}: line {number}"


def parse_line(line: bytes, path: Path, number: int) -> dict[str, Any]:
    """Parse ``line``, which is line ``number`` (from 1) of ``path``, as a JSON object."""
    location = line_location(path, number)
    document = parse_json(line, location, expected="one JSON object per line")
    if not isinstance(document, dict):
        raise InvalidInput(location, found=type(document).__name__, expected="a JSON object")
    return document


def read_lines(path: Path, *, longest: int, most: int) -> Iterator[tuple[int, bytes]]:
    """Yield the lines of a plain file with their numbers (from 1), holding only one line in memory at a time.

    Raises:
        InvalidInput: The file cannot be read, a line is over ``longest`` bytes, or there are over ``most`` lines.
    """
    try:
        with open_plain(path) as raw, open(raw.fileno(), "rb", closefd=False) as file:  # Adds buffering.
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


def _check_bounds(content: bytes, location: str, bounds: JsonBounds) -> None:
    if len(content) > bounds.size:
        raise InvalidInput(location, found=f"{len(content)} bytes", expected=f"at most {bounds.size} bytes")
    # Every value except the first follows one of these characters. Counting those inside strings too gives a fast
    # upper bound.
    brackets = content.count(b"[") + content.count(b"{")
    values = brackets + content.count(b",")
    if values > bounds.values:
        raise InvalidInput(location, found=f"up to {values} values", expected=f"at most {bounds.values}")
    if brackets > bounds.depth and (depth := _depth(content)) > bounds.depth:
        raise InvalidInput(location, found=f"{depth} levels", expected=f"at most {bounds.depth} levels")


def _depth(content: bytes) -> int:
    """Return the nesting depth of brackets outside strings. The text may be invalid JSON."""
    brackets = _STRINGS.sub(b"", content).translate(None, delete=_NO_BRACKETS)
    return max(accumulate(map(_STEP.__getitem__, brackets)), default=0)
