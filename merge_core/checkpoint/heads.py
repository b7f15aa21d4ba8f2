"""Recognize output heads and embeddings by name, and define tensors that are computed while they are read.

``tie_word_embeddings`` in config.json is not reliable: a checkpoint may contain a trained head although the flag is
true, and transformers then loads that head. Therefore, mergegate treats a stored head as tied to the embedding if it
equals it, and as independent if it differs.

A derived tensor changes numbers, such as a weight with an adapter or a decoded quantized weight. It names the stored
tensors that it depends on and computes any range of its elements, so the engine can stream it in blocks like a stored
tensor. A change that only moves numbers (a renumbered layer, one expert of a fused tensor) needs none: a new
:class:`~merge_core.checkpoint.safetensors_file.StoredTensor` refers to the same bytes.
"""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from mergegate.merge_core.checkpoint.configuration import config_parts
from mergegate.merge_core.checkpoint.dtypes import DType, SizedTensor
from mergegate.merge_core.checkpoint.safetensors_file import StoredTensor, read_into
from mergegate.merge_core.errors import Finding
from mergegate.merge_core.parsing import open_plain

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Bytes: TypeAlias = NDArray[np.uint8]


# Suffixes of names, after a dot. A plan tests every tensor, and a suffix test takes a tenth of the time of a regex.
_HEADS = (".lm_head.weight", ".embed_out.weight")
_EMBEDDINGS = (
    *(f".{word}.weight" for word in ("embed_tokens", "wte", "embed_in", "word_embeddings", "tok_embeddings")),
    *(f".{word}.embeddings.weight" for word in ("backbone", "model")),
)
_FLAG = "tie_word_embeddings"
_BLOCK_BYTES = 4 << 20


def is_head(name: str) -> bool:
    """Return whether the tensor called ``name`` is the output projection onto the vocabulary."""
    return f".{name}".endswith(_HEADS)


def is_embedding(name: str) -> bool:
    """Return whether the tensor called ``name`` is the table of token embeddings."""
    return f".{name}".endswith(_EMBEDDINGS)


def ties_embeddings(config: Mapping[str, Any]) -> bool | None:
    """Return ``tie_word_embeddings`` of a config or of its text part, or None if neither sets it."""
    flags = (part.get(_FLAG) for part in config_parts(config))
    return next((flag for flag in flags if isinstance(flag, bool)), None)


def with_tie(config: Mapping[str, Any], value: bool) -> dict[str, Any]:
    """Return a copy of ``config`` in which ``tie_word_embeddings``, also that of the text part, is ``value``."""
    changed: dict[str, Any] = copy.deepcopy(dict(config))
    parts: list[Any] = config_parts(changed)
    for part in parts:
        part[_FLAG] = value
    return changed


def settle_head(
    tensors: Mapping[str, StoredTensor], config: Mapping[str, Any], directory: Path, remote: Collection[Path] = ()
) -> tuple[Mapping[str, StoredTensor], Mapping[str, Any], tuple[Finding, ...]]:
    """Make a checkpoint's tensors and its ``tie_word_embeddings`` agree.

    A head that equals the embedding is dropped, and the flag becomes true. A head that differs stays, and the flag
    becomes false. Nothing changes if the flag is already false, if the checkpoint does not have exactly one head and
    one embedding, or if one of them is in a file of ``remote``, which is not on this machine. Weights are read only for
    this comparison, up to the first difference.

    Returns:
        The tensors, the config, and a finding if the flag contradicts the stored head.
    """
    flag = ties_embeddings(config)
    heads = [name for name in tensors if is_head(name)]
    if flag is False or len(heads) != 1:
        return tensors, config, ()
    head = tensors[heads[0]]
    others = [tensor for tensor in tensors.values() if tensor is not head]
    tables = [tensor for tensor in others if is_embedding(tensor.name)]
    if head.nbytes and any((head.file, head.offset) == (item.file, item.offset) for item in others if item.nbytes):
        equal = True  # Pickled files of tied models refer to one storage twice.
    elif len(tables) != 1 or {head.file, tables[0].file} & set(remote):
        return tensors, config, ()
    else:
        equal = equal_bytes(head, tables[0], directory)
    if equal:
        rest = {name: tensor for name, tensor in tensors.items() if tensor is not head}
        return rest, config if flag else with_tie(config, value=True), ()
    contradiction = Finding(
        "warn",
        f"config.json: {_FLAG}",
        found=f"true, but the stored {head.name} differs from {tables[0].name}",
        expected="false for a model with an output head of its own",
        remedy=f"nothing to do: the stored head is merged, and the result has {_FLAG}: false",
    )
    return tensors, with_tie(config, value=False), (contradiction,) if flag else ()


def equal_bytes(first: StoredTensor, second: StoredTensor, directory: Path | None = None) -> bool:
    """Return whether two stored tensors have the same format, shape and content. Their files are in ``directory``."""
    if (first.dtype, first.shape) != (second.dtype, second.shape):
        return False
    with open_plain(first.file, within=directory) as file_1, open_plain(second.file, within=directory) as file_2:
        for start in range(0, first.nbytes, _BLOCK_BYTES):
            count = min(_BLOCK_BYTES, first.nbytes - start)
            block_1, block_2 = bytearray(count), bytearray(count)
            read_into(file_1.fileno(), memoryview(block_1), first.offset + start, first.file)
            read_into(file_2.fileno(), memoryview(block_2), second.offset + start, second.file)
            if block_1 != block_2:
                return False
    return True


# Called with a tensor, the index of the first element and a buffer. Fills the buffer with elements as they are stored.
ReadStored: TypeAlias = "Callable[[StoredTensor, int, Bytes], None]"
# Called with the index of the first element and a buffer. Fills the buffer with elements in the tensor's own format.
ReadElements: TypeAlias = "Callable[[int, Bytes], None]"


@dataclass(frozen=True)
class DerivedTensor(SizedTensor, ABC):
    """A tensor that is computed from stored tensors, and whose values are rounded once to ``dtype``."""

    name: str
    dtype: DType
    shape: tuple[int, ...]

    @property
    @abstractmethod
    def parts(self) -> tuple[StoredTensor, ...]:
        """Stored tensors that the values depend on. The first is the tensor that this one replaces."""

    @abstractmethod
    def identity(self) -> Any:
        """Return JSON-compatible data that, together with ``parts``, determines the values."""

    @abstractmethod
    def open(self, read: ReadStored) -> ReadElements:
        """Prepare the data that every block needs, such as scales and norms, and return a reader of the elements.

        Several threads may call the returned reader concurrently. It reads stored tensors with ``read``.

        Raises:
            InvalidInput: A stored tensor cannot be read.
        """


AnyTensor: TypeAlias = StoredTensor | DerivedTensor
