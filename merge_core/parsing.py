"""Text to plain values, at the edge: YAML read strictly, JSON, JSON lines; what is wrong is said with its place.

YAML lets a key stand twice in a mapping, and the later one wins in silence. Here that is an error, in everything that
people write: recipes, profiles, licence tables, task definitions.
"""

from __future__ import annotations

import json
from collections.abc import Hashable
from pathlib import Path
from typing import Any

import yaml

from merge_core.errors import InvalidInput


class StrictLoader(yaml.SafeLoader):
    """Plain data only, and a mapping may name a key only once.

    ``text_keys``: whether keys must be text. A bare ``on``, ``no`` or ``1`` is not.
    """

    text_keys = True

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen: set[Hashable] = set()
        for key_node, _ in node.value:
            if key_node.tag == "tag:yaml.org,2002:merge":
                continue  # `<<: *anchor` may give defaults that are then overwritten.
            key = self.construct_object(key_node, deep=True)
            if self.text_keys and not isinstance(key, str):
                raise _KeyFault(f"the key {key!r} is not text", key_node.start_mark, "text: put it in quotes")
            if not isinstance(key, Hashable):
                continue  # The super class says so.
            if key in seen:
                raise _KeyFault(f"{key!r} is written twice", key_node.start_mark, "every key once")
            seen.add(key)
        return super().construct_mapping(node, deep)


class _KeyFault(yaml.MarkedYAMLError):
    """Valid YAML with a key that is not accepted."""

    def __init__(self, problem: str, mark: yaml.Mark, expected: str) -> None:
        super().__init__(problem=problem, problem_mark=mark)
        self.expected = expected


def read_yaml(path: Path, expected: str, *, remedy: str = "", loader: type[StrictLoader] = StrictLoader) -> list[Any]:
    """The documents of a YAML file, empty ones left out.

    Args:
        path: UTF-8 text.
        expected: What it should be, for messages: ``a recipe in YAML``.
        remedy: What to do when it cannot be read.
        loader: A loader with further tags.

    Raises:
        InvalidInput: It cannot be read, is not YAML, or has a key twice in a mapping; with line and column.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
        raise InvalidInput(str(path), found=f"cannot be read: {reason}", expected=expected, remedy=remedy) from None
    return parse_yaml(text, str(path), expected, loader=loader)


def read_yaml_mapping(
    path: Path, expected: str, *, remedy: str = "", loader: type[StrictLoader] = StrictLoader
) -> dict[str, Any]:
    """The mapping in a YAML file of one document; empty if the file is. Arguments are those of :func:`read_yaml`.

    Raises:
        InvalidInput: As :func:`read_yaml`, or there are several documents, or something else than a mapping.
    """
    documents = read_yaml(path, expected, remedy=remedy, loader=loader) or [{}]
    if len(documents) > 1 or not isinstance(documents[0], dict):
        found = f"{len(documents)} documents" if len(documents) > 1 else f"a {type(documents[0]).__name__}"
        raise InvalidInput(str(path), found=found, expected=f"{expected}: one mapping")
    return documents[0]


def parse_yaml(
    text: str, where: str, expected: str = "a YAML mapping", *, loader: type[StrictLoader] = StrictLoader
) -> list[Any]:
    """The documents of a YAML text, empty ones left out.

    Args:
        text: The text.
        where: What messages call it.
        expected: As for :func:`read_yaml`, and ``loader``.

    Raises:
        InvalidInput: Not YAML, or a key twice in a mapping; with line and column.
    """
    try:
        # The loader makes plain values only, as safe_load does.
        return [document for document in yaml.load_all(text, Loader=loader) if document is not None]
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        place = f"{where}, line {mark.line + 1}, column {mark.column + 1}" if mark else where
        if isinstance(error, _KeyFault):
            raise InvalidInput(place, found=str(error.problem), expected=error.expected) from None
        raise InvalidInput(place, found=f"not YAML: {error.problem}", expected=expected) from None
    except (yaml.YAMLError, ValueError, LookupError, AttributeError, RecursionError) as error:
        # PyYAML lets its own accidents out, too: on a date of month 13, an empty !!int, a thousand brackets.
        raise InvalidInput(where, found=f"not YAML: {error}", expected=expected) from None


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in the file at ``path``.

    Raises:
        InvalidInput: Missing, unreadable, not JSON, not an object.
    """
    try:
        value = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise InvalidInput(str(path), found="no such file", expected="a Hugging Face checkpoint has it") from None
    except OSError as error:
        raise InvalidInput(str(path), found=f"cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise InvalidInput(str(path), found=f"not JSON: {error}") from None
    if not isinstance(value, dict):
        raise InvalidInput(str(path), found="not a JSON object")
    return value


def line_place(path: Path, number: int) -> str:
    """What messages call line ``number`` (from 1) of ``path``."""
    return f"{path}: line {number}"


def parse_line(line: bytes, path: Path, number: int) -> dict[str, Any]:
    """The object in line ``number`` (from 1) of ``path``.

    Raises:
        InvalidInput: for a line that is no JSON object.
    """
    where = line_place(path, number)
    try:
        document = json.loads(line)
    except ValueError as error:
        raise InvalidInput(where, found=f"not JSON: {error}", expected="one JSON object a line") from None
    if not isinstance(document, dict):
        raise InvalidInput(where, found=type(document).__name__, expected="a JSON object")
    return document
