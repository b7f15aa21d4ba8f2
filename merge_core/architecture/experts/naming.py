"""What families call the parts of their experts on disk, as data: projections, and modules that memory names otherwise.

Most families write one tensor an expert and projection (``mlp.experts.3.gate_proj.weight``), and hold all experts of a
layer in one tensor in memory (``mlp.experts.gate_up_proj``). Checkpoints exist in both layouts. The names of the first
are the ones that everything here speaks of. Sources: the checkpoints of the families, and what transformers 5 writes
with and without ``save_original_format``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mergegate.merge_core.checkpoint import config_parts


@dataclass(frozen=True)
class ExpertNames:
    """How a family writes its experts, one by one.

    Args:
        gate: Projection that the activation is applied to.
        up: Projection that is multiplied with it.
        down: Projection back.
        renamed: Beginnings of names inside a layer, as memory has them and as the disk has them.
    """

    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"
    renamed: tuple[tuple[str, str], ...] = ()

    def on_disk(self, part: str) -> str:
        """The name inside a layer that ``part`` has on disk."""
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
    """What the family of a config, or of its text part, calls its experts."""
    kinds = (part.get("model_type") for part in config_parts(config))
    return next((_BY_MODEL_TYPE[kind] for kind in kinds if kind in _BY_MODEL_TYPE), _PLAIN)
