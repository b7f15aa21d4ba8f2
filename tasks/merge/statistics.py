"""Measure statistics of a model on its calibration text, for merge methods that need them.

The network reads one window at a time with a batch size of one, so there is no padding, in the model process.

**Inputs** (stage ``statistics``): the second moments of the inputs of each matrix. A hook in front of every linear
layer inside a layer of the network adds ``x x'`` for each position to a float64 sum. Modules that receive the same
tensor (query, key and value; gate and up) share one sum. Each run stops at its last layer. An expert of a mixture only
sees the tokens that are routed to it. A layer with many experts may not fit into memory, so a run can include some of
the experts of a layer. Means are over all positions of the text, which weights an expert by how often the router
selects it. An expert that no position reached is recorded as such.

**Importance** (stage ``importance``): how much each element matters to the predictions. At each position (in a
conversation: at each position of the model's own turn), the next token is sampled from the model's own prediction. The
derivative of the log-likelihood of all sampled tokens is squared element by element, and the mean of the squares is the
diagonal of the Fisher information. The derivative for a whole batch, or for the tokens that are actually in the text,
would measure something else. The derivative of a tensor is squared as soon as it is available and freed before the next
one is computed, so memory only has to hold one sum per tensor. Experts that no position reached have an importance of
zero.

If the experts of a layer share one parameter in memory, each expert still has its own statistics (:mod:`.products`),
under the tensor names of separate experts in every layout on disk. Experts whose products cannot be observed, or
with an unknown layout on disk, are listed by name and merged by the mean of the models.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from mergegate.merge_core import Recipe
from mergegate.merge_core.adapters import ExpertSlice, StoredNames
from mergegate.merge_core.architecture import input_width, is_inputs_first, is_projection, parse_layer_place
from mergegate.merge_core.architecture.experts import split_experts
from mergegate.merge_core.checkpoint import (
    IMPORTANCE,
    INPUTS,
    Checkpoint,
    empty_moments,
    open_checkpoint,
    open_moments,
    pack_moments,
)
from mergegate.merge_core.errors import InvalidInput
from mergegate.merge_core.files import JOURNAL, JournalLocation
from mergegate.merge_core.recipe import CalibrationReading
from mergegate.tasks.base.stage import Runtime, StageValue, stage
from mergegate.tasks.base.store import NotInKey
from mergegate.tasks.merge.calibration import (
    CalibrationJob,
    CalibrationWindows,
    PassIsObserved,
    ReadWindow,
    measure_in_runs,
    require_numbers,
    run_in_model_process,
    split_into_windows,
    unmeasured_experts,
)
from mergegate.tasks.models.checkpoints import LoadedModel, Model, TellProgress, load_model
from mergegate.tasks.quality.perplexity import HeldOutText, read_documents_verbatim

if TYPE_CHECKING:
    import torch

    from mergegate.tasks.merge.products import ExpertProduct


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


class ImportanceStatistics(StageValue):
    """Summary of the measured importance; see :mod:`merge_core.checkpoint.measurements` for the files."""

    model: Annotated[str, NotInKey]
    documents: int
    positions: int
    tensors: int
    parameters: int
    unseen: tuple[str, ...] = ()  # parameters of experts with an unknown layout on disk

    def summary(self) -> str:
        text = f"{self.positions:,} positions of {self.documents} documents · {self.parameters:,} parameters"
        return text + (f" · not measured, so merged by the mean: {', '.join(self.unseen)}" if self.unseen else "")


@stage("statistics", version=2, subject="model", resumable=True)
def input_statistics(
    out: Path, model: Model, text: HeldOutText, reading: CalibrationReading, dtype: str, runtime: Runtime
) -> InputStatistics:
    """Measure the inputs of each matrix of ``model`` while it reads ``text``, resuming from a killed run's journal.

    Raises:
        InvalidInput: The model cannot be loaded, cannot read the text, or computes NaN or infinity.
    """
    journal = JournalLocation(out / JOURNAL, input_statistics.key(model, text, reading, dtype, runtime))
    job = CalibrationJob(model, text, reading, dtype, runtime.device, out, journal)
    return run_in_model_process(read_inputs, job, noun="statistics")


@stage("importance", version=2, subject="model", resumable=True)
def importance_statistics(
    out: Path, model: Model, text: HeldOutText, reading: CalibrationReading, dtype: str, runtime: Runtime
) -> ImportanceStatistics:
    """Measure how much each element of ``model`` matters to its predictions on ``text``, resuming a killed run.

    Raises:
        InvalidInput: The model cannot be loaded, cannot read the text, or computes NaN or infinity.
    """
    journal = JournalLocation(out / JOURNAL, importance_statistics.key(model, text, reading, dtype, runtime))
    job = CalibrationJob(model, text, reading, dtype, runtime.device, out, journal)
    return run_in_model_process(read_gradients, job, noun="statistics")


def statistics_stage(recipe: Recipe) -> Any:
    """Return the stage that reads the texts of one recipe document, or None if it measures nothing."""
    if not recipe.needs_statistics:
        return None
    return importance_statistics if recipe.method.traits.reads_text == "importance" else input_statistics


def calibration_stage_name(recipe: Recipe) -> str | None:
    """Return the name of the stage that reads the texts of one recipe document, or None if it measures nothing."""
    return getattr(statistics_stage(recipe), "name", None)


def read_inputs(job: CalibrationJob, on_progress: TellProgress) -> InputStatistics:
    """Measure the inputs of each matrix of a model while it reads a text, and write their second moments."""
    with _open_text(job) as (loaded, stored, text):
        layers, experts = _layers(loaded, StoredNames(stored), job.reading.diagonal_above)

        def observe(run: Sequence[_Layer]) -> _InputSums:
            return _InputSums(job, loaded, run, experts)

        owners = measure_in_runs(job, INPUTS, text, layers, observe, on_progress)
    moments = open_moments(job.out)
    inputs = [moments[name] for name in set(owners.values())]
    return InputStatistics(
        model=job.model.name,
        documents=text.documents,
        positions=text.positions,
        inputs=len(inputs),
        matrices=len(owners),
        widest=max(stored_input.width for stored_input in inputs),
        squares=sum(stored_input.is_diagonal for stored_input in inputs),
        unreached=sum(stored_input.is_empty for stored_input in inputs),
        unseen=unmeasured_experts(stored, owners),
    )


def read_gradients(job: CalibrationJob, on_progress: TellProgress) -> ImportanceStatistics:
    """Measure how much each element of a model matters to its predictions on a text, and write the importance."""
    with _open_text(job) as (loaded, stored, text):
        text = text._replace(positions=sum(sum(window.own) for window in text.windows))
        if not text.positions:
            raise InvalidInput(
                str(job.text.path),
                found=f"no text that {job.model.name} would write",
                expected="plain documents, or conversations with messages of the role 'assistant'",
            )
        parameters = _parameters(loaded, StoredNames(stored))

        def observe(run: Sequence[_Parameter]) -> _SquaredGradients:
            return _SquaredGradients(job.model, loaded.network, run)

        owners = measure_in_runs(job, IMPORTANCE, text, parameters, observe, on_progress)
    return ImportanceStatistics(
        model=job.model.name,
        documents=text.documents,
        positions=text.positions,
        tensors=len(set(owners.values())),
        parameters=sum(part.parameter.numel() for part in parameters if part.names[0] in owners),
        unseen=unmeasured_experts(stored, owners),
    )


@contextmanager
def _open_text(job: CalibrationJob) -> Iterator[tuple[LoadedModel, Checkpoint, CalibrationWindows]]:
    """Yield the loaded model, its checkpoint with separate experts, and its text with all new positions."""
    documents = read_documents_verbatim(job.text, job.reading.documents)
    stored = split_experts(open_checkpoint(job.model.directory))
    with load_model(job.model, dtype=job.dtype, device=job.device) as loaded:
        windows = tuple(split_into_windows(loaded, job.model, documents, job.reading.max_length))
        yield loaded, stored, CalibrationWindows(len(documents), windows, sum(window.new_count for window in windows))


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
class _Layer:
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


class _InputSums:
    """Sums of ``x x'`` over the inputs of all parts of a run. Use it as a context manager.

    ``experts`` holds the parameters with all experts of a layer, by name in memory.
    """

    def __init__(
        self, job: CalibrationJob, loaded_model: LoadedModel, run: Sequence[_Layer], experts: Mapping[str, Any]
    ) -> None:
        self._sums: dict[str, torch.Tensor] = {}
        self._owners: dict[str, str] = {}
        self._unreached: dict[str, int] = {}  # Width by name.
        self._model, self._network, self._limit = job.model, loaded_model.network, job.reading.diagonal_above
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
            from mergegate.tasks.merge.products import ExpertProducts, eager_experts

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
            if matrix.parameter in self._observed and own not in self._owners:
                self._owners |= dict.fromkeys((own, *(name for name, _ in rest)), own)
                self._unreached[own] = matrix.width

    def read(self, window: ReadWindow, number: int) -> None:
        """Add the inputs at the positions of ``window`` that no earlier window contained."""
        import torch

        self._last, self._pending = {}, self._modules.keys() | self._parameters.keys()
        self._overlap = len(window.tokens) - window.new_count
        self._new_positions = slice(self._overlap, None)
        ids = torch.tensor([window.tokens], device=self._network.device)
        with torch.inference_mode(), suppress(PassIsObserved):
            self._network(input_ids=ids, use_cache=False)

    def means(self, positions: int) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
        import torch

        packed = {}
        for name, total in self._sums.items():
            require_numbers(total, name, self._model)
            packed[name] = pack_moments((total / positions).cpu().numpy())
        for name, width in self._unreached.items():
            packed[name] = empty_moments(width, is_diagonal=width > self._limit)
        return {name: torch.from_numpy(values) for name, values in packed.items()}, self._owners

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
        if len(rows) or own in self._owners:
            self._add(product.number, own, product.inputs, rows)
            self._owners |= {name: self._owners[own] for name, _ in matrix.stored}

    def _add(self, expert: int | None, name: str, inputs: torch.Tensor, rows: torch.Tensor) -> None:
        last = self._last.get(expert)
        if last is None or last[0] is not inputs:
            last = self._last[expert] = (inputs, name)
        owner = self._owners.setdefault(name, last[1])
        if owner == name:
            rows = rows.reshape(-1, inputs.shape[-1]).double()
            new = rows.T @ rows if inputs.shape[-1] <= self._limit else rows.square().sum(0)
            self._sums[name] = self._sums[name].add_(new) if name in self._sums else new

    def _end_module(self, name: str) -> None:
        self._pending.discard(name)
        if not self._pending:
            raise PassIsObserved


def _layers(loaded_model: LoadedModel, names: StoredNames, limit: int) -> tuple[list[_Layer], dict[str, Any]]:
    """Return the parts of the network in network order, and the parameters that contain experts, by name in memory.

    Linear layers with weights on disk are grouped by layer of the network. Each expert of a layer is its own part.
    """
    import torch

    parts: dict[tuple[str, int, int | None], _Layer] = {}
    experts = {}
    for path, module in loaded_model.network.named_modules():
        if isinstance(module, torch.nn.Linear):
            stored = names.find(f"{path}.weight")
            if stored is None or not is_projection(stored.name) or stored.shape != tuple(module.weight.shape):
                continue
            layer = parse_layer_place(stored.name)
            assert layer is not None, "a projection is in a layer"
            parts.setdefault((layer.stack, layer.index, None), _Layer(limit)).modules[stored.name] = module
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
                parts.setdefault((layer.stack, layer.index, matrix.number), _Layer(limit)).matrices.append(matrix)
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


@dataclass(frozen=True)
class _Parameter:
    """A parameter of the network, with the names of the stored tensors that contain it.

    Each stored tensor is the complete parameter. If the parameter contains the experts of a layer, each stored tensor
    is one of ``pieces``.
    """

    parameter: Any
    names: tuple[str, ...]
    pieces: tuple[ExpertSlice, ...] = ()

    @property
    def sum_bytes(self) -> int:
        return 4 * int(self.parameter.numel())

    @property
    def owners(self) -> dict[str, str]:
        """Name of the tensor in the artifact for each of ``names``. Tied tensors share the first one."""
        return {name: name for name in self.names} if self.pieces else dict.fromkeys(self.names, self.names[0])

    def split(self, total: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return the tensors to store for sums of the parameter's shape, by name."""
        if not self.pieces:
            return {self.names[0]: total}
        return {piece.tensor.name: _slice_of_piece(total, piece).contiguous() for piece in self.pieces}


class _SquaredGradients:
    """Sums of squared derivatives for some parameters of a network.

    Use it as a context manager. On exit, ``requires_grad`` of all parameters is restored.
    """

    def __init__(self, model: Model, network: Any, run: Sequence[_Parameter]) -> None:
        self._sums: dict[str, torch.Tensor] = {}
        self._model, self._network, self._run = model, network, run

    def __enter__(self) -> _SquaredGradients:
        self._previous = [(parameter, parameter.requires_grad) for parameter in self._network.parameters()]
        for parameter, _ in self._previous:
            parameter.requires_grad_(False)
        for part in self._run:
            part.parameter.requires_grad_(True)
        self._hooks = [
            part.parameter.register_post_accumulate_grad_hook(
                lambda parameter, name=part.names[0]: self._add(name, parameter)
            )
            for part in self._run
        ]
        return self

    def __exit__(self, *_: object) -> None:
        for hook in self._hooks:
            hook.remove()
        for parameter, requires_grad in self._previous:
            parameter.requires_grad_(requires_grad)
            parameter.grad = None

    def read(self, window: ReadWindow, number: int) -> None:
        """Sample a token at each new position of the model's own turns in ``window``, and add the squared derivatives.

        ``number`` is the seed of the sampling.
        """
        import torch

        device = self._network.device
        generator = torch.Generator().manual_seed(number)
        with torch.enable_grad():
            ids = torch.tensor([window.tokens], device=device)
            own = torch.tensor(window.own, device=device)
            if not own.any():
                return
            logits = self._network(input_ids=ids, use_cache=False).logits[0, -window.new_count :][own].float()
            require_numbers(logits, "its predictions", self._model)
            sampled = torch.multinomial(logits.detach().softmax(-1).cpu(), 1, generator=generator)[:, 0].to(device)
            loss = torch.nn.functional.cross_entropy(logits, sampled, reduction="sum")
            if loss.requires_grad:
                torch.autograd.backward(loss)

    def means(self, positions: int) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
        reached = [part for part in self._run if part.names[0] in self._sums]
        sums = {name: total for part in reached for name, total in part.split(self._sums[part.names[0]]).items()}
        for name, total in sums.items():
            require_numbers(total, name, self._model)
        means = {name: (total / positions).cpu().contiguous() for name, total in sums.items()}
        return means, {name: owner for part in reached for name, owner in part.owners.items()}

    def _add(self, name: str, parameter: Any) -> None:
        square = parameter.grad.float().square()
        parameter.grad = None
        self._sums[name] = self._sums[name].add_(square) if name in self._sums else square


def _parameters(loaded_model: LoadedModel, names: StoredNames) -> list[_Parameter]:
    """Return the parameters that are stored in the same shape or as separate experts, in network order."""
    parts: dict[int, tuple[Any, list[str]]] = {}
    experts: dict[int, tuple[ExpertSlice, ...]] = {}
    for path, parameter in loaded_model.network.named_parameters(remove_duplicate=False):
        if not parameter.is_floating_point():
            continue
        module, _, last = path.rpartition(".")
        stored = names.find(path)
        if stored is not None and stored.shape == tuple(parameter.shape):
            own = parts.setdefault(id(parameter), (parameter, []))[1]
            if stored.name not in own:
                own.append(stored.name)
        elif stored is None and (pieces := _pieces(parameter, names.find_parameter(module, last))):
            parts[id(parameter)] = (parameter, [piece.tensor.name for piece in pieces])
            experts[id(parameter)] = pieces
    return [_Parameter(parameter, tuple(own), experts.get(key, ())) for key, (parameter, own) in parts.items()]


def _pieces(parameter: Any, pieces: tuple[ExpertSlice, ...]) -> tuple[ExpertSlice, ...]:
    """Return ``pieces`` if together they are the complete parameter of the experts, otherwise an empty tuple."""
    if not pieces or any(piece.expert is None or piece.expert >= len(parameter) for piece in pieces):
        return ()
    fits = all(_slice_of_piece(parameter, piece).shape == piece.tensor.shape for piece in pieces)
    return pieces if fits and sum(piece.tensor.numel for piece in pieces) == parameter.numel() else ()


def _slice_of_piece(parameter: Any, piece: ExpertSlice) -> Any:
    """Return the part of an expert parameter that a stored tensor contains, transposed if it only fits that way."""
    expert, shape = parameter[piece.expert], piece.tensor.shape
    rows = expert[piece.first_row : piece.first_row + shape[0]]
    return expert.T if rows.shape != shape and expert.T.shape == shape else rows
