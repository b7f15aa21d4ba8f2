"""Write settings so that transformers 4, and servers built on it, read the same values as transformers 5.

transformers 5 saves rotary positions only as ``rope_parameters``. transformers 4 ignores that key and computes with the
default base of the family. It also cannot read some names that transformers 5 saves in ``tokenizer_config.json``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from mergegate.merge_core.checkpoint import Companions, config_parts
from mergegate.merge_core.checkpoint.vocabulary import TOKENIZER_BOUNDS
from mergegate.merge_core.errors import Finding
from mergegate.merge_core.plan.special_ids import serialize_config

_SETTINGS = "tokenizer_config.json"
_KEYS = ("rope_theta", "partial_rotary_factor")
# Families of transformers 4 with other names for these keys.
_OLDER_KEYS = dict.fromkeys(("gpt_neox", "gpt_neox_japanese"), ("rotary_emb_base", "rotary_pct"))
# Families of transformers 4 that accept exactly these keys in rope_scaling.
_THREE_KEYS = ("phi3", "phi4_multimodal")
# Types of rope_parameters without scaling.
_UNSCALED = ("default", "axial")
# Keys that describe how the saved tokenizer was loaded.
_LOADING_KEYS = ("backend", "is_local", "local_files_only")


def with_older_rope(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``config`` with ``rope_theta`` and ``rope_scaling`` next to each ``rope_parameters`` of all layers."""
    result = {
        key: with_older_rope(value) if key.endswith("_config") and isinstance(value, Mapping) else value
        for key, value in config.items()
    }
    rope, family = config.get("rope_parameters"), str(config.get("model_type"))
    if not isinstance(rope, Mapping) or _differs_by_layer(rope) or config.get("rope_scaling"):
        return result
    for key, older_key in zip(_KEYS, _OLDER_KEYS.get(family, _KEYS), strict=True):
        if rope.get(key) is not None:
            result[older_key] = rope[key]
    scaling = {key: value for key, value in rope.items() if key not in _KEYS}
    if scaling.get("rope_type") == "longrope" and family in _THREE_KEYS:
        scaling = {"type": "longrope", **{key: scaling.get(key) for key in ("short_factor", "long_factor")}}
    if scaling.get("rope_type", "default") not in _UNSCALED or scaling.keys() - {"rope_type"}:
        result["rope_scaling"] = scaling
    return result


def with_older_names(files: Companions) -> Companions:
    """Return ``files`` with names in ``tokenizer_config.json`` that transformers 4 and 5 read as the same settings."""
    settings = files.json(_SETTINGS, TOKENIZER_BOUNDS) or {}
    content = {key: value for key, value in settings.items() if key not in _LOADING_KEYS}
    if content.get("tokenizer_class") == "TokenizersBackend":
        content["tokenizer_class"] = "PreTrainedTokenizerFast"
    if isinstance(content.get("extra_special_tokens"), list) and (tokens := content.pop("extra_special_tokens")):
        content["additional_special_tokens"] = tokens
    return files if content == settings else files.with_changes({_SETTINGS: serialize_config(content)})


def newer_settings(name: str, config: Mapping[str, Any]) -> Iterator[Finding]:
    """Yield a finding if only transformers 5 reads the rotary positions in ``config``, which the model ``name`` has."""
    for part in config_parts(config):
        rope = part.get("rope_parameters")
        if isinstance(rope, Mapping) and _differs_by_layer(rope) and "rope_theta" not in part:
            yield Finding(
                "info",
                f"{name}: config.json: rope_parameters",
                found=f"different values for {', '.join(map(str, rope))}",
                expected="one value for all layers, which mergegate also writes in the form of transformers 4",
                remedy="load the result with transformers 5, or with a server that reads rope_parameters",
            )


def _differs_by_layer(rope: Mapping[str, Any]) -> bool:
    return any(isinstance(value, Mapping) for value in rope.values())
