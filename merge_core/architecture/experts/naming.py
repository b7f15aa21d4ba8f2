"""List the names that families use on disk for the parts of their experts.

Most families write one tensor per expert and projection (``mlp.experts.3.gate_proj.weight``), but hold all experts of a
layer in one tensor in memory (``mlp.experts.gate_up_proj``). Checkpoints exist in both layouts. This package uses the
names of the first layout. Sources: the checkpoints of the families, and the output of transformers 5 with and without
``save_original_format``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mergegate.merge_core.checkpoint import config_parts


@dataclass(frozen=True)
class ExpertNames:
    """Names of a family's single experts on disk.

    Args:
        gate: Name of the projection that the activation is applied to.
        up: Name of the projection that is multiplied with the gate.
        down: Name of the projection back to the hidden size.
        renamed: Prefixes of names inside a layer that differ, in memory and on disk.
    """

    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"
    renamed: tuple[tuple[str, str], ...] = ()

    def on_disk(self, part: str) -> str:
        """Return the name on disk of ``part``, a name inside a layer."""
        for memory, disk in self.renamed:
            if part.startswith(memory):
                return disk + part.removeprefix(memory)
        return part


_PLAIN = ExpertNames()
_NUMBERED = ExpertNames("w1", "w3", "w2")
_BLOCK_SPARSE = ExpertNames("w1", "w3", "w2", (("mlp.", "block_sparse_moe."),))
_GRANITE = ExpertNames(renamed=(("block_sparse_moe.router.weight", "block_sparse_moe.router.layer.weight"),))
_BY_MODEL_TYPE = {
    "mixtral": _BLOCK_SPARSE,
    "minimax": _BLOCK_SPARSE,
    "minimax_m2": _BLOCK_SPARSE,
    "phimoe": ExpertNames("w1", "w3", "w2", (("mlp.router.", "block_sparse_moe.gate."), ("mlp.", "block_sparse_moe."))),
    "lfm2_moe": _NUMBERED,
    "granitemoe": _GRANITE,
    "granitemoeshared": _GRANITE,
    "granitemoehybrid": _GRANITE,
}


def expert_names(config: Mapping[str, Any]) -> ExpertNames:
    """Return the names that the model family of ``config`` uses on disk for the parts of its experts.

    The family is the first known ``model_type`` in the config or in one of its parts, such as the text model. For other
    families, return the default names (``gate_proj``, ``up_proj``, ``down_proj``).
    """
    kinds = (part.get("model_type") for part in config_parts(config))
    return next((_BY_MODEL_TYPE[kind] for kind in kinds if kind in _BY_MODEL_TYPE), _PLAIN)
