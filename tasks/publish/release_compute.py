"""List the computation of a release: of its merge or quantization, and of the evaluation of all models.

The numbers come from the recipe, the headers of the weights, and the sizes of the samples (see ``compute``).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from mergegate.merge_core import Recipe, plan_merge
from mergegate.merge_core.checkpoint import read_header
from mergegate.merge_core.errors import InvalidInput
from mergegate.merge_core.parsing import read_json
from mergegate.tasks.checkpoints import PinnedCheckpoint, PinnedRecipe
from mergegate.tasks.evaluation import Scores
from mergegate.tasks.merge import MergeSummary, Numerics, pin_calibration_texts
from mergegate.tasks.publish.compute import (
    ComputeEstimate,
    ComputePart,
    NetworkDimensions,
    adapter_part,
    calibration_part,
    estimate_compute,
    perplexity_part,
    plan_parts,
    quantization_part,
    task_part,
)
from mergegate.tasks.publish.public_names import PublicNames
from mergegate.tasks.report import ReportContent
from mergegate.tasks.stage import store
from mergegate.tasks.store import Artifact
from mergegate.tasks.variants import CalibrationSettings, VariantVerdict

PROMPTS = "prompts of the recipe for the routers"  # end of the name of a part
SAFETENSORS, GGUF = ".safetensors", ".gguf"
_VARIANT_NOTES = (
    "The computation of the merge is in the sheet of its release.",
    "Quantization: 10,000 operations per weight. Each weight takes at least one bit.",
)
_RETRIEVAL_NOTE = (
    "Exception: a model reads all texts that a retrieval task ranks, which can be more than those requests, so the "
    "numbers of such tasks are not upper bounds."
)
_SPECIAL_TOKENS = 8  # tokens that a tokenizer adds to a prompt, at most


def merge_compute(
    content: ReportContent,
    pinned_recipe: PinnedRecipe,
    numerics: Numerics,
    merge: Artifact[MergeSummary],
    names: PublicNames,
) -> ComputeEstimate:
    """Return the estimate for a merge and for the evaluation of the models in its report.

    ``content`` has public names. The headers of all parents are read again, which takes seconds for large models.
    """
    public = {parent.ref: names.rename_text(parent.name) for parent in pinned_recipe.parents}
    sizes = {public[parent.ref]: _network_size(parent) for parent in pinned_recipe.parents}
    largest = max((size.parameters for size in sizes.values()), default=0)
    merge_size = merge.value.parameters + (largest if pinned_recipe.recipe.output else 0)
    config = merged_config(pinned_recipe, merge)
    own_size = NetworkDimensions.from_config(config, merge_size, merge.value.bytes_written)
    parts, notes = list[ComputePart](), list[str]()
    if pinned_recipe.recipe.output:
        shapes = _adapted_shapes(merge.directory / name for name in merge.files)
        inputs = sum(parent.adapter is not None for parent in pinned_recipe.parents)
        parts.append(adapter_part(shapes, inputs, pinned_recipe.recipe.merge_method))
    else:
        try:
            plan = plan_merge(pinned_recipe.recipe, {parent.ref: parent.open() for parent in pinned_recipe.parents})
            parts += plan_parts(plan)
        except InvalidInput:
            # The bound of a method on whole matrices, if the parents cannot be read any more.
            side = 4 * own_size.attention_width
            shape, count = (merge_size // side + 1, side), len(pinned_recipe.parents)
            bound = adapter_part([shape], count, pinned_recipe.recipe.merge_method)
            parts.append(replace(bound, name=pinned_recipe.recipe.merge_method))
            notes.append("The parents could not be read again, so the bound is that of a method on whole matrices.")
    for document in (*pinned_recipe.recipe.steps, pinned_recipe.recipe):
        parts += (reading := tuple(_calibration(document, public, sizes, own_size)))
        if reading:
            notes.append("Texts that models read for the merge: two tokens per byte, once for each layer.")
    for model in content.models:
        size = own_size if model.role == "merge" else sizes.get(model.name, own_size)
        if model.likelihoods:
            window = model.likelihoods.window or (content.windows.max_length if content.windows else None)
            parts.append(perplexity_part(model.name, size, model.likelihoods.tokens, window))
        if model.scores:
            parts += _task_evaluation(model.name, model.scores, size, content)
    return estimate_compute(parts, numerics.device, [*notes, *_retrieval_notes(content)])


def variant_compute(
    content: ReportContent,
    verdicts: Sequence[VariantVerdict],
    size: NetworkDimensions,
    calibration: CalibrationSettings | None,
) -> ComputeEstimate:
    """Return the estimate for quantized variants and for the evaluation of each of them and of their merge.

    ``size`` is that of the merge. ``calibration`` describes the text that the quantizer reads.
    """
    parts: list[ComputePart] = []
    for verdict in verdicts:
        nbytes = float(verdict.record.bytes) if verdict.record else 0.0
        parts.append(quantization_part(f"quantization to {verdict.type}", nbytes))
        if verdict.record and verdict.record.calibration and calibration:
            tokens = calibration.samples * calibration.max_length
            parts.append(calibration_part(f"calibration text: {verdict.type}", size, tokens / 2.0))
            # GPTQ updates all columns of a row for each column.
            parts.append(ComputePart("merge", f"GPTQ: {verdict.type}", 8.0 * nbytes * 8.0 * size.attention_width))
        for model in (verdict.type, "merge"):
            parts += _variant_evaluation(verdict, model, size, content)
    return estimate_compute(parts, "cpu", [*_VARIANT_NOTES, *_retrieval_notes(content)])


def _retrieval_notes(content: ReportContent) -> Sequence[str]:
    return [_RETRIEVAL_NOTE] if "retrieval" in content.kind.task_forms else []


def _task_evaluation(
    model: str, scores: Scores, size: NetworkDimensions, content: ReportContent
) -> Iterator[ComputePart]:
    documents: dict[str, int] = {}
    for score in scores.tasks:
        documents[score.task] = max(score.n, documents.get(score.task, 0))
    max_length = content.scoring.max_length if content.scoring else None
    for task, count in documents.items():
        ends = scores.ends.get(task)
        answers = ends.answers + ends.regenerated if ends and ends.answers else None
        yield task_part(model, task, size, count, answers=answers, max_length=max_length)


def _variant_evaluation(
    verdict: VariantVerdict, model: str, size: NetworkDimensions, content: ReportContent
) -> Iterator[ComputePart]:
    if (gate := verdict.gate) is None:
        return
    name = f"{model} for {verdict.type}" if model != verdict.type else model
    max_length = content.scoring.max_length if content.scoring else None
    for task in dict.fromkeys(guard.task for guard in gate.all_guards):
        documents = max(guard.n for guard in gate.all_guards if guard.task == task)
        yield task_part(name, task, size, documents, answers=None, max_length=max_length)
    if gate.drift:
        tokens = gate.drift.documents * size.context
        yield perplexity_part(name, size, tokens, content.windows.max_length if content.windows else None)


def _calibration(
    document: Recipe, names: Mapping[str, str], sizes: Mapping[str, NetworkDimensions], merge_size: NetworkDimensions
) -> Iterator[ComputePart]:
    """Yield the computation of the models that read the calibration texts of one recipe document.

    ``names`` holds the public name of each parent by its reference.
    """
    if (mixture := document.mixture) is not None and mixture.gate_mode.startswith("hidden"):
        prompts = [
            prompt for expert in (*mixture.experts, *mixture.shared) for prompt in (*expert.positive, *expert.negative)
        ]
        tokens = sum(len(prompt.encode()) + _SPECIAL_TOKENS for prompt in prompts)
        network = sizes.get(names.get(str(document.base), ""), merge_size)
        flop = network.flop(tokens)
        yield ComputePart("merge", f"{len(prompts)} {PROMPTS}", flop, float(network.nbytes))
    if not document.reads_texts or not document.texts:
        return
    importance = document.method.traits.reads_text == "importance"
    for ref, text in pin_calibration_texts(document, store().hashes):
        size = text.path.stat().st_size
        if document.needs_statistics:
            network = sizes.get(names[ref], merge_size)
            yield calibration_part(
                f"calibration text: {names[ref]}",
                network,
                size,
                operations=6.0 if importance else 2.0,
                window=document.reading.max_length,
            )
        if document.router_repair is not None:
            yield calibration_part(
                f"router repair: text of {names[ref]}", merge_size, size, window=document.reading.max_length
            )


def _network_size(parent: PinnedCheckpoint) -> NetworkDimensions:
    """Return the sizes of a parent with its adapter, or an upper bound from the size of its files."""
    config = readable_config(parent.directory)
    try:
        checkpoint = parent.open()
        numbers = sum(tensor.numel for tensor in checkpoint.tensors.values())
        return NetworkDimensions.from_config(config, numbers, checkpoint.nbytes)
    except InvalidInput:
        files = [file for file in parent.directory.glob("*.*") if file.suffix in (SAFETENSORS, ".bin", GGUF)]
        size = sum(file.stat().st_size for file in files if file.is_file())
        return NetworkDimensions.from_config(config, 2 * size, size)


def merged_config(pinned_recipe: PinnedRecipe, merge: Artifact[MergeSummary]) -> dict[str, Any]:
    """Return the configuration of the merged model. That of an adapter includes the one of its base model."""
    config = readable_config(merge.directory)
    if pinned_recipe.recipe.output:
        config |= readable_config(next(parent for parent in pinned_recipe.parents if parent.adapter).directory)
    return config


def readable_config(directory: Path) -> dict[str, Any]:
    """Return the configurations of a model and of an adapter, or an empty mapping if they cannot be read."""
    config: dict[str, Any] = {}
    for name in ("adapter_config.json", "config.json"):
        with suppress(InvalidInput):
            config |= read_json(directory / name)
    return config


def _adapted_shapes(files: Iterable[Path]) -> Iterator[tuple[int, int]]:
    """Yield the shape of each change in an adapter: rows of ``lora_B`` and columns of ``lora_A``."""
    sides: dict[str, dict[str, tuple[int, ...]]] = {}
    for file in files:
        if file.suffix != SAFETENSORS:
            continue
        with suppress(InvalidInput):
            for tensor in read_header(file):
                if match := re.match(r"(.+)\.lora_(?:embedding_)?([AB])(?:\.weight)?$", tensor.name):
                    sides.setdefault(match[1], {})[match[2]] = tensor.shape
    for pair in sides.values():
        if {"A", "B"} <= pair.keys():
            yield max(pair["B"]), max(pair["A"])
