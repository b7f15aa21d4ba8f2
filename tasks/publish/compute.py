"""Bound the floating-point operations of a modification with one formula of sizes, which a reader can recompute.

The bound is not a measurement, so the same inputs give the same number on every machine. Tests compare it with counted
operations.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mergegate.merge_core.checkpoint import config_parts
from mergegate.tasks.checkpoints import PinnedRecipe
from mergegate.tasks.merge import pin_calibration_texts
from mergegate.tasks.stage import store

_PER_WIDTH = 1_000  # operations per parameter, model and column: the method, and decompositions of matrices
_PER_TOKEN = 64  # operations per parameter, layer and token: reading with derivatives, and products of inputs
_UNKNOWN_WIDTH, _UNKNOWN_LAYERS = 16_384, 128


@dataclass(frozen=True)
class Modification:
    """Sizes of a merge or a quantization that bound its floating-point operations.

    Attributes:
        parameters: Largest number of parameters of a model that takes part.
        models: Number of models that are combined, over all steps of the recipe.
        tokens: Upper bound of the tokens of all texts that models read for the modification.
        width: Width of the hidden states.
        layers: Number of layers.
        prompts: Number of prompts of the recipe that a model reads for the routers.
    """

    parameters: int
    models: int
    tokens: int
    width: int
    layers: int
    prompts: int = 0

    @classmethod
    def of_network(
        cls, config: Mapping[str, Any], parameters: int, models: int = 1, tokens: int = 0, prompts: int = 0
    ) -> Modification:
        """Return the sizes for a network with this ``config.json``. An unknown size is replaced by a large one."""

        def largest(*names: str) -> int:
            values = (part.get(name) for part in config_parts(config) for name in names)
            return max((value for value in values if isinstance(value, int)), default=0)

        width = largest("hidden_size", "n_embd", "d_model", "dim") or _UNKNOWN_WIDTH
        layers = largest("num_hidden_layers", "n_layer", "n_layers", "num_layers") or _UNKNOWN_LAYERS
        return cls(parameters, models, tokens, width, layers, prompts)

    @property
    def flop(self) -> float:
        """Upper bound of the floating-point operations."""
        return float(self.parameters) * (_PER_WIDTH * self.models * self.width + _PER_TOKEN * self.layers * self.tokens)

    @property
    def formula(self) -> str:
        """Formula of the bound with its numbers."""
        return (
            f"{self.parameters:,} parameters · ({_PER_WIDTH:,} · {self.models} models · width {self.width:,} + "
            f"{_PER_TOKEN} · {self.layers} layers · {self.tokens:,} tokens)"
        )


def merge_computation(pinned_recipe: PinnedRecipe, config: Mapping[str, Any], parameters: int) -> Modification:
    """Return the sizes of a merge whose result has this ``config`` and this number of parameters.

    A parent can have more parameters than the result, but not more than two for each byte of its weights. Texts have at
    most two tokens per byte, because windows overlap.
    """
    models, tokens, prompts = 0, 0, 0
    for document in (*pinned_recipe.recipe.steps, pinned_recipe.recipe):
        models += len(document.own_references())
        if (mixture := document.mixture) is not None and mixture.needs_prompts:
            texts = [text for each in (*mixture.experts, *mixture.shared) for text in (*each.positive, *each.negative)]
            prompts += len(texts)
            tokens += sum(2 * len(text.encode()) for text in texts)
        if document.reads_texts and document.texts:
            pinned = pin_calibration_texts(document, store().hashes)
            tokens += sum(2 * text.path.stat().st_size for _, text in pinned)
    weights = [
        [file.stat().st_size for file in parent.directory.glob("*.*") if file.suffix in (".safetensors", ".bin")]
        for parent in pinned_recipe.parents
    ]
    bound = max(parameters, *(2 * sum(sizes) for sizes in weights))
    return Modification.of_network(config, bound, models, tokens, prompts)
