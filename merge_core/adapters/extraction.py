"""A LoRA adapter from a fine-tune and its base: one tensor at a time, with the error that each one leaves.

What did not change is left out. What changed and is no matrix of a linear layer is saved whole (norms), as a bias of a
layer with factors, or refused by its name; nothing is dropped in silence.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mergegate.merge_core.adapters.application import is_conv1d
from mergegate.merge_core.adapters.arithmetic import elements_of, read_whole
from mergegate.merge_core.adapters.factorization import factor_change
from mergegate.merge_core.adapters.names import memory_name
from mergegate.merge_core.adapters.output import NewAdapter
from mergegate.merge_core.architecture import (
    is_before_layers,
    is_embedding,
    is_head,
    is_optional,
    parse_layer_place,
    ties_embeddings,
)
from mergegate.merge_core.checkpoint import BY_TORCH_NAME, AnyTensor, Checkpoint, read_into
from mergegate.merge_core.errors import InvalidInput

if TYPE_CHECKING:
    import torch

    from mergegate.merge_core.checkpoint import StoredTensor

_MOST_RANK = 1 << 12
_INSTEAD = "release the whole model, or merge it as it is"


@dataclass(frozen=True)
class ExtractionSettings:
    """How an adapter is made of two models.

    Args:
        rank: The largest that is wanted.
        epsilon: Directions with singular values up to this are left out.
        save: Ends of names of modules that are saved whole instead of as factors (``lm_head``).
        dtype: Format of the factors, as torch names it.
    """

    rank: int
    epsilon: float = 0.0
    save: tuple[str, ...] = ()
    dtype: str = "float32"

    def __post_init__(self) -> None:
        if not 1 <= self.rank <= _MOST_RANK:
            raise InvalidInput("rank", found=f"{self.rank}", expected=f"a whole number from 1 to {_MOST_RANK}")
        if not 0 <= self.epsilon < math.inf:
            raise InvalidInput("epsilon", found=f"{self.epsilon}", expected="a number from 0")
        if self.dtype not in BY_TORCH_NAME or BY_TORCH_NAME[self.dtype].kind != "float":
            raise InvalidInput("dtype", found=self.dtype, expected="float32, bfloat16 or float16")


@dataclass(frozen=True)
class ModuleError:
    """What factors leave out of the change of one module: its rank, and a relative error."""

    module: str
    rank: int
    error: float


@dataclass(frozen=True)
class Extracted:
    """An adapter, not yet written.

    Args:
        adapter: The adapter.
        errors: Of each module with factors.
        error: Of all changes together, those that are saved whole among them.
        unchanged: Number of tensors that are the same in both models.
    """

    adapter: NewAdapter
    errors: tuple[ModuleError, ...]
    error: float
    unchanged: int


def extract_adapter(
    tuned: Checkpoint,
    base: Checkpoint,
    base_name: str,
    settings: ExtractionSettings,
    on_progress: Callable[[int, int], None] = lambda done, total: None,
) -> Extracted:
    """The adapter that makes ``tuned`` of ``base``, as far as the rank allows.

    Args:
        tuned: The fine-tune.
        base: What it was made from.
        base_name: What the adapter calls its base.
        settings: See there.
        on_progress: Called with bytes done and in all.

    Raises:
        InvalidInput: The models differ in tensors or shapes, in nothing, or in something that no adapter can hold.
    """
    _require_alike(tuned, base)
    work = _Extraction(tuned, base, settings)
    total, done = tuned.nbytes, 0
    with opened_files() as read:
        for name, tensor in tuned.tensors.items():
            if name in base.tensors:
                work.compare(name, _values(tensor, read), _values(base.tensors[name], read))
            done += tensor.nbytes
            on_progress(done, total)
        work.complete(lambda name: _values(tuned.tensors[name], read))
    return work.result(base_name)


def _require_alike(tuned: Checkpoint, base: Checkpoint) -> None:
    for name in sorted(tuned.tensors.keys() ^ base.tensors.keys()):
        if not is_optional(name):
            owner = tuned if name in tuned.tensors else base
            raise InvalidInput(
                f"{owner.directory.name}: {name}",
                found="the other model has no such tensor",
                expected="a fine-tune and its base",
                remedy="name the model that the fine-tune was made from",
            )
    for name in tuned.tensors.keys() & base.tensors.keys():
        one, other = tuned.tensors[name], base.tensors[name]
        if one.shape != other.shape:
            vocabulary = is_embedding(name) or is_head(name)
            raise InvalidInput(
                f"{tuned.directory.name}: {name}",
                found=f"shape {list(one.shape)}",
                expected=f"{list(other.shape)}, as in {base.directory.name}",
                remedy="the vocabularies differ: an adapter has no rows for new tokens" if vocabulary else _INSTEAD,
            )


@dataclass
class _Extraction:
    """What has been found so far."""

    tuned: Checkpoint
    base: Checkpoint
    settings: ExtractionSettings
    factors: dict[str, tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict)
    embeddings: dict[str, tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict)
    whole: dict[str, dict[str, torch.Tensor]] = field(default_factory=dict)
    biases: dict[str, tuple[str, torch.Tensor]] = field(default_factory=dict)  # module → stored name, bias
    stored: dict[str, str] = field(default_factory=dict)  # module → name of its weight on disk
    transposed: set[bool] = field(default_factory=set)
    errors: list[ModuleError] = field(default_factory=list)
    left_out: float = 0.0
    squared: float = 0.0
    unchanged: int = 0

    def compare(self, name: str, ours: torch.Tensor, theirs: torch.Tensor) -> None:
        import torch

        if ours.dtype == theirs.dtype and torch.equal(ours, theirs):
            self.unchanged += 1
            return
        if not ours.is_floating_point() or not theirs.is_floating_point():
            raise self._refused(name, "numbers that are no weights")
        change = ours.double() - theirs.double()
        if not change.any():  # the same numbers in two formats
            self.unchanged += 1
            return
        if not bool(torch.isfinite(change).all()):
            raise self._refused(name, "NaN or infinity")
        in_memory = memory_name(name, self.tuned)
        module, _, leaf = in_memory.rpartition(".")
        if ".experts." in f".{module}." or _is_router(module):
            raise self._refused(name, "a change of experts or their router")
        if leaf not in ("weight", "bias") or not module:
            raise self._refused(name, "a parameter that is neither weight nor bias of a layer")
        if leaf == "bias":
            self.biases[module] = (name, ours)
            self.squared += float(change.square().sum())
            return
        self.stored[module] = name
        if ours.ndim == 2 and not self._is_saved(module):
            self._factor(name, module, change.float())
        else:
            self._require_untied(name)
            self.squared += float(change.square().sum())
            self.whole[module] = {"weight": ours}

    def _factor(self, name: str, module: str, change: torch.Tensor) -> None:
        import torch

        kept_as = getattr(torch, self.settings.dtype)
        is_table = is_embedding(name) or (parse_layer_place(name) is None and is_before_layers(name))
        transposed = not is_table and is_conv1d(self.tuned.config, module)
        matrix = change.T if transposed or is_table else change
        found = factor_change(matrix, self.settings.rank, epsilon=self.settings.epsilon, kept_as=kept_as)
        (self.embeddings if is_table else self.factors)[module] = (found.a, found.b)
        if not is_table and not is_head(name):
            self.transposed.add(transposed)
        self.errors.append(ModuleError(module, len(found.a), found.error))
        self.left_out += max(found.left_out, 0.0)
        self.squared += found.squared

    def complete(self, ours: Callable[[str], torch.Tensor]) -> None:
        """Give biases of layers without factors, and weights beside them, their places."""
        for module, (name, bias) in list(self.biases.items()):
            if module in self.factors:
                continue
            del self.biases[module]
            inside = self.whole.setdefault(module, {})
            inside["bias"] = bias
            weight = name.removesuffix("bias") + "weight"
            if "weight" not in inside and weight in self.tuned.tensors:
                inside["weight"] = ours(weight)
        for module, inside in self.whole.items():
            bias_name = self.stored.get(module, "").removesuffix("weight") + "bias"
            if "bias" not in inside and bias_name in self.tuned.tensors:
                inside["bias"] = ours(bias_name)  # A module is saved with all that it has.

    def result(self, base_name: str) -> Extracted:
        if not (self.factors or self.embeddings or self.whole):
            raise InvalidInput(
                self.tuned.directory.name,
                found=f"the same weights as {self.base.directory.name}",
                expected="a fine-tune of it",
            )
        if not (self.factors or self.embeddings):
            raise InvalidInput(
                self.tuned.directory.name,
                found=f"changes in {', '.join(sorted(self.whole)[:3])} alone",
                expected="a change of a linear layer: LoRA has at least one",
                remedy=_INSTEAD,
            )
        adapter = NewAdapter(
            base_name,
            self.factors,
            self.embeddings,
            {module: bias for module, (_, bias) in self.biases.items()},
            self.whole,
            transposed=True in self.transposed,
        )
        error = math.sqrt(self.left_out / self.squared) if self.squared else 0.0
        return Extracted(adapter, tuple(self.errors), error, self.unchanged)

    def _is_saved(self, module: str) -> bool:
        return any(module == end or module.endswith(f".{end}") for end in self.settings.save)

    def _require_untied(self, name: str) -> None:
        if (is_embedding(name) or is_head(name)) and ties_embeddings(self.tuned.config) is not False:
            heads = [one for one in self.tuned.tensors if is_head(one)]
            if not heads:
                raise self._refused(name, "an embedding that is tied to the head, to be saved whole")

    def _refused(self, name: str, found: str) -> InvalidInput:
        return InvalidInput(
            f"{self.tuned.directory.name}: {name}",
            found=found,
            expected="changes of linear layers, embeddings, norms and biases",
            remedy=_INSTEAD,
        )


def _is_router(module: str) -> bool:
    last = module.rpartition(".")[2]
    return last in ("router", "shared_expert_gate") or (last == "gate" and ".mlp." in f".{module}.")


def _values(tensor: AnyTensor, read: Callable[[StoredTensor, int, Any], None]) -> torch.Tensor:
    return read_whole(tensor, elements_of(tensor, read)).view(tensor.shape)


@contextmanager
def opened_files() -> Iterator[Callable[[StoredTensor, int, Any], None]]:
    """How to read stored tensors; each file is opened once."""
    files: dict[Path, int] = {}

    def read(tensor: StoredTensor, first: int, into: Any) -> None:
        if tensor.file not in files:
            try:
                files[tensor.file] = os.open(tensor.file, os.O_RDONLY | os.O_CLOEXEC)
            except OSError as error:
                raise InvalidInput(str(tensor.file), found=f"cannot be read: {error.strerror}") from None
        read_into(files[tensor.file], into.data, tensor.offset + first * tensor.dtype.size, tensor.file)

    known: Mapping[Path, int] = files
    try:
        yield read
    finally:
        for descriptor in known.values():
            os.close(descriptor)
