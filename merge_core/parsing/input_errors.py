"""The one rule at the edge: a parser ends in a value or in InvalidInput, whatever it was given.

Parsers of libraries let their own accidents out: RecursionError at a thousand brackets, OverflowError at 400 digits,
UnicodeError at half a character, ValueError at a month 13. Catching each where it was once seen means finding the next
one at night; so what parses a stranger's bytes stands inside :func:`parsing_errors`, and nothing else does.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from json import JSONDecodeError
from typing import TypeVar

from mergegate.merge_core.errors import InvalidInput, MergegateError

# Of one number. ``model_max_length`` of real tokenizers has 31 digits; Python refuses to print one of more than 4300.
MAX_DIGITS = 40

T = TypeVar("T")


@contextmanager
def parsing_errors(where: str, what: str, *, expected: str = "", remedy: str = "") -> Iterator[None]:
    """Turn whatever parsing a stranger's bytes lets out into InvalidInput. Only parsing may stand inside.

    Args:
        where: File or field, for the message.
        what: What it is not, then: ``not JSON``, ``damaged``.
        expected: What it should be.
        remedy: What to do.

    Raises:
        InvalidInput: in place of any exception that is none of ours; ours go through.
    """
    try:
        yield
    except MergegateError:
        raise
    except OSError as error:
        raise InvalidInput(
            where, found=f"cannot be read: {error.strerror or error}", expected=expected, remedy=remedy
        ) from None
    except RecursionError:
        raise InvalidInput(where, found=f"{what}: nested too deeply", expected=expected, remedy=remedy) from None
    except MemoryError:
        raise InvalidInput(where, found=f"{what}: too large for the memory", expected=expected, remedy=remedy) from None
    except Exception as error:  # foreign parsers promise no set of types; the point of this file
        # Of these the message alone says nothing: KeyError is a name, the others speak of our program.
        if isinstance(error, JSONDecodeError):  # which counts characters, too
            line = f"line {error.lineno}, " if error.lineno > 1 else ""
            said = f"{error.msg[:1].lower()}{error.msg[1:]} at {line}column {error.colno}"
            raise InvalidInput(where, found=f"{what}: {said}", expected=expected, remedy=remedy) from None
        bare = isinstance(error, LookupError | TypeError | AttributeError) or not str(error)
        kind = f"{type(error).__name__}: " if bare else ""
        raise InvalidInput(where, found=f"{what}: {kind}{error}", expected=expected, remedy=remedy) from None


def require_type(value: object, kind: type[T], where: str, expected: str, *, remedy: str = "") -> T:
    """``value``, which must be of that very type (True is no int here).

    Raises:
        InvalidInput: It is something else.
    """
    if type(value) is not kind:
        raise InvalidInput(where, found=f"{value!r:.60}", expected=expected, remedy=remedy)
    return value


def require_printable(value: object, where: str) -> None:
    """See that every text in plain data is text: half a surrogate pair cannot be printed, hashed or be a file's name.

    Raises:
        InvalidInput: naming the first that is not.
    """
    waiting = [value]
    while waiting:
        one = waiting.pop()
        if isinstance(one, str):
            if not one.isascii():
                try:
                    one.encode()
                except UnicodeEncodeError:
                    raise InvalidInput(
                        where, found=f"{one!r:.60}, which has half a character in it", expected="Unicode text"
                    ) from None
        elif isinstance(one, Mapping):
            waiting += one.keys()
            waiting += one.values()
        elif isinstance(one, (list, tuple)):
            waiting += one
