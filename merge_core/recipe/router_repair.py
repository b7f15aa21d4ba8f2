"""Parse the key ``router_repair``, which refits the routers of a merged mixture of experts (HARC).

    merge_method: ties
    base_model: org/mixture
    models:
      - {model: org/math, text: texts/math.jsonl, parameters: {weight: 1, density: 0.5}}
      - {model: org/verse, text: texts/verse.jsonl, parameters: {weight: 1, density: 0.5}}
    router_repair: true                 # or {off_diagonals: 0.9}
    statistics: {documents: 256}

The merge reads the text of each parent, and :mod:`merge_core.architecture.experts.router_fit` computes the new routers.
They then replace the merged ones in the plan.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from mergegate.merge_core.checkpoint import AnyTensor
from mergegate.merge_core.errors import InvalidInput
from mergegate.merge_core.recipe.keys import known_mapping


@dataclass(frozen=True)
class RouterRepair:
    """Settings of the repair.

    Args:
        off_diagonals: Factor of the off-diagonal elements of each curvature matrix, from 0 to 1.
    """

    off_diagonals: float = 0.9

    def content_key(self) -> dict[str, Any]:
        """Return the settings, which all determine the result, as JSON-compatible data."""
        return asdict(self)


@dataclass(frozen=True)
class RepairedRouters:
    """New routers of a merge.

    Args:
        digest: Digest of the routers.
        texts: SHA-256 digest of the text of each parent, by reference.
        tensors: Weights and biases of the new routers, by the names that the merge writes.
        divergence: Mean Kullback-Leibler divergence from the routing of the parents, before and after, in nats.
        agreement: Mean share of the experts that the parents select that the merge selects too, before and after.
        layers: Number of layers with a router. Layers whose merged router was closer to the parents keep it, so
            ``tensors`` can have fewer.
        new_layers: Number of layers with a new router.
    """

    digest: str
    texts: Mapping[str, str]
    tensors: Mapping[str, AnyTensor]
    divergence: tuple[float, float]
    agreement: tuple[float, float]
    layers: int
    new_layers: int


def parse_router_repair(value: object, location: str) -> RouterRepair | None:
    """Return the settings in ``router_repair`` of a recipe, or None if there is no repair.

    Raises:
        InvalidInput: The value is neither a switch nor a mapping of known settings.
    """
    if value is None or isinstance(value, bool):
        return RouterRepair() if value else None
    content: dict[str, Any] = known_mapping(value, location, ("off_diagonals",))
    factor = content.get("off_diagonals", RouterRepair.off_diagonals)
    if isinstance(factor, bool) or not isinstance(factor, (int, float)) or not 0 <= factor <= 1:
        raise InvalidInput(f"{location}.off_diagonals", found=f"{factor!r:.60}", expected="a number from 0 to 1")
    return RouterRepair(float(factor))
