"""Extract a LoRA adapter from a fine-tune and its base, one tensor at a time, and report the error of each tensor.

Unchanged tensors are skipped. Changed matrices become factors, and changed norms and biases are saved in full. All
other changes are refused with the name of the tensor, so no change is dropped silently.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mergegate.merge_core.adapters.adapter import NewAdapter, task_type
from mergegate.merge_core.adapters.application import is_conv1d
from mergegate.merge_core.adapters.names import StoredNames, split_stored
from mergegate.merge_core.adapters.tensors import read_tensor
from mergegate.merge_core.architecture import (
    is_before_layers,
    is_embedding,
    is_head,
    is_optional,
    is_routed_expert,
    parse_layer_place,
    ties_embeddings,
)
from mergegate.merge_core.checkpoint import BY_TORCH_NAME, Checkpoint, read_into
from mergegate.merge_core.errors import InvalidInput

if TYPE_CHECKING:
    import torch

    from mergegate.merge_core.checkpoint import StoredTensor

_MOST_RANK = 1 << 12
_INSTEAD = "release the full model, or merge it without extracting an adapter"


# Up to this size, a full decomposition takes seconds. Above it, only the strongest directions are computed.
_FULL_DECOMPOSITION = 1024
_OVERSAMPLED, _ITERATIONS = 16, 6


@dataclass(frozen=True)
class LowRankChange:
    """Change of a weight ``Δ``, approximated by ``B @ A``.

    Args:
        a: Factor ``A``, ``[rank, in]``.
        b: Factor ``B``, ``[out, rank]``.
        left_out: Squared norm of ``Δ - B @ A``, with the factors in their final format.
        squared: Squared norm of ``Δ``.
    """

    a: torch.Tensor
    b: torch.Tensor
    left_out: float
    squared: float

    @property
    def error(self) -> float:
        """Norm of ``Δ - B @ A``, divided by the norm of ``Δ``."""
        return math.sqrt(max(self.left_out, 0.0) / self.squared) if self.squared else 0.0


def factor_change(change: torch.Tensor, rank: int, *, epsilon: float = 0.0, dtype: torch.dtype) -> LowRankChange:
    """Approximate a change ``[out, in]`` by the factors ``B = U sqrt(S)`` and ``A = sqrt(S) Vᵀ`` of its SVD.

    Args:
        change: Change of a weight, in float32 or float64.
        rank: Maximum rank.
        epsilon: Limit up to which singular values are dropped, except for the largest.
        dtype: Format of the factors.
    """
    import torch

    max_rank = min(rank, *change.shape)
    if min(change.shape) <= _FULL_DECOMPOSITION or max_rank + _OVERSAMPLED >= min(change.shape):
        u, s, vh = torch.linalg.svd(change, full_matrices=False)
    else:  # Only the strongest directions, by subspace iteration from a fixed start.
        generator = torch.Generator().manual_seed(0)
        start = torch.randn(change.shape[1], max_rank + _OVERSAMPLED, generator=generator, dtype=change.dtype)
        basis = torch.linalg.qr(change @ start)[0]
        for _ in range(_ITERATIONS):
            basis = torch.linalg.qr(change @ torch.linalg.qr(change.T @ basis)[0])[0]
        u, s, vh = torch.linalg.svd(basis.T @ change, full_matrices=False)
        u = basis @ u
    rank = min(max_rank, max(1, int((s > epsilon).sum())))
    root = s[:rank].sqrt()
    a, b = (root[:, None] * vh[:rank]).to(dtype), (u[:, :rank] * root).to(dtype)
    rest = change - b.to(change.dtype) @ a.to(change.dtype)
    return LowRankChange(a, b, float(rest.double().square().sum()), float(change.double().square().sum()))


def factor_sum(
    factors: Sequence[tuple[float, torch.Tensor, torch.Tensor]], rank: int | None, *, dtype: torch.dtype
) -> LowRankChange:
    """Return factors for the sum of ``weight · B @ A`` over ``factors``, which are triples ``(weight, A, B)``.

    With ``rank`` None, the result is exact, and its rank is the sum of the ranks. With a smaller rank, it is truncated.
    The full product is never computed: QR decompositions of the stacked factors reduce it to a core matrix whose size
    is the sum of the ranks. ``dtype`` is the format of the result.
    """
    import torch

    a = torch.cat([weight * factor for weight, factor, _ in factors])
    b = torch.cat([factor for _, _, factor in factors], dim=1)
    core_left, r_left = torch.linalg.qr(b.double())
    core_right, r_right = torch.linalg.qr(a.double().T)
    core = r_left @ r_right.T
    squared = float(core.square().sum())
    if rank is None or rank >= len(a):
        return LowRankChange(a.to(dtype), b.to(dtype), 0.0, squared)
    u, s, vh = torch.linalg.svd(core, full_matrices=False)
    root = s[:rank].sqrt()
    near, far = (core_left @ u[:, :rank] * root).to(dtype), (root[:, None] * (vh[:rank] @ core_right.T)).to(dtype)
    # ‖Δ - BA‖² = ‖Δ‖² - 2⟨Δ, BA⟩ + ‖BA‖², where each term is computed from products of thin factors.
    b_, a_, near_, far_ = b.double(), a.double(), near.double(), far.double()
    shared = float(((b_.T @ near_) * (a_ @ far_.T)).sum())
    own = float(((near_.T @ near_) * (far_ @ far_.T)).sum())
    return LowRankChange(far, near, squared - 2 * shared + own, squared)


@dataclass(frozen=True)
class ExtractionSettings:
    """Settings for extracting an adapter.

    Args:
        rank: Maximum rank of the factors.
        epsilon: Limit up to which singular values of a change are dropped. Default: 0.
        save: Name suffixes of modules to save in full instead of as factors, such as ``lm_head``.
        dtype: torch name of the factors' format. Default: ``float32``.
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
    """Rank of the factors for one module, and the relative error with which they represent its change."""

    module: str
    rank: int
    error: float


@dataclass(frozen=True)
class FactoredAdapter:
    """An extracted or combined adapter that is not yet written.

    Args:
        adapter: Tensors and settings to write.
        errors: Relative error from the limited rank, for each module with factors.
        error: Relative error of all changes together, including those saved in full.
        unchanged: Number of tensors that are equal in a fine-tune and its base.
    """

    adapter: NewAdapter
    errors: tuple[ModuleError, ...]
    error: float
    unchanged: int = 0


def extract_adapter(
    fine_tune: Checkpoint,
    base: Checkpoint,
    base_name: str,
    settings: ExtractionSettings,
    on_progress: Callable[[int, int], None] = lambda done, total: None,
) -> FactoredAdapter:
    """Return the adapter that turns ``base`` into ``fine_tune``, as closely as the rank allows.

    Args:
        fine_tune: Model to approximate.
        base: Model that the fine-tune was trained from.
        base_name: Name of the base to write into the adapter's configuration.
        settings: Rank and other settings.
        on_progress: Called with the number of compared bytes and the total.

    Raises:
        InvalidInput: The models have different tensors or shapes, no linear layer or embedding differs, or the models
            differ in a part that an adapter cannot represent.
    """
    fine_tune, base = split_stored(fine_tune), split_stored(base)
    for name in sorted(fine_tune.tensors.keys() ^ base.tensors.keys()):
        if not is_optional(name):
            owner, counterpart = (fine_tune, base) if name in fine_tune.tensors else (base, fine_tune)
            raise InvalidInput(
                f"{owner.directory.name}: {name}",
                found=f"{counterpart.directory.name} has no such tensor",
                expected="a fine-tune and its base",
                remedy="name the model from which the fine-tune was trained",
            )
    for name in fine_tune.tensors.keys() & base.tensors.keys():
        tuned_shape, base_shape = fine_tune.tensors[name].shape, base.tensors[name].shape
        if tuned_shape != base_shape:
            vocabulary = is_embedding(name) or is_head(name)
            raise InvalidInput(
                f"{fine_tune.directory.name}: {name}",
                found=f"shape {list(tuned_shape)}",
                expected=f"{list(base_shape)}, as in {base.directory.name}",
                remedy="use equal vocabularies. An adapter has no rows for new tokens" if vocabulary else _INSTEAD,
            )
    extraction = _Extraction(fine_tune, base, StoredNames(fine_tune), settings)
    total, done = fine_tune.nbytes, 0
    with opened_files() as read:
        for name, tensor in fine_tune.tensors.items():
            if name in base.tensors:
                extraction.compare(name, read_tensor(tensor, read), read_tensor(base.tensors[name], read))
            done += tensor.nbytes
            on_progress(done, total)
        extraction.complete(lambda name: read_tensor(fine_tune.tensors[name], read))
    return extraction.result(base_name)


@dataclass
class _Extraction:
    tuned: Checkpoint
    base: Checkpoint
    names: StoredNames
    settings: ExtractionSettings
    factors: dict[str, tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict)
    embeddings: dict[str, tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict)
    full_tensors: dict[str, dict[str, torch.Tensor]] = field(default_factory=dict)
    biases: dict[str, tuple[str, torch.Tensor]] = field(default_factory=dict)  # Stored name and bias by module.
    stored: dict[str, str] = field(default_factory=dict)  # Name of the weight on disk by module.
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
            raise self._refusal(name, "a changed tensor of integers")
        change = ours.double() - theirs.double()
        if not change.any():  # The numbers are equal, but their formats differ.
            self.unchanged += 1
            return
        if not bool(torch.isfinite(change).all()):
            raise self._refusal(name, "a change that contains NaN or infinity")
        in_memory = name if is_routed_expert(name) else self.names.in_memory(name)
        module, _, leaf = in_memory.rpartition(".")
        last = module.rpartition(".")[2]
        is_router = last in ("router", "shared_expert_gate") or (last == "gate" and ".mlp." in f".{module}.")
        if ".experts." in f".{module}." or is_router:
            raise self._refusal(name, "a change of experts or their router")
        if leaf not in ("weight", "bias") or not module:
            raise self._refusal(name, "a change of a parameter that is neither weight nor bias of a layer")
        if leaf == "bias":
            self.biases[module] = (name, ours)
            self.squared += float(change.square().sum())
            return
        self.stored[module] = name
        is_saved = any(module == end or module.endswith(f".{end}") for end in self.settings.save)
        if ours.ndim == 2 and not is_saved:
            # The patches of an image enter through a linear layer, tokens and positions through a table.
            is_patch = "patch" in module and "pos" not in last
            is_before = parse_layer_place(name) is None and is_before_layers(name)
            is_table = is_embedding(name) or (is_before and not is_patch)
            transposed = not is_table and is_conv1d(self.tuned.config, module)
            matrix = change.float().T if transposed or is_table else change.float()
            dtype = getattr(torch, self.settings.dtype)
            result = factor_change(matrix, self.settings.rank, epsilon=self.settings.epsilon, dtype=dtype)
            (self.embeddings if is_table else self.factors)[module] = (result.a, result.b)
            if not is_table and not is_head(name):
                self.transposed.add(transposed)
            self.errors.append(ModuleError(module, len(result.a), result.error))
            self.left_out += max(result.left_out, 0.0)
            self.squared += result.squared
        else:
            is_tied = ties_embeddings(self.tuned.config) is not False and not any(map(is_head, self.tuned.tensors))
            if is_tied and (is_embedding(name) or is_head(name)):
                raise self._refusal(name, "a full copy of an embedding that is tied to the head")
            self.squared += float(change.square().sum())
            self.full_tensors[module] = {"weight": ours}

    def complete(self, ours: Callable[[str], torch.Tensor]) -> None:
        """Move biases of modules without factors to the full tensors, and add the other tensors of these modules."""
        for module, (name, bias) in list(self.biases.items()):
            if module in self.factors:
                continue
            del self.biases[module]
            tensors = self.full_tensors.setdefault(module, {})
            tensors["bias"] = bias
            weight = name.removesuffix("bias") + "weight"
            if "weight" not in tensors and weight in self.tuned.tensors:
                tensors["weight"] = ours(weight)
        for module, tensors in self.full_tensors.items():
            bias_name = self.stored.get(module, "").removesuffix("weight") + "bias"
            if "bias" not in tensors and bias_name in self.tuned.tensors:
                tensors["bias"] = ours(bias_name)  # A saved module needs all its tensors.

    def result(self, base_name: str) -> FactoredAdapter:
        if not (self.factors or self.embeddings or self.full_tensors):
            raise InvalidInput(
                self.tuned.directory.name,
                found=f"it has the same weights as {self.base.directory.name}",
                expected="a fine-tune with changed weights",
            )
        if not (self.factors or self.embeddings):
            raise InvalidInput(
                self.tuned.directory.name,
                found=f"only {', '.join(sorted(self.full_tensors)[:3])} changed",
                expected="a change of at least one linear layer",
                remedy=_INSTEAD,
            )
        adapter = NewAdapter(
            base_name,
            self.factors,
            self.embeddings,
            {module: bias for module, (_, bias) in self.biases.items()},
            self.full_tensors,
            transposed=True in self.transposed,
            task=task_type(self.base),
        )
        error = math.sqrt(self.left_out / self.squared) if self.squared else 0.0
        return FactoredAdapter(adapter, tuple(self.errors), error, self.unchanged)

    def _refusal(self, name: str, found: str) -> InvalidInput:
        return InvalidInput(
            f"{self.tuned.directory.name}: {name}",
            found=found,
            expected="changes of linear layers, embeddings, norms and biases",
            remedy=_INSTEAD,
        )


@contextmanager
def opened_files() -> Iterator[Callable[[StoredTensor, int, Any], None]]:
    """Yield a reader of stored tensors that opens each file only once. All files are closed at the end of the block."""
    files: dict[Path, int] = {}

    def read(tensor: StoredTensor, first: int, into: Any) -> None:
        if tensor.file not in files:
            try:
                files[tensor.file] = os.open(tensor.file, os.O_RDONLY | os.O_CLOEXEC)
            except OSError as error:
                raise InvalidInput(str(tensor.file), found=f"the file cannot be read: {error.strerror}") from None
        read_into(files[tensor.file], into.data, tensor.offset + first * tensor.dtype.size, tensor.file)

    try:
        yield read
    finally:
        for descriptor in files.values():
            os.close(descriptor)
