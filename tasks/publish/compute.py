"""Estimate the computation and the energy of a merge and of its evaluation.

The estimates are upper bounds from the sizes of models and samples, not measurements, so the same inputs give the same
numbers on every machine. Each constant below is larger than what was counted (``tests/publish/test_compute.py``).

The merge counts every floating-point operation of the method. Models that read text count their matrix products and
their attention, as is usual for training: 2 operations per parameter and token, and 4 per layer, token, token of
context and width of the attention.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from mergegate.merge_core import MergePlan
from mergegate.merge_core.checkpoint import config_parts
from mergegate.merge_core.methods import Costs
from mergegate.merge_core.plan import TensorJob

# Operations per unit of a method's costs (``Costs``), and the costs of a method that was not measured.
_PER_UNIT = 64.0
_UNMEASURED = Costs(map=20.0, fold=20.0, folds=lambda task: 8)
_COPY = 32.0  # operations per element of a tensor that is copied: conversion, and checks of its values
_NOISE = 512.0  # operations per element for random noise, which the costs do not include
_DECOMPOSITION = 30.0  # operations for a decomposition of [m, n], by m · n · min(m, n)
_QUANTIZATION = 1e4  # operations per weight: search for scales
_REQUESTS = 16  # requests per document of a task that compares answers, or windows of a long document
_UNKNOWN_CONTEXT = 131_072
_UNKNOWN_LAYERS = 128
# Energy of a whole machine. CPU: 500 W at 0.5 · 10^12 operations per second. GPU: 1000 W at 100 · 10^12.
_PER_JOULE = {"cpu": 1e9, "cuda": 1e11}
_JOULE_PER_BYTE = 1e-6  # 500 W at 0.5 GB per second
_JOULE_PER_START = 60_000.0  # 500 W for 2 minutes
_JOULE_PER_KWH = 3.6e6


@dataclass(frozen=True)
class ComputePart:
    """One part of the computation.

    Attributes:
        purpose: ``merge`` for the modification, ``evaluation`` for the tests of the result and of its parents.
        name: Description, such as ``ties, 2.1 M elements`` or ``reverse: merge``.
        flop: Upper bound of the floating-point operations.
        nbytes: Bytes that are read and written.
        model: Model that is evaluated. Empty for the merge.
    """

    purpose: Literal["merge", "evaluation"]
    name: str
    flop: float
    nbytes: float = 0.0
    model: str = ""


@dataclass(frozen=True)
class ComputeEstimate:
    """Upper bounds of the computation and the energy for a release.

    Attributes:
        merge_flop: Floating-point operations of the merge, including models that read calibration texts.
        evaluation_flop: Floating-point operations of the evaluation of all models. None if nothing was evaluated.
        energy_kwh: Energy of both in kWh.
        assumptions: Sentences that explain how the numbers were computed.
        parts: Parts of the computation. Their sums are ``merge_flop`` and ``evaluation_flop``.
    """

    merge_flop: float
    evaluation_flop: float | None
    energy_kwh: float
    assumptions: tuple[str, ...]
    parts: tuple[ComputePart, ...] = ()


@dataclass(frozen=True)
class NetworkDimensions:
    """Sizes of a network that determine the computation per token.

    Attributes:
        parameters: Number of parameters. A mixture of experts counts all experts.
        layers: Number of layers.
        attention_width: Number of attention heads times the width of a head, of one layer.
        context: Largest number of tokens that the network reads.
        nbytes: Size of the weights in bytes.
    """

    parameters: int
    layers: int
    attention_width: int
    context: int
    nbytes: int = 0

    @classmethod
    def from_config(cls, config: Mapping[str, Any], parameters: int, nbytes: int = 0) -> NetworkDimensions:
        """Return the sizes in ``config.json``. An unknown size is replaced by a large one."""

        def largest(*names: str) -> int:
            values = (part.get(name) for part in config_parts(config) for name in names)
            return max((value for value in values if isinstance(value, int)), default=0)

        hidden = largest("hidden_size", "n_embd", "d_model", "dim") or 16_384
        heads = largest("num_attention_heads", "n_head", "n_heads", "encoder_attention_heads")
        return cls(
            parameters=parameters,
            layers=largest("num_hidden_layers", "n_layer", "n_layers", "num_layers") or _UNKNOWN_LAYERS,
            attention_width=max(hidden, heads * largest("head_dim")),
            context=largest("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len") or _UNKNOWN_CONTEXT,
            nbytes=nbytes,
        )

    def flop(self, tokens: float, context: int | None = None) -> float:
        """Return the operations for reading ``tokens``, each with at most ``context`` tokens before it."""
        attention = 4.0 * self.layers * self.attention_width * (context or self.context)
        return tokens * (2.0 * self.parameters + attention)


def plan_parts(plan: MergePlan) -> tuple[ComputePart, ...]:
    """Return the computation of each document of a recipe, without models that read texts."""
    parts = []
    for document in (*plan.steps, plan):
        costs = document.method.costs or _UNMEASURED
        flop, passes = 0.0, 1
        for job in document.jobs:
            if job.mode != "merge":
                flop += _COPY * job.output.numel * len(job.inputs)
            else:
                task = job.task()
                folds = costs.folds(task)
                passes = max(passes, 1 + folds)
                elements = task.numel * len(job.inputs)
                flop += elements * _PER_UNIT * (costs.map + folds * costs.fold)
                flop += _NOISE * task.numel * any(values.get("noise") for values in job.per_input)
                flop += (1 + folds) * _adapter_products(job)
                flop += 2.0 * costs.products(task) if costs.products else 0.0
        recipe, parameters = document.recipe, float(document.parameters)
        models = 1 + len(recipe.sources)
        if recipe.distances is not None or document.method.traits.weights_by_distance:
            flop += 4.0 * models**2 * parameters
        if recipe.align_experts or recipe.experts_in_order:
            counts = (part.get(key) for part in config_parts(document.config) for key in _EXPERT_COUNTS)
            experts = max((count for count in counts if isinstance(count, int)), default=1)
            flop += 4.0 * models * experts * parameters
        read = float(passes * document.bytes_read + document.bytes_written)
        name = f"{recipe.merge_method}, {len(document.jobs):,} tensors"
        parts.append(ComputePart("merge", f"{recipe.name}: {name}" if recipe.name else name, flop, read))
    return tuple(parts)


_EXPERT_COUNTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")


def _adapter_products(job: TensorJob) -> float:
    """Return the operations for applying adapters to the inputs of ``job`` once."""
    flop = 0.0
    for item in job.inputs:
        ranks = [min(part.shape) for part in item.tensor.parts[1:] if len(part.shape) == 2]
        flop += (2.0 * max(ranks) + 8.0) * job.output.numel if ranks else 0.0
    return flop


def adapter_part(shapes: Iterable[tuple[int, int]], inputs: int, method: str) -> ComputePart:
    """Return the computation of combining ``inputs`` adapters whose changes have these shapes.

    The bound covers the products of the factors, the method, and one decomposition of each change.
    """
    flop, elements = 0.0, 0.0
    for rows, columns in shapes:
        shorter, size = min(rows, columns), float(rows) * columns
        flop += size * (inputs * (2.0 * shorter + _PER_UNIT * 40) + _DECOMPOSITION * shorter)
        elements += size
    return ComputePart("merge", f"{method} of {inputs} adapters", flop, 8.0 * (inputs + 2) * elements)


def calibration_part(
    name: str, network: NetworkDimensions, text_bytes: float, *, operations: float = 2.0, window: int | None = None
) -> ComputePart:
    """Return the computation of a model that reads a text of ``text_bytes`` bytes for the merge.

    A token is counted for every byte, and twice because windows overlap. Sums that do not fit into memory are measured
    in several runs, at most one per layer. ``operations`` is 2 per parameter for reading, and 6 with derivatives.
    """
    tokens = 2.0 * text_bytes
    flop = network.flop(tokens, window) * operations / 2.0
    # Products of the inputs of every matrix with themselves, at most as wide as the parameters of its rows.
    flop += tokens * 2.0 * network.parameters
    return ComputePart("merge", name, network.layers * flop, network.layers * float(network.nbytes))


def quantization_part(name: str, nbytes: float) -> ComputePart:
    """Return the computation of quantizing weights to ``nbytes`` bytes. A weight has at least one bit."""
    return ComputePart("merge", name, 8.0 * nbytes * _QUANTIZATION, 40.0 * nbytes)


def perplexity_part(model: str, network: NetworkDimensions, tokens: int, window: int | None) -> ComputePart:
    """Return the computation of a model that reads ``tokens`` of held-out text.

    Each token counts three times, because windows overlap and shorter documents of a batch are padded.
    """
    flop = network.flop(3.0 * tokens, window)
    return ComputePart("evaluation", f"held-out text: {model}", flop, float(network.nbytes), model)


def task_part(
    model: str, task: str, network: NetworkDimensions, documents: int, *, answers: int | None, max_length: int | None
) -> ComputePart:
    """Return the computation of a model that answers ``documents`` of a task.

    Each request counts as many tokens as the context of the model has. ``answers`` is the number of generated answers,
    including those that were generated again. None: the task compares given answers.
    """
    context = min(max_length or network.context, network.context) if network.context else max_length or 1
    requests = _REQUESTS * documents if answers is None else max(answers, documents)
    flop = network.flop(float(requests) * context, context)
    return ComputePart("evaluation", f"{task}: {model}", flop, float(network.nbytes), model)


def estimate_compute(parts: Sequence[ComputePart], device: str, notes: Sequence[str] = ()) -> ComputeEstimate:
    """Add up ``parts``. ``device`` is the kind of device: ``cpu`` or ``cuda``. ``notes`` are further assumptions."""
    evaluated = [part for part in parts if part.purpose == "evaluation"]
    rate = _PER_JOULE.get(device, _PER_JOULE["cpu"])
    joule = sum(part.flop / rate + part.nbytes * _JOULE_PER_BYTE + _JOULE_PER_START for part in parts)
    assumptions = [
        "All numbers are upper bounds that were computed from sizes. mergegate measured neither time nor energy.",
        f"Merge: {_PER_UNIT:g} operations per element, model and unit of the measured cost of the method, and the "
        "operations of all matrix products and decompositions.",
        "Models that read text: 2 operations per parameter and token, and 4 per layer, token, token of context and "
        "width of the attention. All experts of a mixture count.",
        f"Tasks: every request counts the whole context. A task that compares given answers counts {_REQUESTS} "
        "requests per document. Held-out text counts three times, because windows overlap and batches are padded.",
        f"Energy of the whole machine: 10^{math.log10(rate):g} operations per joule, {_JOULE_PER_BYTE * 1e6:g} kJ per "
        f"GB that is read or written, and {_JOULE_PER_START / 1000:g} kJ for each step of the merge, and for each "
        "model and task or text.",
        "Recipes and trials that were not released are not counted.",
        *notes,
    ]
    return ComputeEstimate(
        merge_flop=sum(part.flop for part in parts if part.purpose == "merge"),
        evaluation_flop=sum(part.flop for part in evaluated) if evaluated else None,
        energy_kwh=joule / _JOULE_PER_KWH,
        assumptions=tuple(assumptions),
        parts=tuple(parts),
    )
