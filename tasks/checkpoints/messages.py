"""What the process that holds models sends us, which is data: whoever runs there may have sent something else."""

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
    ("mergegate.merge_core.errors", "_rebuild"),  # Rebuilds one of our exceptions, by type, from its texts.
}


def receive(connection: Connection, where: str) -> tuple[Any, ...]:
    """The next message; nothing that a stranger's code may have sent instead does more than fail here.

    Returns:
        ``("progress", done, total)``, ``("done", value)``, ``("problem", error)``, ``("starved", error)`` or
        ``("crash", error, traceback)``.

    Raises:
        EOFError, ConnectionError: when there will be none.
        InvalidInput: for anything else, naming ``where``.
    """
    try:
        sent = connection.recv_bytes(_LONGEST)
    except OSError:  # longer
        raise EOFError from None
    try:
        kind, *content = _Answers(io.BytesIO(sent)).load()
        fields = zip(content, _FIELDS[kind], strict=True)
        if not all(isinstance(field, wanted) for field, wanted in fields):
            raise ValueError(f"{kind} with {content!r:.100}")
    except Exception as error:
        raise InvalidInput(where, found=f"an answer that is none: {error}", expected="numbers and texts") from None
    return (kind, *content)


class _Answers(pickle.Unpickler):
    """No function can be named in it, and of classes only those that are made of their fields and do nothing."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _PLAIN:
            return super().find_class(module, name)
        if module.startswith(("mergegate.merge_core.", "mergegate.tasks.")):
            found = getattr(importlib.import_module(module), name, None)
            if isinstance(found, type) and (issubclass(found, _VALUES) or dataclasses.is_dataclass(found)):
                return found
        raise pickle.UnpicklingError(f"{module}.{name}")
