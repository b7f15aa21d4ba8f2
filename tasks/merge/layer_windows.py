"""How a model reads a text for a merge: in windows of tokens, and in runs of layers, each of which is kept when done.

What is measured of all layers of a large model needs more memory than the model. So as many layers as fit are measured
at a time, the text is read once for each run of them, and what a run gave is written and stands in a journal: a stage
that is killed goes on behind it.
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

# Of the memory that is available once the model is loaded, what sums may take; and what they always may.
_SHARE, _LEAST = 0.5, 256 << 20
_T = TypeVar("_T")


class ReadWindow(NamedTuple):
    """Tokens that are read at once; the last of them, as many as ``own``, were in no window before.

    Args:
        own: Of each of those, whether what comes next is the model's to say.
    """

    tokens: list[int]
    own: list[bool]

    @property
    def new(self) -> int:
        """How many of the tokens were in no window before."""
        return len(self.own)


def windows_of(loaded: LoadedModel, model: Model, documents: Sequence[OwnDocument], most: int) -> Iterator[ReadWindow]:
    """Every token of every document in one window; one that would be short begins with context from before. A text
    begins as its model's tokenizer begins it for whoever asks, and a conversation is in the form of its model's
    template: what is measured is what will flow.

    Raises:
        InvalidInput: when the tokenizer does not belong to the weights, or a conversation does not fit its template.
    """
    length = min(most, loaded.context or most)
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
    """A conversation in the form of the model's template; of each token, whether the next one is its own to say."""

    def rendered(said: Sequence[ChatMessage], *, asked: bool = False) -> str:
        plain = [message._asdict() for message in said]
        text: str = loaded.tokenizer.apply_chat_template(plain, tokenize=False, add_generation_prompt=asked)
        return text

    where = f"{model.name} ({model.directory}): chat template"
    if not loaded.tokenizer.chat_template:
        raise InvalidInput(
            where,
            found="none",
            expected="one, for texts that are conversations",
            remedy="name texts of plain documents",
        )
    try:
        whole = rendered(messages)
        spans = []
        for at, message in enumerate(messages):
            if message.role != "assistant":
                continue
            before, after = rendered(messages[:at], asked=True), rendered(messages[: at + 1])
            if whole.startswith(before) and whole.startswith(after.rstrip()):  # else the template changed it later
                spans.append((before, after))
    except Exception as error:  # templates are programs of strangers
        first = str(error).partition("\n")[0]
        raise InvalidInput(where, found=f"{type(error).__name__}: {first:.100}", expected="one that takes it") from None

    def size(text: str) -> int:
        return len(encode_text(loaded, model, text, with_specials=False))

    tokens = encode_text(loaded, model, whole, with_specials=False)
    own = [False] * len(tokens)
    for before, after in spans:
        for at in range(max(size(before) - 1, 0), min(size(after) - 1, len(tokens))):
            own[at] = True
    return tokens, own


def in_runs(parts: Iterable[_T], size_of: Callable[[_T], int]) -> list[list[_T]]:
    """Parts of a network whose sums, of so many bytes, fit into memory together; at least one at a time."""
    memory = system_memory()
    room = max(_LEAST, int(_SHARE * memory.available)) if memory else _LEAST
    runs: list[list[_T]] = []
    taken = 0
    for part in parts:
        size = size_of(part)
        if not runs or taken + size > room:
            runs.append([])
            taken = 0
        runs[-1].append(part)
        taken += size
    return runs


def is_entry_of_run(record: object) -> bool:
    """Whether a record of a journal is one of a run: its file, and by which tensor there each of its own is kept."""
    match record:
        case {"file": str(), "sha256": str(), "owner": dict()}:
            return True
    return False


def entry_of_run(path: Path, owner: Mapping[str, str]) -> dict[str, Any]:
    """What a journal keeps of a run."""
    return {"file": path.name, "sha256": sha256_file(path), "owner": dict(owner)}


def kept_runs(
    records: Iterable[Mapping[str, Any]], out: Path, file_of: Callable[[int], str]
) -> list[Mapping[str, Any]]:
    """What a killed stage has done, as far as it lies there as it was written; nothing else lies there."""
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


def require_numbers(total: torch.Tensor, what: str, model: Model) -> None:
    """Raise InvalidInput unless all of ``total`` is finite."""
    import torch

    if not torch.isfinite(total).all():
        raise InvalidInput(
            f"{model.name}: {what}",
            found="numbers that are not finite, of its own text",
            expected="numbers",
            remedy="the model is damaged, or computed in a format that is too narrow for it",
        )


def unseen_experts(stored: Checkpoint, owner: Mapping[str, str]) -> tuple[str, ...]:
    """Matrices of experts that were not measured, as parts of any layer and any expert."""
    found = set()
    for name, tensor in stored.tensors.items():
        if name not in owner and len(tensor.shape) == 2 and is_routed_expert(name) and is_projection(name):
            words = name.split(".")
            found.add(".".join("*" if word.isdecimal() else word for word in words))
    return tuple(sorted(found))
