"""An adapter behind vLLM as what it is: the base is served, and the adapter beside it as a LoRA module.

What vLLM does not take in that way is known before it is started, from the adapter's configuration, the names of its
tensors, and the base; it is then served merged into the base, and the verdict says why. Two kinds of things are not
taken: those that vLLM refuses, and those that it passes over in silence, such as factors of a module that it does not
find by the name that they have, or of a head that is tied to the embedding.

Source: vLLM 0.32, ``lora/peft_helper.py``, ``lora/lora_model.py``, ``lora/layers``, ``config/lora.py``.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from mergegate.merge_core.adapters import CONFIG_FILE, Adapter, open_adapter
from mergegate.merge_core.architecture import parse_layer_place, vocabulary_size
from mergegate.merge_core.checkpoint import Checkpoint, open_checkpoint
from mergegate.merge_core.parsing import read_json
from mergegate.tasks.checkpoints import PinnedCheckpoint
from mergegate.tasks.serve.launch import ServerKind, dtype_of
from mergegate.tasks.serve.settings import ServeSettings
from mergegate.tasks.serve.static_checks import check_finite
from mergegate.tasks.serve.verdict import SERVED_AS_LORA, Check

# What --max-lora-rank may be.
_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)
# With LoRA, vLLM's layer that computes logits takes no more tokens, adapted or not.
_MOST_TOKENS = 258_048
# Arguments of a profile that say themselves what is served under which name.
_SAID_OTHERWISE = ("--lora-modules", "--enable-lora", "--no-enable-lora", "--lora-target-modules")
_BIASES = ("own_bias", "b_bias")


@dataclass(frozen=True)
class ServedAdapter:
    """A base and an adapter that vLLM takes as LoRA.

    Args:
        base: The model that vLLM loads.
        adapter: What it applies.
        max_rank: ``--max-lora-rank``.
    """

    base: Checkpoint
    adapter: Adapter
    max_rank: int

    @property
    def arguments(self) -> Mapping[str, str]:
        """Options of vLLM; requests that name ``{name}`` get the adapter, those that name ``{name}-base`` do not."""
        # The JSON form: in the other, a comma in the path would be read as the beginning of this one.
        module = json.dumps({"name": "{name}", "path": str(self.adapter.directory)})
        return {
            "--served-model-name": base_name("{name}"),
            "--max-lora-rank": str(self.max_rank),
            "--lora-modules": module,
        }

    def static_check(self) -> Check:
        """Whether every factor is a number."""
        factors = replace(self.base, tensors={tensor.name: tensor for tensor in self.adapter.stored})
        return check_finite(factors).model_copy(update={"name": "finite factors"})

    @property
    def way(self) -> str:
        """How it is served, in a line for a verdict."""
        return f"{SERVED_AS_LORA} on its base: factors of rank {highest_rank(self.adapter)}, room for {self.max_rank}"


def base_name(name: str) -> str:
    """What the base is called beside an adapter that is served as ``name``."""
    return f"{name}-base"


def as_lora(adapted: PinnedCheckpoint, kind: ServerKind, settings: ServeSettings) -> ServedAdapter | str:
    """The base and the adapter of ``adapted`` as vLLM takes them, or why it does not.

    Raises:
        InvalidInput: for files that are no checkpoint, or no adapter of it.
    """
    assert adapted.adapter is not None  # the caller's reason to be here
    adapted.open()  # every tensor of the adapter has its place
    base, adapter = open_checkpoint(adapted.directory), open_adapter(adapted.adapter.directory)
    if kind.python is None:
        return "serve.command is given one model"
    said = [word for word in settings.arguments if word.partition("=")[0] in _SAID_OTHERWISE]
    if said:
        return f"serve.arguments has {said[0].partition('=')[0]}"
    if not kind.on_cpu and dtype_of(settings, base) == "float32":
        return "on GPUs, vLLM takes LoRA in bfloat16 and float16 only"
    if why := why_not_lora(base, adapter):
        return why
    rank = highest_rank(adapter)
    return ServedAdapter(base, adapter, next(most for most in _RANKS if rank <= most))


def highest_rank(adapter: Adapter) -> int:
    """As vLLM counts it: also a rank that no module has, if the configuration names it."""
    return max([adapter.config.rank, *adapter.config.rank_pattern.values()])


def why_not_lora(base: Checkpoint, adapter: Adapter) -> str:
    """Why vLLM cannot serve ``adapter`` on ``base`` as LoRA, from configurations and names; empty when it can."""
    for why in (_of_configuration(adapter), _of_base(base), _of_tensors(base, adapter)):
        if why:
            return why
    return ""


def _of_configuration(adapter: Adapter) -> str:
    config = adapter.config
    content: Mapping[str, Any] = read_json(adapter.directory / CONFIG_FILE)
    if config.dora:
        return "vLLM takes no DoRA"
    if content.get("modules_to_save"):
        return "vLLM takes no whole modules (modules_to_save)"
    if config.bias != "none" or config.lora_bias:
        return "vLLM takes no biases of an adapter"
    if config.tokens is not None:
        return "vLLM takes no trained tokens (trainable_token_indices)"
    if config.parameters:
        return "factors of experts (target_parameters) were not tried in vLLM"
    if (rank := highest_rank(adapter)) > _RANKS[-1]:
        return f"vLLM takes ranks up to {_RANKS[-1]}, not {rank}"
    return ""


def _of_base(base: Checkpoint) -> str:
    parts = [key for key, value in base.config.items() if key.endswith("_config") and isinstance(value, dict)]
    if any(key != "quantization_config" for key in parts):
        return "adapters of models with several parts were not tried in vLLM"
    tokens = vocabulary_size(base.config)
    if tokens is not None and tokens > _MOST_TOKENS:
        return f"with LoRA, vLLM takes up to {_MOST_TOKENS:,} tokens, not {tokens:,}"
    return ""


def _of_tensors(base: Checkpoint, adapter: Adapter) -> str:
    """What vLLM refuses, or would overlook: it goes by a module's whole name."""
    if adapter.whole:
        return f"vLLM takes no whole tensors ({next(iter(adapter.whole))})"
    for module in adapter.modules.values():
        if parse_layer_place(f"{module.name}.weight") is None:
            return f"factors outside of the layers were not tried in vLLM ({module.name})"
        if any(kind in module.tensors for kind in _BIASES):
            return f"vLLM takes no biases of an adapter ({module.name})"
        if more := module.tensors.keys() - {"a", "b"}:
            return f"vLLM takes factors only ({module.name} has {min(more)})"
        if "experts" in module.name.split("."):
            return f"factors of experts were not tried in vLLM ({module.name})"
        if f"{module.name}.weight" not in base.tensors:
            return f"vLLM would look for {module.name} in vain: the base's files call it otherwise"
    return ""
