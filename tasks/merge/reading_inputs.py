"""What flows into each matrix of a model while it reads a text: done in the process that holds models.

The text goes through the network window by window, alone in its batch, so there is no padding. In front of every linear
layer inside a layer of the network stands a hook that adds ``x x'`` of each
position to a sum in float64, in one place for modules that are given the very same tensor (query, key and value; gate
and up). The sums of all layers of a large model need more memory than the model: so a run of layers is measured at a
time, as many as fit, the text is read once for each run and no further than its last layer, and what is done is written
and kept when the stage is killed.

Of a mixture whose experts are modules, an expert sees the tokens that are sent to it. Experts that are one parameter
have no input of their own here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from merge_core.adapters import StoredNames
from merge_core.architecture import is_projection, layer_place
from merge_core.checkpoint import file_of_moments, open_checkpoint, packed_moments, write_inputs
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


class InputStatistics(StageValue):
    """What was measured. The artifact is as :mod:`merge_core.checkpoint.moments` says."""

    model: Annotated[str, NotInKey]
    documents: int
    positions: int
    inputs: int  # that are distinct
    matrices: int
    widest: int
    squares: int  # inputs of which only the squares are kept

    def summary(self) -> str:
        said = f"{self.positions:,} positions of {self.documents} documents · {self.inputs} inputs"
        # What a text does not show stays the mean of the models.
        return said + (f", the widest of {self.widest:,}: a longer text tells more" if self.is_thin else "")

    @property
    def is_thin(self) -> bool:
        """Whether the text has fewer positions than its widest input has numbers."""
        return self.positions < self.widest


@dataclass
class _Layer:
    """A run of modules that must be measured together: one layer, by the names of its matrices on disk."""

    modules: dict[str, Any] = field(default_factory=dict)

    def size(self, limit: int) -> int:
        """Bytes of all sums, if no two modules share an input."""
        widths = [int(module.weight.shape[1]) for module in self.modules.values()]
        return sum(8 * (width**2 if width <= limit else width) for width in widths)


class _RunIsMeasured(Exception):
    """The last layer of the run has been entered: the rest of the network need not be computed."""


class _Sums:
    """Hooks in front of modules, and what they add up. Use it in ``with``.

    Args:
        modules: By the names of their matrices on disk, in the order of the network.
        limit: Of wider inputs only squares.
    """

    def __init__(self, modules: Mapping[str, Any], limit: int) -> None:
        self.of: dict[str, torch.Tensor] = {}
        self.owner: dict[str, str] = {}
        self._modules, self._limit = modules, limit
        self._last: tuple[Any, str] | None = None
        self._positions = slice(None)
        self._left: set[str] = set()

    def __enter__(self) -> _Sums:
        self._hooks = [
            module.register_forward_pre_hook(lambda _, given, name=name: self._see(name, given[0]))
            for name, module in self._modules.items()
        ]
        return self

    def __exit__(self, *_: object) -> None:
        for hook in self._hooks:
            hook.remove()

    def read(self, loaded: LoadedModel, window: ReadWindow) -> None:
        """Add the positions of ``window`` that no window before had."""
        import torch

        self._last, self._left = None, set(self._modules)
        self._positions = slice(len(window.tokens) - window.new, None)
        network = loaded.network
        with torch.inference_mode():
            try:
                network(input_ids=torch.tensor([window.tokens], device=network.device), use_cache=False)
            except _RunIsMeasured:
                return

    def _see(self, name: str, given: torch.Tensor) -> None:
        if self._last is None or self._last[0] is not given:
            self._last = (given, name)
        owner = self.owner.setdefault(name, self._last[1])
        if owner == name:
            # What is sent to an expert is no longer in the order of the text, and has no window's overlap to leave out.
            rows = given[0, self._positions] if given.ndim == 3 else given
            rows = rows.reshape(-1, given.shape[-1]).double()
            new = rows.T @ rows if given.shape[-1] <= self._limit else rows.square().sum(0)
            self.of[name] = self.of[name].add_(new) if name in self.of else new
        self._left.discard(name)
        if not self._left:
            raise _RunIsMeasured


def read_inputs(
    model: Model,
    text: HeldOutText,
    reading: ReadingOfTexts,
    dtype: str,
    device: str,
    out: Path,
    place: JournalPlace,
    on_progress: TellProgress,
) -> InputStatistics:
    """Write what flows into each matrix of ``model`` while it reads ``text`` into the directory ``out``.

    Raises:
        InvalidInput: when the model cannot be loaded or read the text, has no linear layer under a name that is known,
            or computes no numbers.
    """
    documents = read_own_documents(text, reading.documents)
    with load_model(model, dtype=dtype, device=device) as loaded, open_journal(place, is_entry_of_run) as journal:
        windows = list(windows_of(loaded, model, documents, reading.max_length))
        positions = sum(window.new for window in windows)
        layers = _layers(loaded, model)
        done = kept_runs(journal.records, out, file_of_moments)
        owner = {name: own for record in done for name, own in record["owner"].items()}
        left = [layer for layer in layers if not layer.modules.keys() <= owner.keys()]
        runs = in_runs(left, lambda layer: layer.size(reading.diagonal_above))
        total = len(windows) * max(len(runs), 1)
        for number, run in enumerate(runs):
            with _Sums(
                {name: module for layer in run for name, module in layer.modules.items()}, reading.diagonal_above
            ) as sums:
                for count, window in enumerate(windows, start=1):
                    sums.read(loaded, window)
                    on_progress(number * len(windows) + count, total)
            path = out / file_of_moments(len(done) + number)
            _write(path, sums.of, positions=positions, model=model)
            journal.append(entry_of_run(path, sums.owner))
            owner |= sums.owner
        if not owner:
            raise InvalidInput(
                f"{model.name} ({model.directory})",
                found="no linear layer through which the text flows",
                expected="a transformer with linear layers under names that are known",
                remedy="merge it with a method that reads no text",
            )
        write_inputs(out, owner, positions)
        widths = {name: int(module.weight.shape[1]) for layer in layers for name, module in layer.modules.items()}
        own = [widths[name] for name in set(owner.values())]
        squares = sum(width > reading.diagonal_above for width in own)
        return InputStatistics(
            model=model.name,
            documents=len(documents),
            positions=positions,
            inputs=len(own),
            matrices=len(owner),
            widest=max(own),
            squares=squares,
        )


def _layers(loaded: LoadedModel, model: Model) -> list[_Layer]:
    """The linear layers whose weights lie on disk, by layer of the network in its order."""
    import torch

    names = StoredNames(open_checkpoint(model.directory))
    layers: dict[tuple[str, int], _Layer] = {}
    for path, module in loaded.network.named_modules():
        if not isinstance(module, torch.nn.Linear):
            continue
        stored = names.find(f"{path}.weight")
        if stored is None or not is_projection(stored.name) or stored.shape != tuple(module.weight.shape):
            continue
        at = layer_place(stored.name)
        assert at is not None, "a projection stands in a layer"
        layers.setdefault((at.stack, at.index), _Layer()).modules[stored.name] = module
    return list(layers.values())


def _write(path: Path, sums: Mapping[str, torch.Tensor], *, positions: int, model: Model) -> None:
    import torch
    from safetensors.torch import save_file

    kept = {}
    for name, total in sums.items():
        require_numbers(total, name, model)
        kept[name] = torch.from_numpy(packed_moments((total / positions).cpu().numpy()))
    save_file(kept, path)
