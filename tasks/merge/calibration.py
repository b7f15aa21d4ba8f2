"""Split a calibration text into windows of tokens, and the layers of a model into runs.

The statistics of all layers of a large model need more memory than the model. A stage therefore reads the text in
several runs, each of which measures as many layers as fit into memory. It writes each finished run to a file and
records it in a journal, so a killed stage resumes after it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeVar

from mergegate.merge_core.architecture import is_projection, is_routed_expert
from mergegate.merge_core.checkpoint import Checkpoint
from mergegate.merge_core.errors import InvalidInput
from mergegate.merge_core.files import JournalLocation, open_journal, sha256_file
from mergegate.merge_core.recipe import CalibrationReading
from mergegate.merge_core.system import system_memory
from mergegate.tasks.checkpoints import LoadedModel, Model, TellProgress
from mergegate.tasks.perplexity import ChatMessage, HeldOutText, OwnDocument, encode_text

if TYPE_CHECKING:
    import torch

# Memory for the sums: a share of the memory that is available when the model is loaded, but at least this many bytes.
_SHARE, _LEAST = 0.5, 256 << 20


@dataclass(frozen=True)
class CalibrationJob:
    """A model with its calibration text, and the directory for the measured statistics.

    Args:
        model: Model that reads the text.
        text: Calibration text of the model.
        reading: Number of documents, window length and the width above which only the diagonal is stored.
        dtype: Number format for running the model, or ``auto`` for the format of its checkpoint.
        device: Device that runs the model.
        out: Directory of the artifact.
        journal: Location and key of the journal of finished runs.
    """

    model: Model
    text: HeldOutText
    reading: CalibrationReading
    dtype: str
    device: str
    out: Path
    journal: JournalLocation


class MeasurablePart(Protocol):
    """Part of a network whose statistics are measured together."""

    @property
    def names(self) -> Iterable[str]:
        """Names of the stored tensors that belong to the part."""

    @property
    def sum_bytes(self) -> int:
        """Memory for the part's sums, in bytes."""


_Part = TypeVar("_Part", bound=MeasurablePart)


class ReadWindow(NamedTuple):
    """One window of tokens. Its first tokens may be context that an earlier window already contained.

    Args:
        tokens: All tokens of the window. The last ``len(own)`` of them are new.
        own: For each new token, whether the next token is part of the model's own answer. Always true in plain text.
    """

    tokens: list[int]
    own: list[bool]

    @property
    def new_count(self) -> int:
        """Number of tokens that no earlier window contained."""
        return len(self.own)


def split_into_windows(
    loaded_model: LoadedModel, model: Model, documents: Sequence[OwnDocument], max_length: int
) -> Iterator[ReadWindow]:
    """Yield windows in which each token of each document is new exactly once.

    A window has at most ``max_length`` tokens and fits into the model's context length. A window that would be short
    starts with earlier tokens of its document as context. Texts are encoded as in regular use, so that the statistics
    match it: a plain document starts with the special tokens of the tokenizer, and a conversation is rendered with the
    chat template of the model.

    Raises:
        InvalidInput: The tokenizer does not belong to the weights, or a conversation does not fit the template.
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
    parts: Sequence[_Part],
    windows: int,
    file_name: Callable[[int], str],
    measure: Callable[[Sequence[_Part], Path, Callable[[int], None]], Mapping[str, str]],
    on_progress: TellProgress,
) -> dict[str, str]:
    """Measure the parts of a network in runs whose sums fit into memory. Finished runs are not repeated.

    Args:
        job: Directory of the artifact, and journal of the finished runs.
        parts: Parts in network order.
        windows: Number of windows that each run reads.
        file_name: Function that returns the file name for the run with a given number.
        measure: Function that measures the parts of a run, writes the run's file, and calls its last argument with the
            number of windows read. It returns the owners for the run.
        on_progress: Callback that receives the number of windows read and their total number.

    Returns:
        Owners: for each stored tensor, the name under which the files hold its statistics. Tensors can share them.

    Raises:
        InvalidInput: The text reached no part.
    """
    with open_journal(job.journal, _is_finished_run) as journal:
        # A run whose file is missing or has changed is repeated, like all later ones. Other files are deleted.
        finished_runs: list[Mapping[str, Any]] = []
        for record in journal.records:
            path = job.out / file_name(len(finished_runs))
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
        total = windows * max(len(runs), 1)
        for number, run in enumerate(runs):
            path, before = job.out / file_name(len(finished_runs) + number), number * windows
            new_owners = measure(run, path, lambda count, before=before: on_progress(before + count, total))  # type: ignore[misc]
            journal.append({"file": path.name, "sha256": sha256_file(path), "owner": dict(new_owners)})
            owners |= new_owners
    if not owners:
        raise InvalidInput(
            f"{job.model.name} ({job.model.directory})",
            found="no tensor that contributes to the output for its text",
            expected="a transformer whose layers have known names",
            remedy="merge it with a method that needs no calibration text",
        )
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
