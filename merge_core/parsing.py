"""YAML text to plain values, refusing what PyYAML accepts silently: a key written twice, several surprises at once."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import yaml

from merge_core.errors import InvalidInput


class _StrictLoader(yaml.SafeLoader):
    """Safe loading in which a mapping may name a key only once."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[Any] = set()
        for key_node, _ in node.value:
            if key_node.tag == "tag:yaml.org,2002:merge":
                continue  # `<<: *anchor` may give defaults that are then overwritten.
            key = self.construct_object(key_node, deep=True)
            if not isinstance(key, str):
                raise yaml.MarkedYAMLError(problem=f"the key {key!r} is not text", problem_mark=key_node.start_mark)
            if key in seen:
                raise yaml.MarkedYAMLError(problem=f"{key!r} is written twice", problem_mark=key_node.start_mark)
            seen.add(key)
        return super().construct_mapping(node, deep)


def parse_yaml(text: str, where: str) -> list[Any]:
    """The documents of a YAML text, empty ones left out.

    Raises:
        InvalidInput: Not YAML, or a key twice in a mapping; with line and column.
    """
    try:
        return [document for document in yaml.load_all(text, Loader=_StrictLoader) if document is not None]
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        place = f"{where}, line {mark.line + 1}, column {mark.column + 1}" if mark else where
        raise InvalidInput(place, found=error.problem or "not YAML", expected="a YAML mapping") from None
    except (yaml.YAMLError, RecursionError) as error:
        raise InvalidInput(where, found=f"not YAML: {error}", expected="a YAML mapping") from None


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
