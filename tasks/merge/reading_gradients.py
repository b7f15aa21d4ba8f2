"""How much each element of a model matters to what it says on a text: done in the process that holds models.

The text goes through the network window by window. At each position (of a conversation: where it is the model's turn)
the model itself draws what it would say next, and
the derivative of the log-likelihood of all that it drew is squared, element by element: its mean over documents is the
diagonal of the Fisher information. (Squares of a whole batch, or of the answers that stand in the text, are another
thing.) The derivative of one tensor is squared as soon as it is there and goes before that of the next one comes, so
that of sums, as many as fit, each is held once; the rest is measured in further runs.

Of experts that are one parameter in memory nothing is measured.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from merge_core.adapters import StoredNames
from merge_core.architecture import is_routed_expert
from merge_core.checkpoint import file_of_importance, open_checkpoint, write_importance
from merge_core.errors import InvalidInput
from merge_core.recipe import ReadingOfTexts
from merge_core.store import JournalPlace, NotInKey, open_journal
from tasks.checkpoints import LoadedModel, Model, TellProgress, load_model
from tasks.merge.reading_runs import (
    ReadWindow,
    entry_of_run,
    in_runs,
    is_entry_of_run,
    kept_runs,
    require_numbers,
    windows_of,
)
from tasks.perplexity import HeldOutText, read_own_documents
from tasks.stage import StageValue

if TYPE_CHECKING:
    import torch


class ImportanceStatistics(StageValue):
    """What was measured. The artifact is as :mod:`merge_core.checkpoint.importance` says."""

    model: Annotated[str, NotInKey]
    documents: int
    positions: int
    tensors: int
    parameters: int

    def summary(self) -> str:
        return f"{self.positions:,} positions of {self.documents} documents · {self.parameters:,} parameters"


@dataclass(frozen=True)
class _Part:
    """A parameter of the network, and the names of the stored tensors that it is."""

    parameter: Any
    names: tuple[str, ...]

    @property
    def owner(self) -> dict[str, str]:
        return dict.fromkeys(self.names, self.names[0])


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
    reading: ReadingOfTexts,
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
    documents = read_own_documents(text, reading.documents)
    with load_model(model, dtype=dtype, device=device) as loaded, open_journal(place, is_entry_of_run) as journal:
        windows = list(windows_of(loaded, model, documents, reading.max_length))
        positions = sum(sum(window.own) for window in windows)
        if not positions:
            raise InvalidInput(
                str(text.path),
                found=f"nothing that {model.name} would say",
                expected="texts, or conversations with messages of the role 'assistant'",
            )
        parts = _parts(loaded, model)
        done = kept_runs(journal.records, out, file_of_importance)
        owner = {name: own for record in done for name, own in record["owner"].items()}
        runs = in_runs((part for part in parts if part.names[0] not in owner), lambda one: 4 * one.parameter.numel())
        total = len(windows) * max(len(runs), 1)
        for number, run in enumerate(runs):
            with _SquaredGradients(model, loaded.network, run) as squares:
                for count, window in enumerate(windows):
                    squares.read(window, seed=count)
                    on_progress(number * len(windows) + count + 1, total)
            path = out / file_of_importance(len(done) + number)
            _write(path, squares.of, positions=positions, model=model)
            own = {name: kept for part in run for name, kept in part.owner.items() if kept in squares.of}
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
        )


def _parts(loaded: LoadedModel, model: Model) -> list[_Part]:
    """The parameters that lie on disk as they are in memory, in the order of the network."""
    names = StoredNames(open_checkpoint(model.directory))
    found: dict[int, tuple[Any, list[str]]] = {}
    for path, parameter in loaded.network.named_parameters(remove_duplicate=False):
        stored = names.find(path)
        if stored is None or stored.shape != tuple(parameter.shape) or not parameter.is_floating_point():
            continue
        if not is_routed_expert(stored.name) and stored.name not in found.setdefault(id(parameter), (parameter, []))[1]:
            found[id(parameter)][1].append(stored.name)
    return [_Part(parameter, tuple(own)) for parameter, own in found.values()]


def _write(path: Path, sums: dict[str, torch.Tensor], *, positions: int, model: Model) -> None:
    from safetensors.torch import save_file

    for name, total in sums.items():
        require_numbers(total, name, model)
    save_file({name: (total / positions).cpu().contiguous() for name, total in sums.items()}, path)
