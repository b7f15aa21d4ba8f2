"""Write an adapter that PEFT can read: one file of tensors, and a minimal configuration.

The configuration names every module by its full path, because a short name such as ``up_proj`` would also match modules
that were not adapted.
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
from mergegate.merge_core.architecture import kind_of
from mergegate.merge_core.checkpoint import BY_TORCH_NAME, Checkpoint, render_header

if TYPE_CHECKING:
    import torch

# PEFT's task for each class that loads a base model. Classifiers have none, because PEFT would require that the adapter
# contains a new head.
_TASKS = {
    "AutoModelForCausalLM": "CAUSAL_LM",
    "AutoModelForSeq2SeqLM": "SEQ_2_SEQ_LM",
    "AutoModel": "FEATURE_EXTRACTION",
    "SentenceTransformer": "FEATURE_EXTRACTION",
}


def task_type(base: Checkpoint) -> str | None:
    """Return the ``task_type`` of an adapter of ``base``, or None if PEFT needs none for this kind of model."""
    return _TASKS.get(kind_of(base).loader)


@dataclass(frozen=True)
class NewAdapter:
    """An adapter to write. The product of its factors needs no scale, so alpha equals the rank.

    Args:
        base: Name or path of the base model (``base_model_name_or_path``).
        factors: Factors ``A [rank, in]`` and ``B [out, rank]`` of linear layers by module.
        embeddings: Factors ``A [rank, rows]`` and ``B [width, rank]`` of embeddings by module.
        biases: Full biases of modules with factors, by module.
        full_tensors: Full tensors of modules without factors, by module and last part of the name.
        transposed: Whether the adapted weights are stored as ``[in, out]`` (``fan_in_fan_out``).
        task: ``task_type``, by which PEFT selects its class. None: the class for models of any task.
    """

    base: str
    factors: Mapping[str, tuple[torch.Tensor, torch.Tensor]]
    embeddings: Mapping[str, tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict)
    biases: Mapping[str, torch.Tensor] = field(default_factory=dict)
    full_tensors: Mapping[str, Mapping[str, torch.Tensor]] = field(default_factory=dict)
    transposed: bool = False
    task: str | None = "CAUSAL_LM"

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return the tensors of the adapter by their names in the file."""
        tensors: dict[str, torch.Tensor] = {}
        for module, (a, b) in self.factors.items():
            tensors |= {f"{module}.lora_A.weight": a, f"{module}.lora_B.weight": b}
        for module, (a, b) in self.embeddings.items():
            tensors |= {f"{module}.lora_embedding_A": a, f"{module}.lora_embedding_B": b}
        tensors |= {f"{module}.base_layer.bias": bias for module, bias in self.biases.items()}
        for module, by_leaf in self.full_tensors.items():
            tensors |= {f"{module}.{leaf}": tensor for leaf, tensor in by_leaf.items()}
        return {f"{PREFIX}{name}": tensor.contiguous() for name, tensor in sorted(tensors.items())}

    def configuration(self) -> dict[str, Any]:
        """Return the content of ``adapter_config.json`` for this adapter."""
        ranks = {module: len(a) for module, (a, _) in sorted({**self.factors, **self.embeddings}.items())}
        rank = max(ranks.values(), default=1)
        # PEFT interprets a pattern as a regular expression that matches complete trailing parts of the module's name.
        smaller = {re.escape(module): module_rank for module, module_rank in ranks.items() if module_rank != rank}
        return {
            "peft_type": "LORA",
            "task_type": self.task,
            "base_model_name_or_path": self.base,
            "r": rank,
            "lora_alpha": rank,
            "rank_pattern": smaller,
            "alpha_pattern": smaller,
            "target_modules": list(ranks),
            "modules_to_save": sorted(self.full_tensors) or None,
            "bias": "lora_only" if self.biases else "none",
            "fan_in_fan_out": self.transposed,
            "init_lora_weights": True,
            "inference_mode": True,
            "lora_dropout": 0.0,
            "use_rslora": False,
            "use_dora": False,
        }


def write_adapter(adapter: NewAdapter, out: Path) -> None:
    """Write ``adapter`` into the directory ``out``, with its configuration last."""
    import torch

    out.mkdir(parents=True, exist_ok=True)
    tensors = adapter.tensors()
    header = [
        (name, BY_TORCH_NAME[str(tensor.dtype).removeprefix("torch.")].code, tuple(tensor.shape), tensor.nbytes)
        for name, tensor in tensors.items()
    ]
    with (out / WEIGHTS_FILE).open("wb") as file:
        file.write(render_header(header, {"format": "pt"}))
        for tensor in tensors.values():
            file.write(tensor.reshape(-1).view(torch.uint8).numpy().data)
    (out / CONFIG_FILE).write_text(json.dumps(adapter.configuration(), indent=1, sort_keys=True) + "\n")
