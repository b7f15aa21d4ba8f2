"""Estimate the cost of measuring statistics on calibration texts, from the plan, the text sizes and measured rates.

For input moments, the estimate includes, for each position, the product with all weights and the float64 product of
each distinct input with itself. An expert only counts for the positions that are routed to it. If the sums do not fit
into memory, the text is read in several runs, and each run stops at its last layer. For the importance of elements,
which needs derivatives, each run computes the complete forward and backward pass.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

from mergegate.merge_core import MergePlan
from mergegate.merge_core.architecture import TensorKind, input_width, is_projection, is_routed_expert, tensor_kind
from mergegate.merge_core.architecture.experts import find_routers
from mergegate.merge_core.checkpoint import config_parts
from mergegate.merge_core.engine.forecast import Rates
from mergegate.merge_core.files import HashMemo
from mergegate.merge_core.parsing import open_buffered
from mergegate.tasks.merge.statistics import pin_calibration_texts
from mergegate.tasks.perplexity import HeldOutText

# Name of the shared input of each kind of matrix.
_INPUT: dict[TensorKind, str] = {
    **dict.fromkeys(("q", "k", "v", "qkv"), "attention input"),
    "o": "attention output",
    **dict.fromkeys(("gate", "up", "gate_up"), "feed-forward input"),
    "down": "feed-forward output",
}
_NUMBER = re.compile(r"\.experts\.([0-9]+)\.")
_BYTES_PER_TOKEN = 4.0  # English text with the vocabularies of current models
_REACHED = 0.6  # share of the rate of a single large product that a complete pass reaches


@dataclass(frozen=True)
class StatisticsNeeds:
    """Estimated cost of measuring the statistics of all models in a recipe.

    Args:
        texts: Number of texts.
        positions: Estimated number of tokens in all texts.
        inputs: Number of distinct inputs of one model, or of measured tensors if ``backwards`` is set.
        nbytes: Bytes on disk for all models.
        sums: Bytes of the sums for one model. Sums that do not fit into memory are measured in several runs.
        operations: Floating-point operations for reading each text once.
        backwards: Whether derivatives are needed.
    """

    texts: int
    positions: float
    inputs: int
    nbytes: int
    sums: int
    operations: float
    backwards: bool = False

    def seconds(self, rates: Rates, memory: int) -> float | None:
        """Return the estimated time in seconds, or None if the machine's rate of matrix products was not measured.

        ``memory`` is the number of bytes available for the sums.
        """
        if not rates.products:
            return None
        runs = max(1, math.ceil(self.sums / max(memory, 1)))
        return (runs if self.backwards else (runs + 1) / 2) * self.operations / (_REACHED * rates.products)

    def summary(self) -> str:
        """Return a one-line summary, such as ``2 texts · about 3,000 positions · 12 inputs per model``."""
        unit = "tensors" if self.backwards else "inputs"
        return f"{self.texts} texts · about {self.positions:,.0f} positions · {self.inputs} {unit} per model"


def statistics_needs(plan: MergePlan, hashes: HashMemo) -> StatisticsNeeds | None:
    """Return the cost of the statistics that the recipe of ``plan`` needs, or None if it needs no statistics.

    Raises:
        InvalidInput: A text does not exist, or does not have the format that the recipe declares.
    """
    recipe = plan.recipe
    texts = [text for _, text in pin_calibration_texts(recipe, hashes)] if recipe.needs_statistics else []
    if not texts:
        return None
    positions = _estimate_positions(texts, recipe.reading.documents)
    if plan.method.traits.reads_text == "importance":
        measured = [job.output for job in plan.jobs if job.importance]
        size = 4 * sum(tensor.numel for tensor in measured)
        # The forward pass takes 2 operations per parameter. The backward pass takes 4: derivatives with respect to the
        # inputs and to the weights.
        operations = positions * 6 * plan.parameters
        return StatisticsNeeds(len(texts), positions, len(measured), len(texts) * size, size, operations, True)

    # Width of each distinct input of one model, and the share of all positions that reach it.
    inputs: dict[tuple[str, str], tuple[int, float]] = {}
    routed_share = _routed_share(plan)
    for job in plan.jobs:
        name, shape = job.output.name, job.output.shape
        if len(shape) == 2 and is_projection(name):
            module = name.removesuffix(".weight").rpartition(".")[0]
            share = routed_share if is_routed_expert(name) else 1.0
            inputs.setdefault((module, _INPUT[tensor_kind(name)]), (input_width(name, shape), share))

    widths = [width for width, _ in inputs.values()]
    full = [width for width in widths if width <= recipe.reading.diagonal_above]
    stored = 4 * sum(width * (width + 1) // 2 for width in full) + 4 * (sum(widths) - sum(full))
    # A product takes twice as long in float64 as in float32.
    products = sum(share * 2 * width**2 for width, share in inputs.values() if width <= recipe.reading.diagonal_above)
    per_position = 2 * plan.parameters + 2 * products
    return StatisticsNeeds(
        texts=len(texts),
        positions=positions,
        inputs=len(widths),
        nbytes=len(texts) * stored,
        sums=8 * sum(width**2 for width in full),
        operations=positions * per_position,
    )


@dataclass(frozen=True)
class RouterNeeds:
    """Estimated cost of a router repair.

    Args:
        texts: Number of texts.
        positions: Estimated number of tokens in all texts.
        layers: Number of layers with a router.
        states: Bytes of memory for the states of one layer, in float32.
        operations: Floating-point operations of one complete pass over the texts.
    """

    texts: int
    positions: float
    layers: int
    states: float
    operations: float

    def seconds(self, rates: Rates) -> float | None:
        """Return the estimated time in seconds, or None if the machine's rate of matrix products was not measured."""
        passes = (self.layers + 1) / 2  # each pass stops at its layer
        return passes * self.operations / (_REACHED * rates.products) if rates.products else None

    def summary(self) -> str:
        """Return a one-line summary, such as ``2 texts · about 3,000 positions · 16 routers``."""
        return f"{self.texts} texts · about {self.positions:,.0f} positions · {self.layers} routers"


def router_needs(plan: MergePlan, hashes: HashMemo) -> RouterNeeds | None:
    """Return the cost of the router repair that the recipe of ``plan`` needs, or None if it repairs no routers.

    Raises:
        InvalidInput: A text does not exist, or does not have the format that the recipe declares.
    """
    if plan.recipe.router_repair is None:
        return None
    texts = [text for _, text in pin_calibration_texts(plan.recipe, hashes)]
    positions = _estimate_positions(texts, plan.recipe.reading.documents)
    widths = [router.weight.shape[1] for router in find_routers(plan.donor).values()]
    share = _routed_share(plan)
    active = sum(job.output.numel * (share if is_routed_expert(job.output.name) else 1) for job in plan.jobs)
    return RouterNeeds(len(texts), positions, len(widths), 4 * positions * max(widths), 2 * positions * active)


def _estimate_positions(texts: Sequence[HeldOutText], documents: int) -> float:
    """Estimate the number of tokens from the first lines and the size of each file."""
    positions = 0.0
    for text in texts:
        with open_buffered(text.path) as file:
            lines = [len(line) for line in file.readlines(1 << 20) if line.strip()]
        if lines:
            size, per_document = text.path.stat().st_size, sum(lines) / len(lines)
            positions += min(size, documents * per_document) / _BYTES_PER_TOKEN
    return positions


def _routed_share(plan: MergePlan) -> float:
    """Return the share of a layer's experts that process a position, or 1 if the configuration does not specify it."""
    numbers = {int(match[1]) for job in plan.jobs if (match := _NUMBER.search(job.output.name))}
    counts = (part.get("num_experts_per_tok") or 0 for part in config_parts(plan.config))
    return next((count / len(numbers) for count in counts if 0 < count <= len(numbers)), 1.0)
