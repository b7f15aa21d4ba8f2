"""``adapter_config.json`` of a LoRA adapter, typed: what decides how its tensors change a model, and nothing else.

The file is a stranger's. A key that is known changes the arithmetic, is known not to, or is refused by its name; a key
that nobody has heard of is refused where it is set, because PEFT of a later version may mean anything by it.

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
# What these do is more than a change of weights, or one that nobody here has checked.
_REFUSED = {
    "layer_replication": "it adds layers to the model",
    "use_qalora": "QALoRA changes how inputs are grouped",
    "use_bdlora": "BD-LoRA has factors of another form",
    "alora_invocation_tokens": "aLoRA is active only after its invocation tokens",
    "arrow_config": "Arrow chooses among adapters at each token",
    "kasa_config": "KaSA changes the weights of the base",
    "monteclora_config": "MonteCLoRA samples its weights",
    "velora_config": "VeLoRA has not been checked",
    "megatron_config": "adapters of Megatron layers have another layout",
}
# About training, bookkeeping, or said again by the tensors themselves.
_WITHOUT_EFFECT = frozenset(
    (
        "auto_mapping", "base_model_class", "parent_library", "inference_mode", "lora_dropout", "target_modules",
        "exclude_modules", "modules_to_save", "modules_to_tie", "target_modules_to_tie", "layers_to_transform",
        "layers_pattern", "megatron_core", "loftq_config", "eva_config", "corda_config", "lora_ga_config",
        "qalora_group_size", "runtime_config", "peft_version", "ensure_weight_tying",
    )
)  # fmt: skip
_READ = frozenset(
    (
        "peft_type", "r", "lora_alpha", "rank_pattern", "alpha_pattern", "use_rslora", "use_dora",
        "fan_in_fan_out", "bias", "lora_bias", "init_lora_weights", "trainable_token_indices",
        "target_parameters", "base_model_name_or_path", "revision", "task_type",
    )
)  # fmt: skip
_MERGE_IN_PEFT = "apply it with PEFT (merge_and_unload), save the model, and name that"


@dataclass(frozen=True)
class AdapterConfig:
    """What an adapter's configuration says.

    Args:
        where: The file, for messages.
        rank: ``r``.
        alpha: ``lora_alpha``.
        rank_pattern: Pattern → rank of the modules it matches.
        alpha_pattern: Pattern → alpha of the modules it matches.
        rslora: Whether the scale is alpha / sqrt(r) instead of alpha / r.
        dora: Whether a weight's direction and magnitude are adapted apart.
        bias: Which biases were trained along.
        lora_bias: Whether ``lora_B`` has a bias of its own.
        tokens: Rows of the embedding that were trained; of several modules by their names. None: none.
        parameters: ``target_parameters``: ends of names of parameters that are adapted themselves.
        base: ``base_model_name_or_path``; empty when it does not say.
        task: ``task_type``; empty when it does not say.
        fan_in_fan_out: As it is written. Whether a weight is stored transposed is known from the model.
    """

    where: str
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
    fan_in_fan_out: bool = False

    def rank_of(self, module: str) -> int:
        """Rank of the factors of a module, or of a parameter, by its name in memory."""
        return _by_pattern(self.rank_pattern, module, self.rank)

    def scale_of(self, module: str) -> float:
        """What the product of the factors of a module is multiplied by."""
        rank, alpha = self.rank_of(module), _by_pattern(self.alpha_pattern, module, self.alpha)
        return alpha / (math.sqrt(rank) if self.rslora else rank)

    def tokens_of(self, module: str) -> tuple[int, ...] | None:
        """Rows of the embedding called ``module`` that were trained; None when it is not said."""
        if isinstance(self.tokens, Mapping):
            found = [rows for name, rows in self.tokens.items() if module == name or module.endswith(f".{name}")]
            return found[0] if len(found) == 1 else None
        return self.tokens

    def adapts_parameter(self, name: str) -> bool:
        """Whether ``target_parameters`` has the parameter called ``name`` in memory."""
        return any(name == wanted or name.endswith(f".{wanted}") for wanted in self.parameters)


def read_adapter_config(directory: Path) -> AdapterConfig:
    """The configuration of the adapter in ``directory``.

    Raises:
        InvalidInput: No such file, no JSON, a value that means nothing, or something that cannot be applied to stored
            weights; the message names the key.
    """
    return parse_adapter_config(read_json(directory / CONFIG_FILE), str(directory / CONFIG_FILE))


def parse_adapter_config(content: Mapping[str, Any], where: str) -> AdapterConfig:
    """As :func:`read_adapter_config`, of JSON that has been read.

    Raises:
        InvalidInput: As there.
    """
    _require_lora(content, where)
    bias = content.get("bias", "none")
    if bias not in ("none", "all", "lora_only"):
        raise InvalidInput(f"{where}: bias", found=f"{bias!r:.60}", expected="none, all or lora_only")
    return AdapterConfig(
        where=where,
        rank=_whole(content.get("r", 8), f"{where}: r"),
        alpha=_number(content.get("lora_alpha", 8), f"{where}: lora_alpha"),
        rank_pattern={
            key: _whole(value, f"{where}: rank_pattern.{key}")
            for key, value in _patterns(content, "rank_pattern", where)
        },
        alpha_pattern={
            key: _number(value, f"{where}: alpha_pattern.{key}")
            for key, value in _patterns(content, "alpha_pattern", where)
        },
        rslora=_switch(content, "use_rslora", where),
        dora=_switch(content, "use_dora", where),
        bias=bias,
        lora_bias=_switch(content, "lora_bias", where),
        tokens=_tokens(content.get("trainable_token_indices"), f"{where}: trainable_token_indices"),
        parameters=_texts(content.get("target_parameters"), f"{where}: target_parameters"),
        base=_text(content.get("base_model_name_or_path"), f"{where}: base_model_name_or_path"),
        task=_text(content.get("task_type"), f"{where}: task_type"),
        fan_in_fan_out=_switch(content, "fan_in_fan_out", where),
    )


def _require_lora(content: Mapping[str, Any], where: str) -> None:
    kind = content.get("peft_type")
    if kind != "LORA":
        raise InvalidInput(f"{where}: peft_type", found=f"{kind!r:.60}", expected="LORA", remedy=_MERGE_IN_PEFT)
    for key, why in _REFUSED.items():
        # Not by truth: [] and {} are set, too.
        if content.get(key) is not None and content[key] is not False:
            raise InvalidInput(
                f"{where}: {key}", found=f"it is set: {why}", expected="plain LoRA factors", remedy=_MERGE_IN_PEFT
            )
    start = content.get("init_lora_weights", True)
    if isinstance(start, str):
        changed = next((one for one in _CHANGES_BASE if start.lower().startswith(one)), None)
        if changed or start.lower() not in _PLAIN_INITS:
            raise InvalidInput(
                f"{where}: init_lora_weights",
                found=f"{start:.60}, which changes the base before training" if changed else f"{start!r:.60}",
                expected="an adapter that is a difference to the stored base",
                remedy="convert it: save_pretrained(…, path_initial_model_for_weight_conversion=…) in PEFT;"
                " the configuration then says true",
            )
    elif not isinstance(start, bool) and start is not None:
        raise InvalidInput(f"{where}: init_lora_weights", found=f"{start!r:.60}", expected="true, false or a name")
    for key in content:
        if key not in _READ and key not in _WITHOUT_EFFECT and key not in _REFUSED and content[key]:
            raise InvalidInput(
                f"{where}: {key}",
                found=f"{content[key]!r:.60}, a key that is not known here",
                expected="keys of LoRA as PEFT 0.21 writes them",
                remedy=f"set it to null if it does not change the weights; else {_MERGE_IN_PEFT}",
            )
    if _switch(content, "use_dora", where) and content.get("target_parameters"):
        raise InvalidInput(
            f"{where}: use_dora", found="it is set, with target_parameters", expected="one of them, as in PEFT"
        )


def _switch(content: Mapping[str, Any], key: str, where: str) -> bool:
    value = content.get(key)
    if value is None or isinstance(value, bool):
        return bool(value)
    raise InvalidInput(f"{where}: {key}", found=f"{value!r:.60}", expected="true or false")


def _whole(value: object, where: str) -> int:
    if type(value) is int and 0 < value <= _MOST_RANK:
        return value
    raise InvalidInput(where, found=f"{value!r:.60}", expected=f"a whole number from 1 to {_MOST_RANK}")


def _number(value: object, where: str) -> float:
    if type(value) in (int, float) and math.isfinite(value):  # type: ignore[arg-type]  # it is one of the two
        return value  # type: ignore[return-value]
    raise InvalidInput(where, found=f"{value!r:.60}", expected="a finite number")


def _text(value: object, where: str) -> str:
    if value is None or isinstance(value, str):
        return value or ""
    raise InvalidInput(where, found=f"{value!r:.60}", expected="text")


def _texts(value: object, where: str) -> tuple[str, ...]:
    if value is None:
        return ()
    if isinstance(value, list) and all(isinstance(item, str) and item for item in value):
        return tuple(value)
    raise InvalidInput(where, found=f"{value!r:.60}", expected="a list of names")


def _tokens(value: object, where: str) -> tuple[int, ...] | Mapping[str, tuple[int, ...]] | None:
    if value is None:
        return None
    if isinstance(value, dict):
        return {str(name): _rows(rows, f"{where}.{name}") for name, rows in value.items()}
    return _rows(value, where)


def _rows(value: object, where: str) -> tuple[int, ...]:
    if isinstance(value, list) and len(value) <= _MOST_TOKENS and all(type(row) is int and row >= 0 for row in value):
        if len(set(value)) == len(value):
            return tuple(value)
        raise InvalidInput(where, found="a token twice", expected="each once")
    raise InvalidInput(where, found=f"{value!r:.60}", expected="a list of token ids")


def _patterns(content: Mapping[str, Any], key: str, where: str) -> list[tuple[str, object]]:
    """Pattern and value. A pattern is a stranger's regular expression: one that may take forever is refused."""
    table = content.get(key)
    if table is None:
        return []
    if not isinstance(table, dict):
        raise InvalidInput(f"{where}: {key}", found=f"{table!r:.60}", expected="pattern → number")
    for pattern in table:
        place = f"{where}: {key}.{pattern:.80}"
        # With a group repeated, or three repetitions in a row, matching may take longer than anybody waits.
        repeats = len(re.findall(r"[*+{]", pattern))
        if len(pattern) > _LONGEST_PATTERN or repeats > 2 or re.search(r"\)[*+{]", pattern):
            raise InvalidInput(
                place, found="a pattern that may take forever", expected="a module's name, or a simple pattern of it"
            )
        with parsing_errors(place, "no regular expression"):
            _compiled(pattern)
    return list(table.items())


@lru_cache(maxsize=4096)
def _compiled(pattern: str) -> re.Pattern[str]:
    # As PEFT looks a module up: the pattern must match a whole end of its name.
    return re.compile(rf"(.*\.)?({pattern})$")


def _by_pattern(table: Mapping[str, _Number], module: str, default: _Number) -> _Number:
    return next((value for pattern, value in table.items() if _compiled(pattern).match(module)), default)
