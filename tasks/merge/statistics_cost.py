"""What it takes to measure what models show on texts, before it is done: from the plan, the texts' sizes, and rates.

Pure but for a look at the sizes of texts. Of each position a model multiplies with all its weights, and each distinct
input with itself, in float64 (of experts those that it is sent to); where the sums do not fit into memory at once, a
text is read in several runs, each no further than its last layer. Where derivatives are asked for, it is read forward
and back, in each run the whole way.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from mergegate.merge_core import MergePlan
from mergegate.merge_core.architecture import TensorKind, input_width, is_projection, is_routed_expert, tensor_kind
from mergegate.merge_core.checkpoint import config_parts
from mergegate.merge_core.engine.forecast import Rates
from mergegate.merge_core.files import HashMemo
from mergegate.merge_core.parsing import open_buffered
from mergegate.tasks.merge.statistics import pin_calibration_texts
from mergegate.tasks.perplexity import HeldOutText

# Kinds that are multiplied with one input.
_INPUT: dict[TensorKind, str] = {
    **dict.fromkeys(("q", "k", "v", "qkv"), "into attention"),
    "o": "out of attention",
    **dict.fromkeys(("gate", "up", "gate_up"), "into the feed-forward network"),
    "down": "out of it",
}
_NUMBER = re.compile(r"\.experts\.([0-9]+)\.")
_BYTES_A_TOKEN = 4.0  # of English text, with the vocabularies of today
_REACHED = 0.6  # of what a large product alone reaches


@dataclass(frozen=True)
class StatisticsNeeds:
    """What measuring takes, of all models of a recipe together.

    Args:
        texts: That are read.
        positions: Tokens of all of them, about.
        inputs: Distinct inputs, or tensors, of one model.
        nbytes: That are kept, of all models.
        sums: Bytes of the sums of one model; what does not fit into memory is measured in several runs.
        operations: Of reading each text once.
        backwards: Whether derivatives are wanted.
    """

    texts: int
    positions: float
    inputs: int
    nbytes: int
    sums: int
    operations: float
    backwards: bool = False

    def seconds(self, rates: Rates, memory: int) -> float | None:
        """On a machine of these rates that has so many bytes for sums; None where products were not measured."""
        if not rates.products:
            return None
        runs = max(1, math.ceil(self.sums / max(memory, 1)))
        return (runs if self.backwards else (runs + 1) / 2) * self.operations / (_REACHED * rates.products)

    def summary(self) -> str:
        """``2 texts · about 3,000 positions · 12 inputs each``."""
        what = "tensors" if self.backwards else "inputs"
        return f"{self.texts} texts · about {self.positions:,.0f} positions · {self.inputs} {what} a model"


def statistics_needs(plan: MergePlan, hashes: HashMemo) -> StatisticsNeeds | None:
    """What the recipe of ``plan`` wants to be measured; None where that is nothing.

    Raises:
        InvalidInput: for a text that is not there, or is not as the recipe says.
    """
    recipe = plan.recipe
    texts = [text for _, text in pin_calibration_texts(recipe, hashes)]
    if not texts:
        return None
    positions = sum(_positions(text, recipe.reading.documents) for text in texts)
    if plan.method.traits.reads_text == "importance":
        measured = [job.output for job in plan.jobs if job.importance]
        size = 4 * sum(one.numel for one in measured)
        # As much again forward, twice as much back: to what comes before, and to the weights.
        operations = positions * 6 * plan.parameters
        return StatisticsNeeds(len(texts), positions, len(measured), len(texts) * size, size, operations, True)
    found = _inputs(plan)
    widths = [width for width, _ in found]
    whole = [width for width in widths if width <= recipe.reading.diagonal_above]
    kept = 4 * sum(width * (width + 1) // 2 for width in whole) + 4 * (sum(widths) - sum(whole))
    # In float64 a product takes twice as long as in float32.
    products = sum(share * 2 * width**2 for width, share in found if width <= recipe.reading.diagonal_above)
    each = 2 * plan.parameters + 2 * products
    return StatisticsNeeds(
        texts=len(texts),
        positions=positions,
        inputs=len(widths),
        nbytes=len(texts) * kept,
        sums=8 * sum(width**2 for width in whole),
        operations=positions * each,
    )


def _inputs(plan: MergePlan) -> list[tuple[int, float]]:
    """Widths of the distinct inputs of one model, and which share of all positions each has."""
    found: dict[tuple[str, str], tuple[int, float]] = {}
    routed = _share_of_experts(plan)
    for job in plan.jobs:
        name, shape = job.output.name, job.output.shape
        if len(shape) == 2 and is_projection(name):
            module = name.removesuffix(".weight").rpartition(".")[0]
            share = routed if is_routed_expert(name) else 1.0
            found.setdefault((module, _INPUT[tensor_kind(name)]), (input_width(name, shape), share))
    return list(found.values())


def _share_of_experts(plan: MergePlan) -> float:
    """Of all experts of a layer, how many a position is sent to; 1 where the configuration does not say."""
    numbers = {int(match[1]) for job in plan.jobs if (match := _NUMBER.search(job.output.name))}
    counts = (part.get("num_experts_per_tok") or 0 for part in config_parts(plan.config))
    return next((count / len(numbers) for count in counts if 0 < count <= len(numbers)), 1.0)


def _positions(text: HeldOutText, documents: int) -> float:
    """Tokens of the documents that are read, about: from the first lines and the size of the file."""
    with open_buffered(text.path) as file:
        lines = [len(line) for line in file.readlines(1 << 20) if line.strip()]
    if not lines:
        return 0.0
    size, each = text.path.stat().st_size, sum(lines) / len(lines)
    return min(size, documents * each) / _BYTES_A_TOKEN
