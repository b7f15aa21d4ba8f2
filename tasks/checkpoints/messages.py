"""Receive messages from the model process, accepting only data.

Untrusted code runs in that process, so a message may have been forged.
"""

from __future__ import annotations

import dataclasses
import enum
import importlib
import io
import pickle
from multiprocessing.connection import Connection
from typing import Any

from pydantic import BaseModel

from mergegate.merge_core.errors import InvalidInput, MergegateError

_LONGEST = 1 << 31  # bytes
_FIELDS: dict[str, tuple[type, ...]] = {
    "progress": (int, int),
    "done": (object,),
    "problem": (MergegateError,),
    "starved": (str,),
    "crash": (str, str),
}
_VALUES = (BaseModel, MergegateError, tuple, enum.Enum)
_PLAIN = {
    ("pathlib", "PosixPath"),
    ("builtins", "set"),
    ("builtins", "frozenset"),
    ("mergegate.merge_core.errors", "_rebuild"),  # Rebuilds a mergegate exception from its type and its texts.
}


def receive(connection: Connection, location: str) -> tuple[Any, ...]:
    """Return the next message. A forged message can only make this function raise.

    Returns:
        ``("progress", done, total)``, ``("done", value)``, ``("problem", error)``, ``("starved", error)`` or
        ``("crash", error, traceback)``.

    Raises:
        EOFError, ConnectionError: The process will not send another message, or the message is longer than 2 GiB.
        InvalidInput: The message has another form. The error names the call at ``location``.
    """
    try:
        message = connection.recv_bytes(_LONGEST)
    except OSError:  # The message is longer than the limit.
        raise EOFError from None
    try:
        kind, *content = _Answers(io.BytesIO(message)).load()
        fields = zip(content, _FIELDS[kind], strict=True)
        if not all(isinstance(field, field_type) for field, field_type in fields):
            raise ValueError(f"{kind} with {content!r:.100}")
    except Exception as error:
        raise InvalidInput(
            location, found=f"the model process sent an invalid message: {error}", expected="numbers and texts"
        ) from None
    return (kind, *content)


class _Answers(pickle.Unpickler):
    """Unpickler that accepts plain value classes and rejects every function and all other classes."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _PLAIN:
            return super().find_class(module, name)
        if module.startswith(("mergegate.merge_core.", "mergegate.tasks.")):
            value = getattr(importlib.import_module(module), name, None)
            if isinstance(value, type) and (issubclass(value, _VALUES) or dataclasses.is_dataclass(value)):
                return value
        raise pickle.UnpicklingError(f"{module}.{name}")
