"""What is taken out of a body before it is kept: what patterns match, and what a function of the user's changes.

A secret may stand in a JSON text with its letters escaped, or come in pieces over many events of a stream. So texts are
taken out of their JSON, those of a stream are joined piece by piece, and both are put back as JSON: what matches the
joined text stands in its first piece, and the others are empty.
"""

from __future__ import annotations

import importlib
import json
import re
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

from mergegate.merge_core.errors import InvalidInput

MARK = "[redacted]"
_EVENT = b"data:"
_Place: TypeAlias = tuple[str, ...]  # of a text in a document


class Redaction:
    """Patterns and a function, as one change of texts.

    Args:
        patterns: Regular expressions.
        function: Called after them.
    """

    def __init__(self, patterns: Sequence[str], function: Callable[[str], str] | None = None) -> None:
        self._patterns = [re.compile(pattern) for pattern in patterns]
        self._function = function

    @property
    def is_asked_for(self) -> bool:
        """Whether there is anything to take out."""
        return bool(self._patterns or self._function)

    def text(self, text: str) -> str:
        """``text`` without what is not kept."""
        for pattern in self._patterns:
            text = pattern.sub(MARK, text)
        return self._function(text) if self._function and text else text

    def body(self, body: bytes) -> bytes:
        """A body as it may be kept: JSON, or a stream of events of JSON.

        Raises:
            ValueError: It is neither, so nobody can say what stands in it; or the function failed.
        """
        if not self.is_asked_for or not body:
            return body
        try:
            if body.lstrip().startswith(_EVENT) or body.lstrip().startswith(b":"):
                return self._stream(body)
            return json.dumps(_walk(json.loads(body), (), lambda _, text: self.text(text)), ensure_ascii=False).encode()
        except RecursionError:
            raise ValueError("nested too deeply") from None
        except Exception as error:
            raise ValueError(f"{type(error).__name__} while it was redacted") from None

    def _stream(self, body: bytes) -> bytes:
        lines = body.splitlines()
        events = {number: json.loads(said) for number, line in enumerate(lines) if (said := _said(line)) is not None}
        pieces: dict[_Place, list[str]] = {}

        def gather(place: _Place, text: str) -> str:
            pieces.setdefault(place, []).append(text)
            return text

        for event in events.values():
            _walk(event, (), gather)
        changed = {
            place: iter([kept, *[""] * (len(texts) - 1)])
            for place, texts in pieces.items()
            if (kept := self.text("".join(texts))) != "".join(texts)
        }
        for number, line in enumerate(lines):
            if number in events:
                after = _walk(events[number], (), lambda place, text: next(changed.get(place, iter((text,)))))
                lines[number] = b"data: " + json.dumps(after, ensure_ascii=False).encode()
            elif _said(line) is None and not line.startswith(_EVENT):
                lines[number] = self.text(line.decode()).encode()  # a comment, the name of an event
        return b"\n".join(lines) + b"\n"


def open_redaction(patterns: Sequence[str], named: str | None) -> Redaction:
    """The redaction of a profile.

    Args:
        named: ``package.module:function``.

    Raises:
        InvalidInput: when there is no such function.
    """
    if named is None:
        return Redaction(patterns)
    module, _, name = named.partition(":")
    expected = "a function of a text that can be imported"
    try:
        function = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise InvalidInput("shadow.redact_with", found=f"{named} ({error})", expected=expected) from None
    if not callable(function):
        raise InvalidInput("shadow.redact_with", found=f"{named}, which cannot be called", expected=expected)
    return Redaction(patterns, function)


def _said(line: bytes) -> bytes | None:
    """The JSON of a line of a stream; None where it holds none."""
    said = line[len(_EVENT) :].strip() if line.startswith(_EVENT) else b""
    return said if said and said != b"[DONE]" else None


def _walk(value: Any, place: _Place, change: Callable[[_Place, str], str]) -> Any:
    """``value`` with every text changed, also names of fields and numbers. Entries of lists that say their ``index``
    stand at that place."""
    if isinstance(value, str):
        return change(place, value)
    if isinstance(value, list):
        places = [
            entry.get("index", number) if isinstance(entry, dict) else number for number, entry in enumerate(value)
        ]
        return [_walk(entry, (*place, str(at)), change) for at, entry in zip(places, value, strict=True)]
    if isinstance(value, dict):
        return {change((*place, key, ""), key): _walk(entry, (*place, key), change) for key, entry in value.items()}
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        said = str(value)
        return value if (after := change((*place, said, "number"), said)) == said else after
    return value
