"""Ids of tokens that stand in configurations, when the tokenizer of the result is another than the configuration's.

An id is a row, and rows have moved: each id is read as the token that it was, and written as the id that this token has
now. One rule for ``config.json``, its parts, and ``generation_config.json``.
"""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Mapping
from typing import Any

GENERATION = "generation_config.json"
_IDS = re.compile(r"(^|_)token_(id|ids|index)$|^(begin_)?suppress_tokens$|^bad_words_ids$")
_PAIRS = "forced_decoder_ids"  # [position, id]


def follow_tokens(
    config: Mapping[str, Any], before: Mapping[int, str], after: Mapping[str, int]
) -> tuple[dict[str, Any], tuple[str, ...]]:
    """``config`` with the ids that its tokens have now, and the keys whose tokens there are not any more.

    A key whose token is gone says nothing (null, or a shorter list): the id would be that of another token.

    Args:
        config: Of a model or of generation.
        before: Tokens by the ids that it speaks of.
        after: Ids by token in the result.
    """
    lost: list[str] = []

    def moved(value: Any, key: str) -> Any:
        if type(value) is int:
            if value < 0:  # "none", in some configurations.
                return value
            if (token := before.get(value)) is not None and token in after:
                return after[token]
            lost.append(key)
            return None
        if isinstance(value, list):
            inner = [moved(item, key) for item in value]
            return [item for item in inner if item is not None and item != []]
        return value

    def part(content: Mapping[str, Any], prefix: str) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for key, value in content.items():
            if _IDS.search(key):
                new = moved(value, prefix + key)
                found[key] = None if isinstance(value, list) and value and not new else new
            elif key == _PAIRS and isinstance(value, list):
                pairs = [(pair[0], moved(pair[1], prefix + key)) for pair in value if _is_pair(pair)]
                found[key] = [[place, number] for place, number in pairs if number is not None] or None
            elif isinstance(value, Mapping) and key.endswith("_config"):
                found[key] = part(value, f"{prefix}{key}.")
            else:
                found[key] = copy.deepcopy(value)
        return found

    return part(config, ""), tuple(dict.fromkeys(lost))


def serialize_config(config: Mapping[str, Any]) -> bytes:
    """A configuration as its file holds it."""
    return (json.dumps(config, indent=2, ensure_ascii=False) + "\n").encode()


def _is_pair(value: Any) -> bool:
    return isinstance(value, list) and len(value) == 2
