"""Measure the second moments of the inputs of each matrix while a model reads a text, in the model process.

The network reads one window at a time with a batch size of one, so there is no padding. A hook in front of every linear
layer inside a layer of the network adds ``x x'`` for each position to a float64 sum. Modules that receive the same
tensor (query, key and value; gate and up) share one sum.

The sums of all layers of a large model need more memory than the model. Therefore the layers are measured in runs of as
many layers as fit into memory. Each run reads the text once and stops at its last layer. Finished runs are on disk, so
a killed stage does not repeat them.

An expert of a mixture only sees the tokens that are routed to it. If the experts of a layer share one parameter, each
expert still has its own sums (:mod:`.expert_products`), under the tensor names of separate experts whatever the layout
on disk. A layer with many experts may not fit into memory, so a run can include some of the experts of a layer. Means
are over all positions of the text, which weights an expert by how often the router selects it. An expert that no
position reached is recorded as such. Experts whose products cannot be observed are listed by name and merged by the
mean of the models.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from mergegate.merge_core.adapters import ExpertSlice, StoredNames
from mergegate.merge_core.architecture import input_width, is_inputs_first, is_projection, parse_layer_place
from mergegate.merge_core.architecture.experts import split_experts
from mergegate.merge_core.checkpoint import (
    INPUTS,
    empty_moments,
    measurement_file_name,
    open_checkpoint,
    open_moments,
    pack_moments,
    write_measurement,
)
from mergegate.tasks.checkpoints import LoadedModel, TellProgress, load_model
from mergegate.tasks.merge.calibration import (
    CalibrationJob,
    ReadWindow,
    measure_in_runs,
    require_numbers,
    split_into_windows,
    unmeasured_experts,
)
from mergegate.tasks.perplexity import read_documents_verbatim
from mergegate.tasks.stage import StageValue
from mergegate.tasks.store import NotInKey

if TYPE_CHECKING:
    import torch

    from mergegate.tasks.merge.expert_products import ExpertProduct


class InputStatistics(StageValue):
    """Summary of the measured input moments; see :mod:`merge_core.checkpoint.measurements` for the files."""

    model: Annotated[str, NotInKey]
    documents: int
    positions: int
    inputs: int  # distinct inputs
    matrices: int
    widest: int
    squares: int  # inputs for which only the diagonal is stored
    unreached: int = 0  # inputs of experts that no position reached
    unseen: tuple[str, ...] = ()  # matrices of experts whose products could not be observed

    def summary(self) -> str:
        text = f"{self.positions:,} positions of {self.documents} documents · {self.inputs} inputs"
        # With fewer positions than numbers in the widest input, some directions fall back to the mean of the models.
        text += f", up to {self.widest:,} wide; use a longer text" if self.positions < self.widest else ""
        text += f" · {self.unreached} of unused experts" if self.unreached else ""
        return text + (f" · not observed, so merged by the mean: {', '.join(self.unseen)}" if self.unseen else "")


@dataclass(frozen=True)
class _ExpertMatrix:
    """Slice of the in-memory parameter ``parameter`` that belongs to one expert.

    ``stored`` has the name and shape of each tensor on disk that is part of the slice. Gate and up may be two tensors.
    """

    parameter: str
    number: int
    stored: tuple[tuple[str, tuple[int, ...]], ...]

    @property
    def width(self) -> int:
        return input_width(*self.stored[0])

    def matches(self, product: ExpertProduct) -> bool:
        """Return whether ``product`` has the input that the matrix on disk would have."""
        name, shape = self.stored[0]
        # If the matrix is [in, out] on disk but not in memory, only a matrix that is not square shows that it was
        # transposed when it was loaded.
        has_same_input = product.inputs_first or not is_inputs_first(name) or shape[0] != shape[1]
        return product.inputs.ndim == 2 and product.inputs.shape[-1] == self.width and has_same_input


@dataclass
class _Part:
    """Smallest unit of a run: all linear layers of one layer of the network, or all matrices of one expert.

    ``modules`` holds linear layers by the names of their matrices on disk, and ``matrices`` the slices of one expert,
    one for each parameter of its layer. For inputs wider than ``limit``, only the diagonal is summed.
    """

    limit: int
    modules: dict[str, Any] = field(default_factory=dict)
    matrices: list[_ExpertMatrix] = field(default_factory=list)

    @property
    def names(self) -> list[str]:
        return [*self.modules, *(name for matrix in self.matrices for name, _ in matrix.stored)]

    @property
    def sum_bytes(self) -> int:
        """Size of all sums in bytes, if no two modules share an input."""
        widths = [int(module.weight.shape[1]) for module in self.modules.values()]
        widths += [matrix.width for matrix in self.matrices]
        return sum(8 * (width**2 if width <= self.limit else width) for width in widths)


class _RunIsMeasured(Exception):
    """Signal that the last layer of the run has its input, so the rest of the network can be skipped."""


class _InputSums:
    """Sums of ``x x'`` over the inputs of all parts of a run. Use it as a context manager.

    ``experts`` holds the parameters with all experts of a layer, by name in memory. Only the diagonal is summed for
    inputs wider than ``limit``.
    """

    def __init__(self, loaded_model: LoadedModel, run: Sequence[_Part], experts: Mapping[str, Any], limit: int) -> None:
        self.sums: dict[str, torch.Tensor] = {}
        self.owners: dict[str, str] = {}
        self.unreached: dict[str, int] = {}  # Width by name.
        self._network, self._limit = loaded_model.network, limit
        self._modules = {name: module for part in run for name, module in part.modules.items()}
        self._matrices = {(matrix.parameter, matrix.number): matrix for part in run for matrix in part.matrices}
        # One matrix per parameter: all matrices of a parameter have the same sizes.
        self._kinds = {matrix.parameter: matrix for matrix in self._matrices.values()}
        self._parameters = {name: experts[name] for name in self._kinds}
        self._observed: set[str] = set()  # Parameters with at least one observed product, of any expert.
        self._new_positions, self._overlap = slice(None), 0
        # Most recent input and the matrix that received it, for linear layers (key None) and for each expert.
        self._last: dict[int | None, tuple[Any, str]] = {}
        self._pending: set[str] = set()

    def __enter__(self) -> _InputSums:
        self._hooks = [
            module.register_forward_pre_hook(lambda _, inputs, name=name: self._add_linear_input(name, inputs[0]))
            for name, module in self._modules.items()
        ]
        self._contexts = ExitStack()
        if self._parameters:
            from mergegate.tasks.merge.expert_products import ExpertProducts, eager_experts

            modules = {name: self._network.get_submodule(name.rpartition(".")[0]) for name in self._parameters}
            for name, module in modules.items():
                self._hooks.append(module.register_forward_hook(lambda *_, name=name: self._end_module(name)))
            self._contexts.enter_context(eager_experts(modules.values()))
            self._contexts.enter_context(ExpertProducts(self._parameters, self._add_expert_input))
        return self

    def __exit__(self, *_: object) -> None:
        self._contexts.close()
        for hook in self._hooks:
            hook.remove()
        for matrix in self._matrices.values():
            (own, _), *rest = matrix.stored
            if matrix.parameter in self._observed and own not in self.owners:
                self.owners |= dict.fromkeys((own, *(name for name, _ in rest)), own)
                self.unreached[own] = matrix.width

    def read(self, window: ReadWindow) -> None:
        """Add the inputs at the positions of ``window`` that no earlier window contained."""
        import torch

        self._last, self._pending = {}, self._modules.keys() | self._parameters.keys()
        self._overlap = len(window.tokens) - window.new_count
        self._new_positions = slice(self._overlap, None)
        ids = torch.tensor([window.tokens], device=self._network.device)
        with torch.inference_mode(), suppress(_RunIsMeasured):
            self._network(input_ids=ids, use_cache=False)

    def _add_linear_input(self, name: str, inputs: torch.Tensor) -> None:
        # Tokens that are routed to an expert are not in text order, so the overlap cannot be removed here.
        self._add(None, name, inputs, inputs[0, self._new_positions] if inputs.ndim == 3 else inputs)
        self._end_module(name)

    def _add_expert_input(self, product: ExpertProduct) -> None:
        if not self._kinds[product.parameter].matches(product):
            return
        self._observed.add(product.parameter)
        matrix = self._matrices.get((product.parameter, product.number))
        if matrix is None:  # The expert belongs to another run.
            return
        rows = product.inputs
        if self._overlap and product.positions is not None:
            rows = rows[product.positions >= self._overlap]
        own = matrix.stored[0][0]
        if len(rows) or own in self.owners:
            self._add(product.number, own, product.inputs, rows)
            self.owners |= {name: self.owners[own] for name, _ in matrix.stored}

    def _add(self, expert: int | None, name: str, inputs: torch.Tensor, rows: torch.Tensor) -> None:
        last = self._last.get(expert)
        if last is None or last[0] is not inputs:
            last = self._last[expert] = (inputs, name)
        owner = self.owners.setdefault(name, last[1])
        if owner == name:
            rows = rows.reshape(-1, inputs.shape[-1]).double()
            new = rows.T @ rows if inputs.shape[-1] <= self._limit else rows.square().sum(0)
            self.sums[name] = self.sums[name].add_(new) if name in self.sums else new

    def _end_module(self, name: str) -> None:
        self._pending.discard(name)
        if not self._pending:
            raise _RunIsMeasured


def read_inputs(job: CalibrationJob, on_progress: TellProgress) -> InputStatistics:
    """Measure the inputs of each matrix of a model while it reads a text, and write their second moments.

    ``on_progress`` receives the number of windows read and their total number.

    Raises:
        InvalidInput: The model cannot be loaded or cannot read the text, has no linear layer with a known name, or
            computes NaN or infinity.
    """
    documents = read_documents_verbatim(job.text, job.reading.documents)
    stored = split_experts(open_checkpoint(job.model.directory))
    limit = job.reading.diagonal_above
    with load_model(job.model, dtype=job.dtype, device=job.device) as loaded:
        windows = list(split_into_windows(loaded, job.model, documents, job.reading.max_length))
        positions = sum(window.new_count for window in windows)
        parts, experts = _parts(loaded, StoredNames(stored), limit)

        def measure(run: Sequence[_Part], path: Path, report: Callable[[int], None]) -> dict[str, str]:
            import torch
            from safetensors.torch import save_file

            with _InputSums(loaded, run, experts, limit) as measured:
                for count, window in enumerate(windows, start=1):
                    measured.read(window)
                    report(count)
            packed = {}
            for name, total in measured.sums.items():
                require_numbers(total, name, job.model)
                packed[name] = pack_moments((total / positions).cpu().numpy())
            for name, width in measured.unreached.items():
                packed[name] = empty_moments(width, is_diagonal=width > limit)
            save_file({name: torch.from_numpy(values) for name, values in packed.items()}, path)
            return measured.owners

        file_name = partial(measurement_file_name, INPUTS)
        owners = measure_in_runs(job, parts, len(windows), file_name, measure, on_progress)
    write_measurement(job.out / INPUTS, owners, positions)
    moments = open_moments(job.out)
    inputs = [moments[name] for name in set(owners.values())]
    return InputStatistics(
        model=job.model.name,
        documents=len(documents),
        positions=positions,
        inputs=len(inputs),
        matrices=len(owners),
        widest=max(stored_input.width for stored_input in inputs),
        squares=sum(stored_input.is_diagonal for stored_input in inputs),
        unreached=sum(stored_input.is_empty for stored_input in inputs),
        unseen=unmeasured_experts(stored, owners),
    )


def _parts(loaded_model: LoadedModel, names: StoredNames, limit: int) -> tuple[list[_Part], dict[str, Any]]:
    """Return the parts of the network in network order, and the parameters that contain experts, by name in memory.

    Linear layers with weights on disk are grouped by layer of the network. Each expert of a layer is its own part.
    """
    import torch

    parts: dict[tuple[str, int, int | None], _Part] = {}
    experts = {}
    for path, module in loaded_model.network.named_modules():
        if isinstance(module, torch.nn.Linear):
            stored = names.find(f"{path}.weight")
            if stored is None or not is_projection(stored.name) or stored.shape != tuple(module.weight.shape):
                continue
            layer = parse_layer_place(stored.name)
            assert layer is not None, "a projection is in a layer"
            parts.setdefault((layer.stack, layer.index, None), _Part(limit)).modules[stored.name] = module
            continue
        for last, parameter in module.named_parameters(recurse=False):
            name = f"{path}.{last}"
            matrices = _matrices(name, names.find_parameter(path, last)) if parameter.ndim == 3 else []
            if {matrix.number for matrix in matrices} != set(range(len(parameter))):
                continue
            experts[name] = parameter
            for matrix in matrices:
                layer = parse_layer_place(matrix.stored[0][0])
                assert layer is not None, "a projection is in a layer"
                parts.setdefault((layer.stack, layer.index, matrix.number), _Part(limit)).matrices.append(matrix)
    return list(parts.values()), experts


def _matrices(parameter: str, pieces: Sequence[ExpertSlice]) -> list[_ExpertMatrix]:
    """Return the matrices of all experts in a parameter, or an empty list if the disk has no separate ones."""
    stored: dict[int, list[tuple[str, tuple[int, ...]]]] = {}
    for piece in pieces:
        if piece.expert is None or len(piece.tensor.shape) != 2 or not is_projection(piece.tensor.name):
            return []
        stored.setdefault(piece.expert, []).append((piece.tensor.name, piece.tensor.shape))
    widths = {input_width(*tensor) for tensors in stored.values() for tensor in tensors}
    return [_ExpertMatrix(parameter, number, tuple(own)) for number, own in stored.items()] if len(widths) == 1 else []
