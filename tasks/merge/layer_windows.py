"""Split a calibration text into windows of tokens and the layers of a model into runs.

The statistics of all layers of a large model need more memory than the model. Therefore a stage measures as many layers
as fit into memory in one run and reads the text once per run. Each finished run is written to a file and recorded in a
journal, so a killed stage resumes after it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from mergegate.merge_core.architecture import is_projection, is_routed_expert
from mergegate.merge_core.checkpoint import Checkpoint
from mergegate.merge_core.errors import InvalidInput
from mergegate.merge_core.files import sha256_file
from mergegate.merge_core.system import system_memory
from mergegate.tasks.checkpoints import LoadedModel, Model
from mergegate.tasks.perplexity import ChatMessage, OwnDocument, encode_text

if TYPE_CHECKING:
    import torch

# Memory for the sums: a share of the memory that is available when the model is loaded, but at least this many bytes.
_SHARE, _LEAST = 0.5, 256 << 20
_T = TypeVar("_T")


class ReadWindow(NamedTuple):
    """One window of tokens. Its first tokens may be context that an earlier window already contained.

    Args:
        tokens: All tokens of the window. The last ``len(own)`` of them are new.
        own: For each new token, whether the next token is part of the model's own answer. Always true in plain text.
    """

    tokens: list[int]
    own: list[bool]

    @property
    def new(self) -> int:
        """Number of tokens that no earlier window contained."""
        return len(self.own)


def windows_of(
    loaded: LoadedModel, model: Model, documents: Sequence[OwnDocument], max_length: int
) -> Iterator[ReadWindow]:
    """Yield windows that contain each token of each document exactly once as a new token.

    A window that would be short starts with earlier tokens of its document as context. Texts are encoded as in regular
    use, so that the statistics match it. A plain document starts with the special tokens of the tokenizer, and a
    conversation is rendered with the chat template of the model.

    Args:
        loaded: Model with its tokenizer.
        model: Pinned model, for error messages.
        documents: Plain documents or conversations.
        max_length: Largest number of tokens in a window. The context length of the model limits it further.

    Raises:
        InvalidInput: If the tokenizer does not belong to the weights, or a conversation does not fit the template.
    """
    length = min(max_length, loaded.context or max_length)
    for document in documents:
        if isinstance(document, str):
            tokens = encode_text(loaded, model, document, with_specials=True)
            own = [True] * len(tokens)
        else:
            tokens, own = _in_template(loaded, model, document)
        for start in range(0, len(tokens), length):
            end = min(start + length, len(tokens))
            yield ReadWindow(tokens[max(0, end - length) : end], own[start:end])


def _in_template(loaded: LoadedModel, model: Model, messages: Sequence[ChatMessage]) -> tuple[list[int], list[bool]]:
    """Return the tokens of a rendered conversation and, for each, whether the model writes the next token."""

    def render(conversation: Sequence[ChatMessage], *, add_prompt: bool = False) -> str:
        plain = [message._asdict() for message in conversation]
        text: str = loaded.tokenizer.apply_chat_template(plain, tokenize=False, add_generation_prompt=add_prompt)
        return text

    location = f"{model.name} ({model.directory}): chat template"
    if not loaded.tokenizer.chat_template:
        raise InvalidInput(
            location,
            found="none",
            expected="one, for texts that are conversations",
            remedy="name texts of plain documents",
        )
    try:
        full_text = render(messages)
        spans = []
        for index, message in enumerate(messages):
            if message.role != "assistant":
                continue
            before, after = render(messages[:index], add_prompt=True), render(messages[: index + 1])
            # A template can change a message when later ones follow. The model's own tokens then exclude the message.
            if full_text.startswith(before) and full_text.startswith(after.rstrip()):
                spans.append((before, after))
    except Exception as error:  # A template is untrusted code and can raise anything.
        first = str(error).partition("\n")[0]
        raise InvalidInput(
            location, found=f"{type(error).__name__}: {first:.100}", expected="one that takes it"
        ) from None

    def size(text: str) -> int:
        return len(encode_text(loaded, model, text, with_specials=False))

    tokens = encode_text(loaded, model, full_text, with_specials=False)
    own = [False] * len(tokens)
    for before, after in spans:
        for index in range(max(size(before) - 1, 0), min(size(after) - 1, len(tokens))):
            own[index] = True
    return tokens, own


def in_runs(parts: Iterable[_T], size_of: Callable[[_T], int]) -> list[list[_T]]:
    """Split the parts of a network into runs whose sums fit into memory together, with at least one part per run.

    Args:
        parts: Parts in network order.
        size_of: Function that returns the size of the sums of a part, in bytes.
    """
    memory = system_memory()
    capacity = max(_LEAST, int(_SHARE * memory.available)) if memory else _LEAST
    runs: list[list[_T]] = []
    used = 0
    for part in parts:
        size = size_of(part)
        if not runs or used + size > capacity:
            runs.append([])
            used = 0
        runs[-1].append(part)
        used += size
    return runs


def is_entry_of_run(record: object) -> bool:
    """Return whether a journal record describes a finished run, see :func:`entry_of_run`."""
    match record:
        case {"file": str(), "sha256": str(), "owner": dict()}:
            return True
    return False


def entry_of_run(path: Path, owner: Mapping[str, str]) -> dict[str, Any]:
    """Return the journal record of a finished run.

    Args:
        path: File with the tensors of the run.
        owner: Name of the tensor in the file that holds the statistics of each matrix or parameter, by its name.
    """
    return {"file": path.name, "sha256": sha256_file(path), "owner": dict(owner)}


def kept_runs(
    records: Iterable[Mapping[str, Any]], out: Path, file_of: Callable[[int], str]
) -> list[Mapping[str, Any]]:
    """Return the records of the finished runs that a restarted stage can keep.

    These are all records before the first one whose file is missing or has changed. All other safetensors files in
    ``out`` are deleted.

    Args:
        records: Records of the journal.
        out: Directory of the artifact.
        file_of: Function that returns the file name for the number of a run.
    """
    done: list[Mapping[str, Any]] = []
    for record in records:
        path = out / file_of(len(done))
        if record["file"] != path.name or not path.is_file() or sha256_file(path) != record["sha256"]:
            break
        done.append(record)
    expected = {record["file"] for record in done}
    for path in out.glob("*.safetensors"):
        if path.name not in expected:
            path.unlink()
    return done


def require_numbers(total: torch.Tensor, name: str, model: Model) -> None:
    """Raise InvalidInput if ``total`` contains NaN or infinity."""
    import torch

    if not torch.isfinite(total).all():
        raise InvalidInput(
            f"{model.name}: {name}",
            found="numbers that are not finite, of its own text",
            expected="numbers",
            remedy="the model is damaged, or computed in a format that is too narrow for it",
        )


def unseen_experts(stored: Checkpoint, owner: Mapping[str, str]) -> tuple[str, ...]:
    """Return name patterns of the expert matrices that no statistics were measured for.

    Args:
        stored: Checkpoint with the weights of the model.
        owner: Measured matrices: name of the tensor that holds the statistics, by name of the matrix.

    Returns:
        Sorted, distinct patterns. Each is a tensor name in which ``*`` replaces the layer and expert numbers.
    """
    patterns = set()
    for name, tensor in stored.tensors.items():
        if name not in owner and len(tensor.shape) == 2 and is_routed_expert(name) and is_projection(name):
            words = name.split(".")
            patterns.add(".".join("*" if word.isdecimal() else word for word in words))
    return tuple(sorted(patterns))
