"""Turn every exception that a parser raises for untrusted input into InvalidInput.

Parsers in libraries raise exceptions of many types: RecursionError for a thousand brackets, OverflowError for 400
digits, UnicodeError for an unpaired surrogate, ValueError for a month 13. If mergegate caught only known types, an
unknown one could crash a scheduled run. Therefore, all code that parses untrusted bytes runs inside
:func:`parsing_errors`, and no other code does.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from json import JSONDecodeError

from mergegate.merge_core.errors import InvalidInput, MergegateError

# Digits of one number. ``model_max_length`` in real tokenizers has 31 digits; Python does not print more than 4,300.
MAX_DIGITS = 40


@contextmanager
def parsing_errors(location: str, problem: str, *, expected: str = "", remedy: str = "") -> Iterator[None]:
    """Turn every exception in the ``with`` block into InvalidInput, except mergegate's own errors.

    Only parse inside the block, so that it does not hide errors in other code.
    """
    try:
        yield
    except MergegateError:
        raise
    except OSError as error:
        raise InvalidInput(
            location, found=f"cannot be read: {error.strerror or error}", expected=expected, remedy=remedy
        ) from None
    except RecursionError:
        raise InvalidInput(location, found=f"{problem}: nested too deeply", expected=expected, remedy=remedy) from None
    except MemoryError:
        raise InvalidInput(
            location, found=f"{problem}: too large for the memory", expected=expected, remedy=remedy
        ) from None
    except Exception as error:  # Libraries do not document which exceptions their parsers raise.
        if isinstance(error, JSONDecodeError):  # Its own text also gives the character offset, which is omitted.
            line = f"line {error.lineno}, " if error.lineno > 1 else ""
            detail = f"{error.msg[:1].lower()}{error.msg[1:]} at {line}column {error.colno}"
            raise InvalidInput(location, found=f"{problem}: {detail}", expected=expected, remedy=remedy) from None
        # The messages of these exceptions are not clear without the type. A KeyError, for example, has only a name.
        needs_type = isinstance(error, LookupError | TypeError | AttributeError) or not str(error)
        kind = f"{type(error).__name__}: " if needs_type else ""
        raise InvalidInput(location, found=f"{problem}: {kind}{error}", expected=expected, remedy=remedy) from None


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
