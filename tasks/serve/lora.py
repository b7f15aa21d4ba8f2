"""Serve an adapter with vLLM without merging it: vLLM loads the base, and the adapter as a LoRA module.

The adapter's configuration, the names of its tensors and the base show whether vLLM supports the adapter in this form.
If not, the adapter is served merged into its base, and the verdict says why. vLLM refuses some adapters. It silently
ignores parts of others, such as the factors of a module that it does not find by name, or of a head that is tied to the
embedding.

Source: vLLM 0.32, ``lora/peft_helper.py``, ``lora/lora_model.py``, ``lora/layers``, ``config/lora.py``.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mergegate.merge_core.adapters import CONFIG_FILE, Adapter, open_adapter
from mergegate.merge_core.architecture import parse_layer_place, vocabulary_size
from mergegate.merge_core.checkpoint import Checkpoint, open_checkpoint
from mergegate.merge_core.parsing import read_json
from mergegate.tasks.checkpoints import PinnedCheckpoint
from mergegate.tasks.serve.launch import ServerKind, serving_dtype
from mergegate.tasks.serve.settings import ServeSettings
from mergegate.tasks.serve.verdict import SERVED_AS_LORA

# Values that --max-lora-rank accepts.
_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)
# Largest vocabulary of vLLM's logits layer with LoRA, whether or not the adapter changes that layer.
_MOST_TOKENS = 258_048
# Arguments with which a profile itself configures the adapters to serve and their names.
_LORA_OPTIONS = ("--lora-modules", "--enable-lora", "--no-enable-lora", "--lora-target-modules")


@dataclass(frozen=True)
class ServedAdapter:
    """A base and an adapter that vLLM can serve as LoRA. ``max_rank`` is the value of ``--max-lora-rank``."""

    base: Checkpoint
    adapter: Adapter
    max_rank: int

    @property
    def arguments(self) -> Mapping[str, str]:
        """Options of vLLM. Requests to ``{name}`` use the adapter, requests to ``{name}-base`` do not."""
        # Use the JSON form, because vLLM takes the short form for JSON if the path contains a comma.
        module = json.dumps({"name": "{name}", "path": str(self.adapter.directory)})
        return {
            "--served-model-name": base_name("{name}"),
            "--max-lora-rank": str(self.max_rank),
            "--lora-modules": module,
        }

    @property
    def description(self) -> str:
        """One line for a verdict that says how the adapter is served."""
        return f"{SERVED_AS_LORA} on its base: factors of rank {highest_rank(self.adapter)}, room for {self.max_rank}"


def base_name(name: str) -> str:
    """Return the name under which vLLM serves the base of the adapter ``name``."""
    return f"{name}-base"


def plan_lora(adapted_model: PinnedCheckpoint, kind: ServerKind, settings: ServeSettings) -> ServedAdapter | str:
    """Return the base and the adapter if vLLM can serve them as LoRA, or else the reason why it cannot.

    Raise InvalidInput if the files are not a checkpoint, or the adapter does not fit it.
    """
    assert adapted_model.adapter is not None  # callers ensure this
    adapted_model.open()  # raises unless every tensor of the adapter belongs to the base
    base, adapter = open_checkpoint(adapted_model.directory), open_adapter(adapted_model.adapter.directory)
    if kind.python is None:
        return "serve.command is given one model"
    conflicts = [word for word in settings.arguments if word.partition("=")[0] in _LORA_OPTIONS]
    if conflicts:
        return f"serve.arguments has {conflicts[0].partition('=')[0]}"
    if not kind.on_cpu and serving_dtype(settings, base) == "float32":
        return "on GPUs, vLLM supports LoRA only in bfloat16 and float16"

    # Configurations and names show what vLLM does not support.
    config = adapter.config
    content: Mapping[str, Any] = read_json(adapter.directory / CONFIG_FILE)
    parts = [key for key, value in base.config.items() if key.endswith("_config") and isinstance(value, dict)]
    tokens = vocabulary_size(base.config)
    rank = highest_rank(adapter)
    problems = {
        "vLLM does not support DoRA": config.dora,
        "vLLM does not support whole modules (modules_to_save)": content.get("modules_to_save"),
        "vLLM does not support biases of an adapter": config.bias != "none" or config.lora_bias,
        "vLLM does not support trained tokens (trainable_token_indices)": config.tokens is not None,
        "factors of experts (target_parameters) are not tested in vLLM": config.parameters,
        f"vLLM supports ranks up to {_RANKS[-1]}, not {rank}": rank > _RANKS[-1],
        "adapters of models with several parts are not tested in vLLM": set(parts) - {"quantization_config"},
        f"with LoRA, vLLM supports up to {_MOST_TOKENS:,} tokens, not {tokens or 0:,}": (tokens or 0) > _MOST_TOKENS,
        f"vLLM does not support full tensors ({next(iter(adapter.full_tensors), '')})": adapter.full_tensors,
    }
    for problem, is_present in problems.items():
        if is_present:
            return problem
    for module in adapter.modules.values():  # vLLM identifies modules by their full name
        if parse_layer_place(f"{module.name}.weight") is None:
            return f"factors outside of the layers are not tested in vLLM ({module.name})"
        if any(factor in module.tensors for factor in ("own_bias", "b_bias")):
            return f"vLLM does not support biases of an adapter ({module.name})"
        if more := module.tensors.keys() - {"a", "b"}:
            return f"vLLM supports only factors ({module.name} has {min(more)})"
        if "experts" in module.name.split("."):
            return f"factors of experts are not tested in vLLM ({module.name})"
        if f"{module.name}.weight" not in base.tensors:
            return f"vLLM would not find {module.name}, because the base's files use another name"
    return ServedAdapter(base, adapter, next(limit for limit in _RANKS if rank <= limit))


def highest_rank(adapter: Adapter) -> int:
    """Return the highest rank in the adapter's configuration, even if no module has it, because vLLM counts it."""
    return max([adapter.config.rank, *adapter.config.rank_pattern.values()])
