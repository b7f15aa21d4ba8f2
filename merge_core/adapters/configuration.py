"""Parse ``adapter_config.json`` of a LoRA adapter into the settings that determine how its tensors change a model.

The file is untrusted input. Keys of features that mergegate does not support are refused. An unknown key is refused if
it is set, because a later version of PEFT may give it any meaning.

Source: PEFT 0.21 (``LoraConfig``), https://huggingface.co/docs/peft/package_reference/lora.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, TypeVar

from mergegate.merge_core.errors import InvalidInput
from mergegate.merge_core.parsing import parsing_errors, read_json

CONFIG_FILE = "adapter_config.json"

_Number = TypeVar("_Number", int, float)

_MOST_RANK = 1 << 16
_MOST_TOKENS = 1 << 20
_LONGEST_PATTERN = 500
_PLAIN_INITS = ("gaussian", "eva", "orthogonal", "mica")
_CHANGES_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")
# Keys of features that do more than change weights, or whose arithmetic is unverified.
_REFUSED = {
    "layer_replication": "it adds layers to the model",
    "use_qalora": "QALoRA changes how inputs are grouped",
    "use_bdlora": "BD-LoRA has factors of another form",
    "alora_invocation_tokens": "aLoRA is active only after its invocation tokens",
    "arrow_config": "Arrow chooses among adapters at each token",
    "kasa_config": "KaSA changes the weights of the base",
    "monteclora_config": "MonteCLoRA samples its weights",
    "velora_config": "VeLoRA is not tested with mergegate",
    "megatron_config": "adapters of Megatron layers have another layout",
}
# Keys about training, bookkeeping, or facts that the tensors show themselves.
_WITHOUT_EFFECT = frozenset(
    (
        "auto_mapping", "base_model_class", "parent_library", "inference_mode", "lora_dropout", "target_modules",
        "exclude_modules", "modules_to_save", "modules_to_tie", "target_modules_to_tie", "layers_to_transform",
        "layers_pattern", "megatron_core", "loftq_config", "eva_config", "corda_config", "lora_ga_config",
        "qalora_group_size", "runtime_config", "ensure_weight_tying", "fan_in_fan_out",
    )
)  # fmt: skip
_KNOWN_KEYS = frozenset(
    (
        "peft_type", "r", "lora_alpha", "rank_pattern", "alpha_pattern", "use_rslora", "use_dora",
        "bias", "lora_bias", "init_lora_weights", "trainable_token_indices",
        "target_parameters", "base_model_name_or_path", "revision", "task_type", "peft_version",
    )
)  # fmt: skip
USE_PEFT = "apply the adapter with PEFT (merge_and_unload), save the model, and name the saved model"


@dataclass(frozen=True)
class AdapterConfig:
    """Parsed configuration of an adapter.

    Args:
        location: File of the configuration, for messages.
        rank: Default rank of the factors (``r``).
        alpha: Default numerator of the scale (``lora_alpha``).
        rank_pattern: Ranks of modules whose names match a pattern, by pattern.
        alpha_pattern: Alphas of modules whose names match a pattern, by pattern.
        rslora: Whether the scale is alpha / sqrt(r) instead of alpha / r.
        dora: Whether the adapter also replaces the magnitudes of weights (DoRA).
        bias: Biases that were trained in addition to the factors.
        lora_bias: Whether ``lora_B`` has a bias.
        tokens: Indices of the trained rows of the embedding, or of several modules by name. None if there are none.
        parameters: Name suffixes of parameters that are adapted directly (``target_parameters``).
        base: Base model that the adapter declares (``base_model_name_or_path``), or an empty string.
        task: ``task_type``, or an empty string.
        peft_version: Version of PEFT that saved the adapter, as three numbers, or an empty tuple.
    """

    location: str
    rank: int
    alpha: float
    rank_pattern: Mapping[str, int] = field(default_factory=lambda: MappingProxyType({}))
    alpha_pattern: Mapping[str, float] = field(default_factory=lambda: MappingProxyType({}))
    rslora: bool = False
    dora: bool = False
    bias: Literal["none", "all", "lora_only"] = "none"
    lora_bias: bool = False
    tokens: tuple[int, ...] | Mapping[str, tuple[int, ...]] | None = None
    parameters: tuple[str, ...] = ()
    base: str = ""
    task: str = ""
    peft_version: tuple[int, ...] = ()

    def rank_of(self, module: str) -> int:
        """Return the rank of the factors for the module or parameter called ``module`` in memory."""
        return _by_pattern(self.rank_pattern, module, self.rank)

    def scale_of(self, module: str) -> float:
        """Return the factor by which the product of the module's factors is multiplied."""
        rank, alpha = self.rank_of(module), _by_pattern(self.alpha_pattern, module, self.alpha)
        return alpha / (math.sqrt(rank) if self.rslora else rank)

    def tokens_of(self, module: str) -> tuple[int, ...] | None:
        """Return the indices of the trained rows of ``module``, or None if the configuration lists none for it."""
        if isinstance(self.tokens, Mapping):
            matches = [rows for name, rows in self.tokens.items() if module == name or module.endswith(f".{name}")]
            return matches[0] if len(matches) == 1 else None
        return self.tokens


def read_adapter_config(directory: Path) -> AdapterConfig:
    """Read the configuration of the adapter in ``directory``.

    Raises:
        InvalidInput: The file is missing or not JSON, a value is invalid, or mergegate does not support a feature.
    """
    location = str(directory / CONFIG_FILE)
    content = read_json(directory / CONFIG_FILE)
    _require_lora(content, location)
    bias = content.get("bias", "none")
    version = re.match(
        r"(\d{1,9})\.(\d{1,9})\.(\d{1,9})", _text(content.get("peft_version"), f"{location}: peft_version")
    )
    return AdapterConfig(
        location=location,
        rank=_rank(content.get("r", 8), f"{location}: r"),
        alpha=_number(content.get("lora_alpha", 8), f"{location}: lora_alpha"),
        rank_pattern={
            key: _rank(value, f"{location}: rank_pattern.{key}")
            for key, value in _patterns(content, "rank_pattern", location)
        },
        alpha_pattern={
            key: _number(value, f"{location}: alpha_pattern.{key}")
            for key, value in _patterns(content, "alpha_pattern", location)
        },
        rslora=_switch(content, "use_rslora", location),
        dora=_switch(content, "use_dora", location),
        bias=_valid(bias, bias in ("none", "all", "lora_only"), f"{location}: bias", "none, all or lora_only"),
        lora_bias=_switch(content, "lora_bias", location),
        tokens=_tokens(content.get("trainable_token_indices"), f"{location}: trainable_token_indices"),
        parameters=_texts(content.get("target_parameters"), f"{location}: target_parameters"),
        base=_text(content.get("base_model_name_or_path"), f"{location}: base_model_name_or_path"),
        task=_text(content.get("task_type"), f"{location}: task_type"),
        peft_version=tuple(map(int, version.groups())) if version else (),
    )


def _require_lora(content: Mapping[str, Any], location: str) -> None:
    kind = content.get("peft_type")
    if kind != "LORA":
        raise InvalidInput(f"{location}: peft_type", found=f"{kind!r:.60}", expected="LORA", remedy=USE_PEFT)
    for key, reason in _REFUSED.items():
        # Truthiness is not sufficient, because [] and {} are also set.
        if content.get(key) is not None and content[key] is not False:
            raise InvalidInput(
                f"{location}: {key}",
                found=f"it is set, and {reason}",
                expected="plain LoRA factors",
                remedy=USE_PEFT,
            )
    start = content.get("init_lora_weights", True)
    if isinstance(start, str):
        changed = next((name for name in _CHANGES_BASE if start.lower().startswith(name)), None)
        if changed or start.lower() not in _PLAIN_INITS:
            raise InvalidInput(
                f"{location}: init_lora_weights",
                found=f"{start:.60}, which changes the base before training" if changed else f"{start!r:.60}",
                expected="an adapter that stores the difference from the stored base",
                remedy="convert it in PEFT with save_pretrained(…, path_initial_model_for_weight_conversion=…). The"
                " key is then true",
            )
    else:
        is_known = isinstance(start, bool) or start is None
        _valid(start, is_known, f"{location}: init_lora_weights", "true, false or the name of a method")
    for key in content:
        if key not in _KNOWN_KEYS and key not in _WITHOUT_EFFECT and key not in _REFUSED and content[key]:
            raise InvalidInput(
                f"{location}: {key}",
                found=f"{content[key]!r:.60}, and mergegate does not know this key",
                expected="keys of LoRA as PEFT 0.21 writes them",
                remedy=f"set it to null if it does not change the weights. Otherwise, {USE_PEFT}",
            )
    if _switch(content, "use_dora", location) and content.get("target_parameters"):
        raise InvalidInput(
            f"{location}: use_dora",
            found="it is set together with target_parameters",
            expected="only one of them, as in PEFT",
        )


def _valid(value: Any, is_valid: bool, location: str, expected: str) -> Any:
    if not is_valid:
        raise InvalidInput(location, found=f"{value!r:.60}", expected=expected)
    return value


def _switch(content: Mapping[str, Any], key: str, location: str) -> bool:
    value = content.get(key)
    return bool(_valid(value, value is None or isinstance(value, bool), f"{location}: {key}", "true or false"))


def _rank(value: object, location: str) -> int:
    is_valid = type(value) is int and 0 < value <= _MOST_RANK
    return int(_valid(value, is_valid, location, f"a whole number from 1 to {_MOST_RANK}"))


def _number(value: Any, location: str) -> float:
    return float(_valid(value, type(value) in (int, float) and math.isfinite(value), location, "a finite number"))


def _text(value: object, location: str) -> str:
    return str(_valid(value, value is None or isinstance(value, str), location, "text") or "")


def _texts(value: object, location: str) -> tuple[str, ...]:
    is_valid = value is None or (isinstance(value, list) and all(isinstance(item, str) and item for item in value))
    return tuple(_valid(value, is_valid, location, "a list of names") or ())


def _tokens(value: object, location: str) -> tuple[int, ...] | Mapping[str, tuple[int, ...]] | None:
    if isinstance(value, dict):
        return {str(name): _rows(rows, f"{location}.{name}") for name, rows in value.items()}
    return None if value is None else _rows(value, location)


def _rows(value: Any, location: str) -> tuple[int, ...]:
    is_list = isinstance(value, list) and all(type(row) is int and row >= 0 for row in value)
    rows = _valid(value, is_list and len(value) <= _MOST_TOKENS, location, "a list of token ids")
    return tuple(_valid(rows, len(set(rows)) == len(rows), location, "each token once"))


def _patterns(content: Mapping[str, Any], key: str, location: str) -> list[tuple[str, object]]:
    """Return pairs of pattern and value. Patterns that may take forever to match are refused, as they are untrusted."""
    table = {} if content.get(key) is None else content[key]
    _valid(table, isinstance(table, dict), f"{location}: {key}", "an object: pattern → number")
    for pattern in table:
        entry = f"{location}: {key}.{pattern:.80}"
        # Matching a repeated group, or three repetitions in a row, may take practically forever.
        repeats = len(re.findall(r"[*+{]", pattern))
        if len(pattern) > _LONGEST_PATTERN or repeats > 2 or re.search(r"\)[*+{]", pattern):
            raise InvalidInput(
                entry, found="a pattern that may take forever to match", expected="a module name, or a simple pattern"
            )
        with parsing_errors(entry, "not a valid regular expression"):
            _compiled(pattern)
    return list(table.items())


@lru_cache(maxsize=4096)
def _compiled(pattern: str) -> re.Pattern[str]:
    # Like in PEFT, the pattern must match complete trailing parts of the module's name.
    return re.compile(rf"(.*\.)?({pattern})$")


def _by_pattern(table: Mapping[str, _Number], module: str, default: _Number) -> _Number:
    return next((value for pattern, value in table.items() if _compiled(pattern).match(module)), default)
