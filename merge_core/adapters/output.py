"""An adapter as PEFT reads it: one file of tensors, and a configuration that says no more than they need.

Every module is named by its whole path: a last part alone (``up_proj``) also means modules that were never adapted.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mergegate.merge_core.adapters.adapter import PREFIX, WEIGHTS_FILE
from mergegate.merge_core.adapters.configuration import CONFIG_FILE
from mergegate.merge_core.checkpoint import BY_TORCH_NAME, render_header

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class NewAdapter:
    """An adapter that is to be written. Factors are scaled already: alpha is the rank.

    Args:
        base: ``base_model_name_or_path``.
        factors: Module → ``A [rank, in]`` and ``B [out, rank]``.
        embeddings: The same of embeddings: ``A [rank, rows]``, ``B [width, rank]``.
        biases: Module with factors → its whole bias.
        whole: Module without factors → its tensors by last name.
        transposed: Whether the weights that are adapted are stored as ``[in, out]``.
        task: ``task_type``.
    """

    base: str
    factors: Mapping[str, tuple[torch.Tensor, torch.Tensor]]
    embeddings: Mapping[str, tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict)
    biases: Mapping[str, torch.Tensor] = field(default_factory=dict)
    whole: Mapping[str, Mapping[str, torch.Tensor]] = field(default_factory=dict)
    transposed: bool = False
    task: str = "CAUSAL_LM"

    def tensors(self) -> dict[str, torch.Tensor]:
        """By the names that they have in the file."""
        named: dict[str, torch.Tensor] = {}
        for module, (a, b) in self.factors.items():
            named |= {f"{module}.lora_A.weight": a, f"{module}.lora_B.weight": b}
        for module, (a, b) in self.embeddings.items():
            named |= {f"{module}.lora_embedding_A": a, f"{module}.lora_embedding_B": b}
        named |= {f"{module}.base_layer.bias": bias for module, bias in self.biases.items()}
        named |= {f"{module}.{leaf}": one for module, inside in self.whole.items() for leaf, one in inside.items()}
        return {f"{PREFIX}{name}": tensor.contiguous() for name, tensor in sorted(named.items())}

    def configuration(self) -> dict[str, Any]:
        """``adapter_config.json``."""
        ranks = {module: len(a) for module, (a, _) in sorted({**self.factors, **self.embeddings}.items())}
        rank = max(ranks.values(), default=1)
        # As PEFT reads a pattern: a regular expression for a whole end of the module's name.
        smaller = {re.escape(module): one for module, one in ranks.items() if one != rank}
        return {
            "peft_type": "LORA",
            "task_type": self.task,
            "base_model_name_or_path": self.base,
            "r": rank,
            "lora_alpha": rank,
            "rank_pattern": smaller,
            "alpha_pattern": smaller,
            "target_modules": list(ranks),
            "modules_to_save": sorted(self.whole) or None,
            "bias": "lora_only" if self.biases else "none",
            "fan_in_fan_out": self.transposed,
            "init_lora_weights": True,
            "inference_mode": True,
            "lora_dropout": 0.0,
            "use_rslora": False,
            "use_dora": False,
        }


def write_adapter(adapter: NewAdapter, out: Path) -> None:
    """Write ``adapter`` into the directory ``out``, its configuration last."""
    import torch

    out.mkdir(parents=True, exist_ok=True)
    tensors = adapter.tensors()
    header = [
        (name, BY_TORCH_NAME[str(one.dtype).removeprefix("torch.")].code, tuple(one.shape), one.nbytes)
        for name, one in tensors.items()
    ]
    with (out / WEIGHTS_FILE).open("wb") as file:
        file.write(render_header(header, {"format": "pt"}))
        for one in tensors.values():
            file.write(one.reshape(-1).view(torch.uint8).numpy().data)
    (out / CONFIG_FILE).write_text(json.dumps(adapter.configuration(), indent=1, sort_keys=True) + "\n")
