"""YAML text to plain values, refusing what PyYAML accepts silently: a key written twice, several surprises at once."""

from __future__ import annotations

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
