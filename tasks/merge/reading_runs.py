"""How a model reads a text for a merge: in windows of tokens, and in runs of layers, each of which is kept when done.

What is measured of all layers of a large model needs more memory than the model. So as many layers as fit are measured
at a time, the text is read once for each run of them, and what a run gave is written and stands in a journal: a stage
that is killed goes on behind it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from merge_core.errors import InvalidInput
from merge_core.store import sha256_file
from merge_core.system import system_memory
from tasks.checkpoints import LoadedModel, Model
from tasks.perplexity import encode_text

if TYPE_CHECKING:
    import torch

# Of the memory that is available once the model is loaded, what sums may take; and what they always may.
_SHARE, _LEAST = 0.5, 256 << 20
_T = TypeVar("_T")


class ReadWindow(NamedTuple):
    """Tokens that are read at once; the last ``new`` of them were in no window before."""

    tokens: list[int]
    new: int


def windows_of(loaded: LoadedModel, model: Model, texts: Sequence[str], most: int) -> Iterator[ReadWindow]:
    """Every token of every text in one window; one that would be short begins with context from before. A text begins
    as its model's tokenizer begins it for whoever asks: what is measured is what will flow."""
    length = min(most, loaded.context or most)
    for text in texts:
        tokens = encode_text(loaded, model, text, with_specials=True)
        for start in range(0, len(tokens), length):
            end = min(start + length, len(tokens))
            yield ReadWindow(tokens[max(0, end - length) : end], end - start)


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
