"""Know what transformers does with stored tensors when it loads them: which it ignores, ties or keeps in float32.

``conversions.json`` contains the lists of each class under ``loading``. A writer that loads a model and saves it again
therefore drops the ignored tensors, such as layers for multi-token prediction, and may add or drop tied copies.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from mergegate.merge_core.architecture.conversions import loading_facts
from mergegate.merge_core.checkpoint import Checkpoint, DType, config_parts, is_embedding, ties_embeddings

# Keys for the number of layers for multi-token prediction, such as ``num_nextn_predict_layers``.
_PREDICTION_COUNT = re.compile(r"^(?=.*layers)(?:.*_)?(?:mtp|nextn)(?:_|$)")


@lru_cache(maxsize=256)
def _compiled(patterns: tuple[str, ...]) -> re.Pattern[str] | None:
    return re.compile("|".join(f"(?:{pattern})" for pattern in patterns)) if patterns else None


def loading_of(family: str, class_name: str) -> dict[str, list[str]]:
    """Return what transformers keeps in float32, ignores and shares: patterns of names, and names with their source."""
    facts = loading_facts()
    always, for_float16 = facts["float32"].get(family, ([], []))
    tied = facts["tied"].get(class_name, {})
    return {
        "float32": [*always, *(f"{pattern} (instead of float16)" for pattern in for_float16 if pattern not in always)],
        "ignored": facts["ignored"].get(class_name, []),
        "tied": [f"{name} = {source}" for name, source in tied.items()],
    }


def is_ignored(checkpoint: Checkpoint, name: str) -> bool:
    """Return whether the class of ``checkpoint`` ignores the stored tensor called ``name``, and so drops it."""
    pattern = _compiled(tuple(loading_facts()["ignored"].get(checkpoint.class_name, ())))
    return pattern is not None and pattern.search(name) is not None


def tied_source(checkpoint: Checkpoint, name: str) -> str | None:
    """Return the name of the tensor that the class shares with ``name``, or None if the model shares none with it.

    ``find_tensor`` treats output heads of language models separately.
    """
    if ties_embeddings(checkpoint.config) is False and not is_embedding(name):
        return None
    sources: Mapping[str, str] = loading_facts()["tied"].get(checkpoint.class_name, {})
    return sources.get(name)


def keeps_float32(config: Mapping[str, Any], name: str, target: DType) -> bool:
    """Return whether transformers keeps the tensor called ``name`` in float32 if it loads the model as ``target``."""
    if target.torch_name not in ("float16", "bfloat16"):
        return False
    patterns: list[str] = []
    for part in config_parts(config):
        always, for_float16 = loading_facts()["float32"].get(str(part.get("model_type")), ([], []))
        patterns += always + (for_float16 if target.torch_name == "float16" else [])
    pattern = _compiled(tuple(patterns))
    return pattern is not None and pattern.search(name) is not None


def without_predictions(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``config`` with a count of zero for layers for multi-token prediction, also in its text part."""
    result: dict[str, Any] = copy.deepcopy(dict(config))
    parts: list[Any] = config_parts(result)
    for part in parts:
        part |= {key: 0 for key, value in part.items() if type(value) is int and _PREDICTION_COUNT.search(key)}
    return result
