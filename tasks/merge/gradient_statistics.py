"""How much each element of a model matters to what it says on a text: done in the process that holds models.

The text goes through the network window by window. At each position (of a conversation: where it is the model's turn)
the model itself draws what it would say next, and
the derivative of the log-likelihood of all that it drew is squared, element by element: its mean over documents is the
diagonal of the Fisher information. (Squares of a whole batch, or of the answers that stand in the text, are another
thing.) The derivative of one tensor is squared as soon as it is there and goes before that of the next one comes, so
that of sums, as many as fit, each is held once; the rest is measured in further runs.

Of experts that are one parameter in memory each element is kept under the tensor that it is on disk, one expert by one,
whatever the layout there; those that no position reached matter nothing. Parameters of experts that lie otherwise on
disk are named, and stay the mean of the models.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from mergegate.merge_core.adapters import ExpertPlace, StoredNames
from mergegate.merge_core.architecture.experts import split_experts
from mergegate.merge_core.checkpoint import importance_file_name, open_checkpoint, write_importance
from mergegate.merge_core.errors import InvalidInput
from mergegate.merge_core.files import JournalPlace, open_journal
from mergegate.merge_core.recipe import CalibrationReading
from mergegate.tasks.checkpoints import LoadedModel, Model, TellProgress, load_model
from mergegate.tasks.merge.layer_windows import (
    ReadWindow,
    entry_of_run,
    in_runs,
    is_entry_of_run,
    kept_runs,
    require_numbers,
    unseen_experts,
    windows_of,
)
from mergegate.tasks.perplexity import HeldOutText, read_documents_verbatim
from mergegate.tasks.stage import StageValue
from mergegate.tasks.store import NotInKey

if TYPE_CHECKING:
    import torch


class ImportanceStatistics(StageValue):
    """What was measured. The artifact is as :mod:`merge_core.checkpoint.importance` says."""

    model: Annotated[str, NotInKey]
    documents: int
    positions: int
    tensors: int
    parameters: int
    unseen: tuple[str, ...] = ()  # parameters of experts that lie otherwise on disk

    def summary(self) -> str:
        said = f"{self.positions:,} positions of {self.documents} documents · {self.parameters:,} parameters"
        return said + (f" · not seen, so the mean: {', '.join(self.unseen)}" if self.unseen else "")


@dataclass(frozen=True)
class _Part:
    """A parameter of the network, and the stored tensors that it is.

    Args:
        parameter: In memory.
        names: Of stored tensors, each of which is all of it; of experts, of each piece.
        pieces: Where it is the experts of a layer: what lies on disk of each.
    """

    parameter: Any
    names: tuple[str, ...]
    pieces: tuple[ExpertPlace, ...] = ()

    @property
    def owner(self) -> dict[str, str]:
        """By which tensor each name is kept."""
        return {name: name for name in self.names} if self.pieces else dict.fromkeys(self.names, self.names[0])

    def kept(self, total: torch.Tensor) -> dict[str, torch.Tensor]:
        """What is kept of sums of the parameter's shape."""
        if not self.pieces:
            return {self.names[0]: total}
        return {piece.tensor.name: _of_piece(total, piece).contiguous() for piece in self.pieces}


class _SquaredGradients:
    """Sums of squared derivatives, of some parameters of a network. Use it in ``with``: what asks for derivatives
    before does so afterwards."""

    def __init__(self, model: Model, network: Any, run: Sequence[_Part]) -> None:
        self.of: dict[str, torch.Tensor] = {}
        self._model, self._network, self._run = model, network, run

    def __enter__(self) -> _SquaredGradients:
        self._asking = [(one, one.requires_grad) for one in self._network.parameters()]
        for parameter, _ in self._asking:
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
        for parameter, asked in self._asking:
            parameter.requires_grad_(asked)
            parameter.grad = None

    def read(self, window: ReadWindow, seed: int) -> None:
        """Add the square of what the model would say at its own positions of ``window`` that no window before had."""
        import torch

        device = self._network.device
        chance = torch.Generator().manual_seed(seed)
        with torch.enable_grad():
            ids = torch.tensor([window.tokens], device=device)
            own = torch.tensor(window.own, device=device)
            if not own.any():
                return
            logits = self._network(input_ids=ids, use_cache=False).logits[0, -window.new :][own].float()
            require_numbers(logits, "what it would say next", self._model)
            drawn = torch.multinomial(logits.detach().softmax(-1).cpu(), 1, generator=chance)[:, 0].to(device)
            unlikely = torch.nn.functional.cross_entropy(logits, drawn, reduction="sum")
            if unlikely.requires_grad:
                torch.autograd.backward(unlikely)

    def _add(self, name: str, parameter: Any) -> None:
        square = parameter.grad.float().square()
        parameter.grad = None
        self.of[name] = self.of[name].add_(square) if name in self.of else square


def read_gradients(
    model: Model,
    text: HeldOutText,
    reading: CalibrationReading,
    dtype: str,
    device: str,
    out: Path,
    place: JournalPlace,
    on_progress: TellProgress,
) -> ImportanceStatistics:
    """Write how much each element of ``model`` matters to what it says on ``text`` into the directory ``out``.

    Raises:
        InvalidInput: when the model cannot be loaded or read the text, has no parameter under a name that is known, or
            computes no numbers.
    """
    documents = read_documents_verbatim(text, reading.documents)
    with load_model(model, dtype=dtype, device=device) as loaded, open_journal(place, is_entry_of_run) as journal:
        windows = list(windows_of(loaded, model, documents, reading.max_length))
        positions = sum(sum(window.own) for window in windows)
        if not positions:
            raise InvalidInput(
                str(text.path),
                found=f"nothing that {model.name} would say",
                expected="texts, or conversations with messages of the role 'assistant'",
            )
        stored = split_experts(open_checkpoint(model.directory))
        parts = _parts(loaded, StoredNames(stored))
        done = kept_runs(journal.records, out, importance_file_name)
        owner = {name: own for record in done for name, own in record["owner"].items()}
        runs = in_runs((part for part in parts if part.names[0] not in owner), lambda one: 4 * one.parameter.numel())
        total = len(windows) * max(len(runs), 1)
        for number, run in enumerate(runs):
            with _SquaredGradients(model, loaded.network, run) as squares:
                for count, window in enumerate(windows):
                    squares.read(window, seed=count)
                    on_progress(number * len(windows) + count + 1, total)
            path = out / importance_file_name(len(done) + number)
            told = [part for part in run if part.names[0] in squares.of]
            sums = {name: total for part in told for name, total in part.kept(squares.of[part.names[0]]).items()}
            _write(path, sums, positions=positions, model=model)
            own = {name: kept for part in told for name, kept in part.owner.items()}
            journal.append(entry_of_run(path, own))
            owner |= own
        if not owner:
            raise InvalidInput(
                f"{model.name} ({model.directory})",
                found="no parameter that matters to what it says",
                expected="a transformer with parameters under names that are known",
                remedy="merge it with a method that reads no text",
            )
        write_importance(out, owner, positions)
        return ImportanceStatistics(
            model=model.name,
            documents=len(documents),
            positions=positions,
            tensors=len(set(owner.values())),
            parameters=sum(part.parameter.numel() for part in parts if part.names[0] in owner),
            unseen=unseen_experts(stored, owner),
        )


def _parts(loaded: LoadedModel, names: StoredNames) -> list[_Part]:
    """The parameters that lie on disk as they are in memory, or expert by expert, in the order of the network."""
    found: dict[int, tuple[Any, list[str]]] = {}
    experts: dict[int, tuple[ExpertPlace, ...]] = {}
    for path, parameter in loaded.network.named_parameters(remove_duplicate=False):
        if not parameter.is_floating_point():
            continue
        stored = names.find(path)
        if stored is not None and stored.shape == tuple(parameter.shape):
            own = found.setdefault(id(parameter), (parameter, []))[1]
            if stored.name not in own:
                own.append(stored.name)
        elif stored is None and (pieces := _pieces(parameter, names.find_parameter(*_split(path)))):
            found[id(parameter)] = (parameter, [piece.tensor.name for piece in pieces])
            experts[id(parameter)] = pieces
    return [_Part(parameter, tuple(own), experts.get(at, ())) for at, (parameter, own) in found.items()]


def _split(path: str) -> tuple[str, str]:
    module, _, last = path.rpartition(".")
    return module, last


def _pieces(parameter: Any, places: tuple[ExpertPlace, ...]) -> tuple[ExpertPlace, ...]:
    """``places``, if they are the whole of a parameter of experts; else none."""
    if not places or any(place.experts is None or place.experts >= len(parameter) for place in places):
        return ()
    fits = all(_of_piece(parameter, place).shape == place.tensor.shape for place in places)
    return places if fits and sum(place.tensor.numel for place in places) == parameter.numel() else ()


def _of_piece(whole: Any, place: ExpertPlace) -> Any:
    """What a stored tensor is of a parameter of experts. It may be turned: sizes say so."""
    own, shape = whole[place.experts], place.tensor.shape
    rows = own[place.first_row : place.first_row + shape[0]]
    return own.T if rows.shape != shape and own.T.shape == shape else rows


def _write(path: Path, sums: dict[str, torch.Tensor], *, positions: int, model: Model) -> None:
    from safetensors.torch import save_file

    for name, total in sums.items():
        require_numbers(total, name, model)
    save_file({name: (total / positions).cpu().contiguous() for name, total in sums.items()}, path)
