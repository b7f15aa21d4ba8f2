"""Translate the token ids in configurations to those of the result's tokenizer.

A token id is a row number, and a merge can move rows. Each id is therefore replaced by the id that its token has in the
new tokenizer, in ``config.json``, its parts and ``generation_config.json``.
"""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Mapping
from typing import Any

GENERATION = "generation_config.json"
_IDS = re.compile(r"(^|_)token_(id|ids|index)$|^(begin_)?suppress_tokens$|^bad_words_ids$")
SPECIAL_KEYS = ("bos_token_id", "eos_token_id", "pad_token_id")
_PAIRS = "forced_decoder_ids"  # [position, id]


def follow_tokens(
    config: Mapping[str, Any], before: Mapping[str, int], after: Mapping[str, int]
) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Return ``config`` with the new ids of its tokens, and the keys whose tokens no longer exist.

    ``before`` and ``after`` map tokens to the ids in ``config`` and in the result. If a token no longer exists, its id
    becomes null or is removed from its list, because the old id would mean another token.
    """
    tokens = {number: token for token, number in before.items()}
    lost_keys: list[str] = []

    def move(value: Any, key: str) -> Any:
        if type(value) is int:
            if value < 0:  # Some configurations use negative ids for "none".
                return value
            if (token := tokens.get(value)) is not None and token in after:
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
                pairs = [pair for pair in value if isinstance(pair, list) and len(pair) == 2]
                moved = [[position, move(number, prefix + key)] for position, number in pairs]
                result[key] = [pair for pair in moved if pair[1] is not None] or None
            elif isinstance(value, Mapping) and key.endswith("_config"):
                result[key] = move_part(value, f"{prefix}{key}.")
            else:
                result[key] = copy.deepcopy(value)
        return result

    return move_part(config, ""), tuple(dict.fromkeys(lost_keys))


def serialize_config(config: Mapping[str, Any]) -> bytes:
    """Return the content of the JSON file for a configuration."""
    return (json.dumps(config, indent=2, ensure_ascii=False) + "\n").encode()
