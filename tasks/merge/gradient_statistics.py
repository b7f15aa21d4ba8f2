"""Measure how much each element of a model matters to its predictions on a text, in the model process.

The network reads one window at a time. At each position (in a conversation: at each position of the model's own turn),
the next token is sampled from the model's own prediction. The derivative of the log-likelihood of all sampled tokens is
squared element by element, and the mean of the squares is the diagonal of the Fisher information. The derivative for a
whole batch, or for the tokens that are actually in the text, would measure something else.

The derivative of a tensor is squared as soon as it is available and freed before the next one is computed, so memory
only has to hold one sum per tensor. If the sums of all tensors do not fit, they are measured in several runs.

If experts share one parameter in memory, each expert is stored separately, under the tensor names of separate experts
whatever the layout on disk. Experts that no position reached have an importance of zero. Experts with an unknown layout
on disk are listed by parameter name and merged by the mean of the models.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from mergegate.merge_core.adapters import ExpertSlice, StoredNames
from mergegate.merge_core.architecture.experts import split_experts
from mergegate.merge_core.checkpoint import IMPORTANCE, measurement_file_name, open_checkpoint, write_measurement
from mergegate.merge_core.errors import InvalidInput
from mergegate.tasks.checkpoints import LoadedModel, Model, TellProgress, load_model
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


@dataclass(frozen=True)
class _Part:
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

    def __init__(self, model: Model, network: Any, run: Sequence[_Part]) -> None:
        self.sums: dict[str, torch.Tensor] = {}
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

    def read(self, window: ReadWindow, seed: int) -> None:
        """Sample a token at each new position of the model's own turns in ``window``, and add the squared derivatives.

        ``seed`` is the seed of the sampling.
        """
        import torch

        device = self._network.device
        generator = torch.Generator().manual_seed(seed)
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

    def _add(self, name: str, parameter: Any) -> None:
        square = parameter.grad.float().square()
        parameter.grad = None
        self.sums[name] = self.sums[name].add_(square) if name in self.sums else square


def read_gradients(job: CalibrationJob, on_progress: TellProgress) -> ImportanceStatistics:
    """Measure how much each element of a model matters to its predictions on a text, and write the importance.

    ``on_progress`` receives the number of windows read and their total number.

    Raises:
        InvalidInput: The model cannot be loaded or cannot read the text, has no parameter with a known name, or
            computes NaN or infinity.
    """
    documents = read_documents_verbatim(job.text, job.reading.documents)
    with load_model(job.model, dtype=job.dtype, device=job.device) as loaded:
        windows = list(split_into_windows(loaded, job.model, documents, job.reading.max_length))
        positions = sum(sum(window.own) for window in windows)
        if not positions:
            raise InvalidInput(
                str(job.text.path),
                found=f"no text that {job.model.name} would write",
                expected="plain documents, or conversations with messages of the role 'assistant'",
            )
        stored = split_experts(open_checkpoint(job.model.directory))
        parts = _parts(loaded, StoredNames(stored))

        def measure(run: Sequence[_Part], path: Path, report: Callable[[int], None]) -> dict[str, str]:
            from safetensors.torch import save_file

            with _SquaredGradients(job.model, loaded.network, run) as squares:
                for count, window in enumerate(windows):
                    squares.read(window, seed=count)
                    report(count + 1)
            reached = [part for part in run if part.names[0] in squares.sums]
            sums = {name: total for part in reached for name, total in part.split(squares.sums[part.names[0]]).items()}
            for name, total in sums.items():
                require_numbers(total, name, job.model)
            save_file({name: (total / positions).cpu().contiguous() for name, total in sums.items()}, path)
            return {name: owner for part in reached for name, owner in part.owners.items()}

        file_name = partial(measurement_file_name, IMPORTANCE)
        owners = measure_in_runs(job, parts, len(windows), file_name, measure, on_progress)
    write_measurement(job.out / IMPORTANCE, owners, positions)
    return ImportanceStatistics(
        model=job.model.name,
        documents=len(documents),
        positions=positions,
        tensors=len(set(owners.values())),
        parameters=sum(part.parameter.numel() for part in parts if part.names[0] in owners),
        unseen=unmeasured_experts(stored, owners),
    )


def _parts(loaded_model: LoadedModel, names: StoredNames) -> list[_Part]:
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
    return [_Part(parameter, tuple(own), experts.get(key, ())) for key, (parameter, own) in parts.items()]


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
