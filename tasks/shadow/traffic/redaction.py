"""Redact bodies before they are stored, with regular expressions and an optional function of the user.

In JSON, a secret may contain escaped characters, and in a stream it may be split over many events. So mergegate
decodes the JSON, joins the pieces of each text in a stream, redacts the texts and encodes the result again. If a joined
text changes, its first piece receives the new text and its other pieces become empty.
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
_TextPath: TypeAlias = tuple[str, ...]  # path of a text in a JSON document


class Redaction:
    """Rules that redact text: each match of a pattern is replaced by ``MARK``, then ``function`` changes the result."""

    def __init__(self, patterns: Sequence[str], function: Callable[[str], str] | None = None) -> None:
        self._patterns = [re.compile(pattern) for pattern in patterns]
        self._function = function

    def text(self, text: str) -> str:
        for pattern in self._patterns:
            text = pattern.sub(MARK, text)
        return self._function(text) if self._function and text else text

    def body(self, body: bytes) -> bytes:
        """Return ``body``, redacted. It must be JSON or a stream of JSON events.

        Raises:
            ValueError: ``body`` has another format, so its content is unknown, or the function failed.
        """
        if not body or not (self._patterns or self._function):
            return body
        try:
            if not body.lstrip().startswith((_EVENT, b":")):
                document = _walk(json.loads(body), (), lambda _, text: self.text(text))
                return json.dumps(document, ensure_ascii=False).encode()

            # Join the pieces of each text of the stream, and redact the joined text.
            lines = body.splitlines()
            all_data = {number: _event_data(line) for number, line in enumerate(lines)}
            events = {number: json.loads(data) for number, data in all_data.items() if data is not None}
            pieces: dict[_TextPath, list[str]] = {}

            def gather(path: _TextPath, text: str) -> str:
                pieces.setdefault(path, []).append(text)
                return text

            for event in events.values():
                _walk(event, (), gather)
            replacements = {
                path: iter([redacted, *[""] * (len(texts) - 1)])
                for path, texts in pieces.items()
                if (redacted := self.text("".join(texts))) != "".join(texts)
            }

            for number, line in enumerate(lines):
                if number in events:
                    event = _walk(events[number], (), lambda path, text: next(replacements.get(path, iter((text,)))))
                    lines[number] = b"data: " + json.dumps(event, ensure_ascii=False).encode()
                elif not line.startswith(_EVENT):
                    lines[number] = self.text(line.decode()).encode()  # a comment or the name of an event
            return b"\n".join(lines) + b"\n"
        except RecursionError:
            raise ValueError("the body is nested too deeply") from None
        except Exception as error:
            raise ValueError(f"redaction failed with {type(error).__name__}") from None


def open_redaction(patterns: Sequence[str], function_path: str | None) -> Redaction:
    """Create the redaction for a profile. ``function_path`` has the form ``package.module:function``.

    Raises:
        InvalidInput: The function cannot be imported or is not callable.
    """
    if function_path is None:
        return Redaction(patterns)
    module, _, name = function_path.partition(":")
    expected = "an importable function from text to text"
    try:
        function = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise InvalidInput(
            "shadow.redactor", found=f"{function_path!r}, which cannot be imported ({error})", expected=expected
        ) from None
    if not callable(function):
        raise InvalidInput("shadow.redactor", found=f"{function_path!r}, which is not callable", expected=expected)
    return Redaction(patterns, function)


def _event_data(line: bytes) -> bytes | None:
    """Return the JSON in a line of a stream, or None if the line contains none."""
    data = line[len(_EVENT) :].strip() if line.startswith(_EVENT) else b""
    return data if data and data != b"[DONE]" else None


def _walk(value: Any, path: _TextPath, change: Callable[[_TextPath, str], str]) -> Any:
    """Return ``value`` with every text changed, including field names and numbers.

    A list entry with an ``index`` field is identified by that index instead of its position.
    """
    if isinstance(value, str):
        return change(path, value)
    if isinstance(value, list):
        indices = [
            entry.get("index", number) if isinstance(entry, dict) else number for number, entry in enumerate(value)
        ]
        return [_walk(entry, (*path, str(index)), change) for index, entry in zip(indices, value, strict=True)]
    if isinstance(value, dict):
        return {change((*path, key, ""), key): _walk(entry, (*path, key), change) for key, entry in value.items()}
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        number_text = str(value)
        return value if (redacted := change((*path, number_text, "number"), number_text)) == number_text else redacted
    return value
