"""Read calibration texts: pin them, split them into windows of tokens, and divide the layers of a model into runs.

The statistics of all layers of a large model need more memory than the model. A stage therefore reads the text in
several runs. Each run measures as many layers as fit into memory. It is written to a file and recorded in a journal, so
a killed stage resumes after it.

The cost is estimated from the plan, the text sizes and measured rates. For input moments, the estimate includes, for
each position, the product with all weights and the float64 product of each distinct input with itself. An expert only
counts for the positions that are routed to it. Each run stops at its last layer. For the importance of elements, which
needs derivatives, each run computes the complete forward and backward pass.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, Self, TypeVar

from mergegate.merge_core import MergePlan, Recipe
from mergegate.merge_core.architecture import TensorKind, input_width, is_projection, is_routed_expert, tensor_kind
from mergegate.merge_core.architecture.experts import find_routers
from mergegate.merge_core.checkpoint import Checkpoint, config_parts, measurement_file_name, write_measurement
from mergegate.merge_core.engine.forecast import Rates
from mergegate.merge_core.errors import InvalidInput
from mergegate.merge_core.files import HashMemo, JournalLocation, keep_only_journal, open_journal, sha256_file
from mergegate.merge_core.parsing import open_buffered
from mergegate.merge_core.recipe import CalibrationReading, expand_user_path
from mergegate.merge_core.system import system_memory
from mergegate.tasks.base.stage import advance
from mergegate.tasks.models.checkpoints import (
    LoadedModel,
    Model,
    TellProgress,
    call_model_process,
    files_fingerprint,
    writable_directory,
)
from mergegate.tasks.quality.perplexity import ChatMessage, HeldOutText, OwnDocument, TextSetting, encode_text, pin_text

if TYPE_CHECKING:
    import torch

_Summary = TypeVar("_Summary")

# Memory for the sums: a share of the memory that is available when the model is loaded, but at least this many bytes.
_SHARE, _LEAST = 0.5, 256 << 20


@dataclass(frozen=True)
class CalibrationJob:
    """A model with its calibration text, and the directory for the measured statistics."""

    model: Model
    text: HeldOutText
    reading: CalibrationReading
    dtype: str  # Number format for running the model, or ``auto`` for the format of its checkpoint.
    device: str
    out: Path  # Directory of the artifact.
    journal: JournalLocation  # Journal of finished runs.


def run_in_model_process(read: Callable[..., _Summary], job: CalibrationJob, *arguments: object, noun: str) -> _Summary:
    """Return ``read(job, *arguments, on_progress)``, computed in the model process.

    The journal is only reused while the model's files are the same. ``noun`` names the result in messages.
    """
    keep_only_journal(job.out)
    journal = JournalLocation(job.journal.path, job.journal.key + files_fingerprint([job.model]))
    with writable_directory(job.out) as out:
        return call_model_process(
            read,
            (replace(job, journal=journal, out=out), *arguments),
            location=f"{noun} of {job.model.name}",
            models=[job.model],
            on_progress=lambda done, total: advance(done, total, "texts"),
        )


def pin_calibration_texts(recipe: Recipe, hashes: HashMemo) -> Iterator[tuple[str, HeldOutText]]:
    """Yield the reference of each model in one recipe document that has a calibration text, with the pinned text.

    A relative path is searched in the recipe's directory first, then in the working directory.
    """
    for ref, text_path in recipe.texts.items():
        file = expand_user_path(text_path)
        candidates = [directory / file for directory in (recipe.directory, Path.cwd()) if directory is not None]
        path = next((candidate for candidate in candidates if candidate.is_file()), candidates[0]).absolute()
        location, setting = f"{recipe.location}: text of {ref}: {text_path}", "statistics.field"
        field = recipe.reading.field
        pinned = pin_text(path, field, hashes, TextSetting(location, setting, "recipe"), conversations=True)
        yield str(ref), pinned


class MeasurablePart(Protocol):
    """Part of a network whose statistics are measured together."""

    @property
    def names(self) -> Iterable[str]:
        """Names of the stored tensors that belong to the part."""

    @property
    def sum_bytes(self) -> int:
        """Memory for the part's sums, in bytes."""


class PassIsObserved(Exception):
    """Signal that everything needed from a forward pass was observed, so the rest of the network can be skipped."""


class RunSums(Protocol):
    """Sums over all windows for the parts of one run. Inside the context, the network adds to them."""

    def __enter__(self) -> Self: ...

    def __exit__(self, *_: object) -> None: ...

    def read(self, window: ReadWindow, number: int) -> None:
        """Let the network read a window. ``number`` counts the windows of the text from 0."""

    def means(self, positions: int) -> tuple[Mapping[str, torch.Tensor], Mapping[str, str]]:
        """Return the means to store, by name, and the name of the means of each stored tensor (its owner)."""


_Part = TypeVar("_Part", bound=MeasurablePart)


class ReadWindow(NamedTuple):
    """One window of tokens. Its first tokens may be context that an earlier window already contained."""

    tokens: list[int]  # All tokens of the window. The last ``len(own)`` of them are new.
    # For each new token, whether the next token is part of the model's own answer. Always true in plain text.
    own: list[bool]

    @property
    def new_count(self) -> int:
        """Number of tokens that no earlier window contained."""
        return len(self.own)


class CalibrationWindows(NamedTuple):
    """A text in windows."""

    documents: int  # Number of documents.
    windows: Sequence[ReadWindow]  # Windows of all documents.
    positions: int  # Number of positions over which means are taken: all new ones, or those of the model's own answers.


def split_into_windows(
    loaded_model: LoadedModel, model: Model, documents: Sequence[OwnDocument], max_length: int
) -> Iterator[ReadWindow]:
    """Yield windows in which each token of each document is new exactly once.

    A window has at most ``max_length`` tokens and fits into the model's context length. A window that would be short
    starts with earlier tokens of its document as context. Texts are encoded as in regular use, so that the statistics
    match it: a plain document starts with the special tokens of the tokenizer, and a conversation is rendered with the
    chat template of the model.
    """
    length = min(max_length, loaded_model.context or max_length)
    for document in documents:
        if isinstance(document, str):
            tokens = encode_text(loaded_model, model, document, with_specials=True)
            own = [True] * len(tokens)
        else:
            tokens, own = _encode_conversation(loaded_model, model, document)
        for start in range(0, len(tokens), length):
            end = min(start + length, len(tokens))
            yield ReadWindow(tokens[max(0, end - length) : end], own[start:end])


def _encode_conversation(
    loaded_model: LoadedModel, model: Model, messages: Sequence[ChatMessage]
) -> tuple[list[int], list[bool]]:
    """Return the tokens of a rendered conversation and, for each, whether the model writes the next token."""

    def render(conversation: Sequence[ChatMessage], *, add_prompt: bool = False) -> str:
        plain = [message._asdict() for message in conversation]
        text: str = loaded_model.tokenizer.apply_chat_template(plain, tokenize=False, add_generation_prompt=add_prompt)
        return text

    location = f"{model.name} ({model.directory}): chat template"
    if not loaded_model.tokenizer.chat_template:
        raise InvalidInput(
            location,
            found="missing",
            expected="a chat template, because the text has conversations",
            remedy="use a text with plain documents",
        )
    try:
        full_text = render(messages)
        spans = []
        for index, message in enumerate(messages):
            if message.role != "assistant":
                continue
            before, after = render(messages[:index], add_prompt=True), render(messages[: index + 1])
            # A template can render a message differently if others follow. Such a message does not count as own.
            if full_text.startswith(before) and full_text.startswith(after.rstrip()):
                spans.append((before, after))
    except Exception as error:  # A template is untrusted code and can raise anything.
        first = str(error).partition("\n")[0]
        raise InvalidInput(
            location, found=f"{type(error).__name__}: {first:.100}", expected="a template that accepts the conversation"
        ) from None

    def size(text: str) -> int:
        return len(encode_text(loaded_model, model, text, with_specials=False))

    tokens = encode_text(loaded_model, model, full_text, with_specials=False)
    own = [False] * len(tokens)
    for before, after in spans:
        for index in range(max(size(before) - 1, 0), min(size(after) - 1, len(tokens))):
            own[index] = True
    return tokens, own


def measure_in_runs(
    job: CalibrationJob,
    index: str,
    text: CalibrationWindows,
    parts: Sequence[_Part],
    observe: Callable[[Sequence[_Part]], RunSums],
    on_progress: TellProgress,
) -> dict[str, str]:
    """Measure the parts of a network, in network order, in runs whose sums fit into memory.

    Finished runs are not repeated. Each run writes a safetensors file. ``index`` is the name of the JSON file for all
    of them, ``INPUTS`` or ``IMPORTANCE``. ``observe`` returns the sums for the parts of a run.

    Returns:
        Owners: for each stored tensor, the name under which the files hold its statistics. Tensors can share them.
    """
    from safetensors.torch import save_file

    with open_journal(job.journal, _is_finished_run) as journal:
        # A run whose file is missing or has changed is repeated, like all later ones. Other files are deleted.
        finished_runs: list[Mapping[str, Any]] = []
        for record in journal.records:
            path = job.out / measurement_file_name(index, len(finished_runs))
            if record["file"] != path.name or not path.is_file() or sha256_file(path) != record["sha256"]:
                break
            finished_runs.append(record)
        expected_files = {record["file"] for record in finished_runs}
        for path in job.out.glob("*.safetensors"):
            if path.name not in expected_files:
                path.unlink()

        owners = {name: owner for record in finished_runs for name, owner in record["owner"].items()}
        memory = system_memory()
        capacity = max(_LEAST, int(_SHARE * memory.available)) if memory else _LEAST
        runs: list[list[_Part]] = []
        used_bytes = 0
        for part in parts:
            if set(part.names) <= owners.keys():
                continue
            if not runs or used_bytes + part.sum_bytes > capacity:
                runs.append([])
                used_bytes = 0
            runs[-1].append(part)
            used_bytes += part.sum_bytes
        windows_read, total = 0, len(text.windows) * max(len(runs), 1)
        for run_number, run in enumerate(runs, start=len(finished_runs)):
            path = job.out / measurement_file_name(index, run_number)
            with observe(run) as sums:
                for number, window in enumerate(text.windows):
                    sums.read(window, number)
                    on_progress(windows_read := windows_read + 1, total)
            means, new_owners = sums.means(text.positions)
            save_file(dict(means), path)
            journal.append({"file": path.name, "sha256": sha256_file(path), "owner": dict(new_owners)})
            owners |= new_owners
    if not owners:
        raise InvalidInput(
            f"{job.model.name} ({job.model.directory})",
            found="no tensor that contributes to the output for its text",
            expected="a transformer whose layers have known names",
            remedy="merge it with a method that needs no calibration text",
        )
    write_measurement(job.out / index, owners, text.positions)
    return owners


def _is_finished_run(record: object) -> bool:
    match record:
        case {"file": str(), "sha256": str(), "owner": dict()}:
            return True
    return False


def require_numbers(total: torch.Tensor, name: str, model: Model) -> None:
    """Raise InvalidInput if ``total``, which belongs to the tensor ``name``, contains NaN or infinity."""
    import torch

    if not torch.isfinite(total).all():
        raise InvalidInput(
            f"{model.name}: {name}",
            found="NaN or infinity for its own text",
            expected="finite numbers",
            remedy="check whether the model is damaged, or compute it in a wider format",
        )


def unmeasured_experts(checkpoint: Checkpoint, owners: Mapping[str, str]) -> tuple[str, ...]:
    """Return name patterns for the expert matrices of a checkpoint without statistics in ``owners``.

    A pattern is a tensor name in which ``*`` replaces the layer and expert numbers. Patterns are sorted and distinct.
    """
    patterns = set()
    for name, tensor in checkpoint.tensors.items():
        if name not in owners and len(tensor.shape) == 2 and is_routed_expert(name) and is_projection(name):
            words = name.split(".")
            patterns.add(".".join("*" if word.isdecimal() else word for word in words))
    return tuple(sorted(patterns))


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
    """Estimated cost of measuring the statistics of all models in a recipe."""

    texts: int
    positions: float  # Estimated number of tokens in all texts.
    inputs: int  # Number of distinct inputs of one model, or of measured tensors if ``backwards`` is set.
    nbytes: int  # Bytes on disk for all models.
    sums: int  # Bytes of the sums for one model. Sums that do not fit into memory are measured in several runs.
    operations: float  # Floating-point operations for reading each text once.
    backwards: bool = False  # Whether derivatives are needed.

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
    """Return the cost of the statistics that the recipe of ``plan`` needs, or None if it needs no statistics."""
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
    """Estimated cost of a router repair."""

    texts: int
    positions: float  # Estimated number of tokens in all texts.
    layers: int  # Number of layers with a router.
    states: float  # Bytes of memory for the states of one layer, in float32.
    operations: float  # Floating-point operations of one complete pass over the texts.

    def seconds(self, rates: Rates) -> float | None:
        """Return the estimated time in seconds, or None if the machine's rate of matrix products was not measured."""
        passes = (self.layers + 1) / 2  # each pass stops at its layer
        return passes * self.operations / (_REACHED * rates.products) if rates.products else None

    def summary(self) -> str:
        """Return a one-line summary, such as ``2 texts · about 3,000 positions · 16 routers``."""
        return f"{self.texts} texts · about {self.positions:,.0f} positions · {self.layers} routers"


def router_needs(plan: MergePlan, hashes: HashMemo) -> RouterNeeds | None:
    """Return the cost of the router repair that the recipe of ``plan`` needs, or None if it repairs no routers."""
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
