"""Translate the token ids in configurations to those of the result's tokenizer.

An id is a row number, and rows move. Each id is read as a token of the old tokenizer and written as the id of this
token in the new one. The same rule applies to ``config.json``, its parts and ``generation_config.json``.
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
    """Return ``config`` with the new ids of its tokens, and the keys whose tokens no longer exist.

    A key whose token is gone becomes null, or its list becomes shorter, because the old id would mean another token.

    Args:
        config: Configuration of a model or of generation.
        before: Tokens by their ids in ``config``.
        after: Ids in the result, by token.
    """
    lost_keys: list[str] = []

    def move(value: Any, key: str) -> Any:
        if type(value) is int:
            if value < 0:  # Some configurations use negative ids for "none".
                return value
            if (token := before.get(value)) is not None and token in after:
                return after[token]
            lost_keys.append(key)
            return None
        if isinstance(value, list):
            inner = [move(item, key) for item in value]
            return [item for item in inner if item is not None and item != []]
        return value

    def move_part(content: Mapping[str, Any], prefix: str) -> dict[str, Any]:
        result: dict[str, Any] = {}
        for key, value in content.items():
            if _IDS.search(key):
                new = move(value, prefix + key)
                result[key] = None if isinstance(value, list) and value and not new else new
            elif key == _PAIRS and isinstance(value, list):
                pairs = [(pair[0], move(pair[1], prefix + key)) for pair in value if _is_pair(pair)]
                result[key] = [[position, number] for position, number in pairs if number is not None] or None
            elif isinstance(value, Mapping) and key.endswith("_config"):
                result[key] = move_part(value, f"{prefix}{key}.")
            else:
                result[key] = copy.deepcopy(value)
        return result

    return move_part(config, ""), tuple(dict.fromkeys(lost_keys))


def serialize_config(config: Mapping[str, Any]) -> bytes:
    """Return the file content of a configuration."""
    return (json.dumps(config, indent=2, ensure_ascii=False) + "\n").encode()


def _is_pair(value: Any) -> bool:
    return isinstance(value, list) and len(value) == 2
