"""What flows into each matrix of a model while it reads a text: done in the process that holds models.

The text goes through the network window by window, alone in its batch, so there is no padding. In front of every linear
layer inside a layer of the network stands a hook that adds ``x x'`` of each
position to a sum in float64, in one place for modules that are given the very same tensor (query, key and value; gate
and up). The sums of all layers of a large model need more memory than the model: so a run of layers is measured at a
time, as many as fit, the text is read once for each run and no further than its last layer, and what is done is written
and kept when the stage is killed.

An expert of a mixture sees the tokens that are sent to it. Where the experts of a layer are one parameter, each has its
sums all the same (:mod:`.expert_products`), under the names that its matrices have one by one, whatever the layout on
disk. As a layer of many experts may itself not fit, each expert counts as a layer of its own in a run. Means are over
all positions of the text, so an expert counts by how often it is asked; of one that no position reached that is kept.
Experts whose products are not seen are named, and stay the mean of the models.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from mergegate.merge_core.adapters import ExpertPlace, StoredNames
from mergegate.merge_core.architecture import input_width, is_inputs_first, is_projection, parse_layer_place
from mergegate.merge_core.architecture.experts import split_experts
from mergegate.merge_core.checkpoint import (
    empty_moments,
    moments_file_name,
    open_checkpoint,
    open_moments,
    pack_moments,
    write_inputs,
)
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

    from mergegate.tasks.merge.expert_products import ExpertProduct


class InputStatistics(StageValue):
    """What was measured. The artifact is as :mod:`merge_core.checkpoint.moments` says."""

    model: Annotated[str, NotInKey]
    documents: int
    positions: int
    inputs: int  # that are distinct
    matrices: int
    widest: int
    squares: int  # inputs of which only the squares are kept
    unreached: int = 0  # inputs of experts to which no position was sent
    unseen: tuple[str, ...] = ()  # matrices of experts whose products are computed in a way that nobody sees

    def summary(self) -> str:
        said = f"{self.positions:,} positions of {self.documents} documents · {self.inputs} inputs"
        # What a text does not show stays the mean of the models.
        said += f", the widest of {self.widest:,}: a longer text tells more" if self.is_thin else ""
        said += f" · {self.unreached} of experts that no position reached" if self.unreached else ""
        return said + (f" · not seen, so the mean: {', '.join(self.unseen)}" if self.unseen else "")

    @property
    def is_thin(self) -> bool:
        """Whether the text has fewer positions than its widest input has numbers."""
        return self.positions < self.widest


@dataclass(frozen=True)
class _ExpertMatrix:
    """One expert's share of a parameter.

    Args:
        parameter: Its name in memory.
        number: The expert's.
        stored: Names on disk, and shapes, of what that is there: gate and up may be two.
    """

    parameter: str
    number: int
    stored: tuple[tuple[str, tuple[int, ...]], ...]

    @property
    def width(self) -> int:
        """How many numbers flow in."""
        return input_width(*self.stored[0])

    def is_given(self, product: ExpertProduct) -> bool:
        """Whether that is what flows into it, as the disk has it."""
        name, shape = self.stored[0]
        # Where it lies as [in, out] on disk and not in memory, only different sizes say that it was turned on the way.
        turned = product.inputs_first or not is_inputs_first(name) or shape[0] != shape[1]
        return product.given.ndim == 2 and product.given.shape[-1] == self.width and turned


@dataclass
class _Part:
    """What must be measured together: the linear layers of one layer, by the names of their matrices on disk; or what
    one expert has of each parameter of its layer."""

    modules: dict[str, Any] = field(default_factory=dict)
    matrices: list[_ExpertMatrix] = field(default_factory=list)

    @property
    def widths(self) -> dict[str, int]:
        """How many numbers flow into each matrix."""
        own = {name: int(module.weight.shape[1]) for name, module in self.modules.items()}
        return own | {name: matrix.width for matrix in self.matrices for name, _ in matrix.stored}

    def size(self, limit: int) -> int:
        """Bytes of all sums, if no two modules share an input."""
        widths = [int(module.weight.shape[1]) for module in self.modules.values()]
        widths += [matrix.width for matrix in self.matrices]
        return sum(8 * (width**2 if width <= limit else width) for width in widths)


class _RunIsMeasured(Exception):
    """The last layer of the run has been entered: the rest of the network need not be computed."""


class _Sums:
    """What flows into the parts of a run, added up. Use it in ``with``.

    Args:
        loaded: The network.
        run: Its parts, in the order of the network.
        experts: Parameters of all experts of a layer, by name in memory.
        limit: Of wider inputs only squares.
    """

    def __init__(self, loaded: LoadedModel, run: Sequence[_Part], experts: Mapping[str, Any], limit: int) -> None:
        self.of: dict[str, torch.Tensor] = {}
        self.owner: dict[str, str] = {}
        self.unreached: dict[str, int] = {}  # Widths.
        self._network, self._limit = loaded.network, limit
        self._modules = {name: module for part in run for name, module in part.modules.items()}
        self._matrices = {(one.parameter, one.number): one for part in run for one in part.matrices}
        self._kinds = {one.parameter: one for one in self._matrices.values()}  # Any of them: all have the same sizes.
        self._parameters = {name: experts[name] for name in self._kinds}
        self._fitting: set[str] = set()  # Parameters of which a product was seen, of whichever expert.
        self._new, self._overlap = slice(None), 0
        # Of linear layers (None), and of each expert: what was given last, and to which matrix.
        self._last: dict[int | None, tuple[Any, str]] = {}
        self._left: set[str] = set()

    def __enter__(self) -> _Sums:
        self._hooks = [
            module.register_forward_pre_hook(lambda _, given, name=name: self._see(name, given[0]))
            for name, module in self._modules.items()
        ]
        self._around = ExitStack()
        if self._parameters:
            from mergegate.tasks.merge.expert_products import ExpertProducts, experts_one_by_one

            modules = {name: self._network.get_submodule(name.rpartition(".")[0]) for name in self._parameters}
            for name, module in modules.items():
                self._hooks.append(module.register_forward_hook(lambda *_, name=name: self._is_done(name)))
            self._around.enter_context(experts_one_by_one(modules.values()))
            self._around.enter_context(ExpertProducts(self._parameters, self._see_expert))
        return self

    def __exit__(self, *_: object) -> None:
        self._around.close()
        for hook in self._hooks:
            hook.remove()
        for matrix in self._matrices.values():
            (own, _), *others = matrix.stored
            if matrix.parameter in self._fitting and own not in self.owner:
                self.owner |= dict.fromkeys((own, *(name for name, _ in others)), own)
                self.unreached[own] = matrix.width

    def read(self, window: ReadWindow) -> None:
        """Add the positions of ``window`` that no window before had."""
        import torch

        self._last, self._left = {}, self._modules.keys() | self._parameters.keys()
        self._overlap = len(window.tokens) - window.new
        self._new = slice(self._overlap, None)
        ids = torch.tensor([window.tokens], device=self._network.device)
        with torch.inference_mode(), suppress(_RunIsMeasured):
            self._network(input_ids=ids, use_cache=False)

    def _see(self, name: str, given: torch.Tensor) -> None:
        # What is sent to an expert is no longer in the order of the text: its overlap is not told apart here.
        self._add(None, name, given, given[0, self._new] if given.ndim == 3 else given)
        self._is_done(name)

    def _see_expert(self, product: ExpertProduct) -> None:
        if not self._kinds[product.parameter].is_given(product):
            return
        self._fitting.add(product.parameter)
        matrix = self._matrices.get((product.parameter, product.number))
        if matrix is None:  # Of another run.
            return
        rows = product.given
        if self._overlap and product.positions is not None:
            rows = rows[product.positions >= self._overlap]
        own = matrix.stored[0][0]
        if len(rows) or own in self.owner:
            self._add(product.number, own, product.given, rows)
            self.owner |= {name: self.owner[own] for name, _ in matrix.stored}

    def _add(self, expert: int | None, name: str, given: torch.Tensor, rows: torch.Tensor) -> None:
        last = self._last.get(expert)
        if last is None or last[0] is not given:
            last = self._last[expert] = (given, name)
        owner = self.owner.setdefault(name, last[1])
        if owner == name:
            rows = rows.reshape(-1, given.shape[-1]).double()
            new = rows.T @ rows if given.shape[-1] <= self._limit else rows.square().sum(0)
            self.of[name] = self.of[name].add_(new) if name in self.of else new

    def _is_done(self, name: str) -> None:
        self._left.discard(name)
        if not self._left:
            raise _RunIsMeasured


def read_inputs(
    model: Model,
    text: HeldOutText,
    reading: CalibrationReading,
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
    documents = read_documents_verbatim(text, reading.documents)
    stored = split_experts(open_checkpoint(model.directory))
    limit = reading.diagonal_above
    with load_model(model, dtype=dtype, device=device) as loaded, open_journal(place, is_entry_of_run) as journal:
        windows = list(windows_of(loaded, model, documents, reading.max_length))
        positions = sum(window.new for window in windows)
        parts, experts = _parts(loaded, StoredNames(stored))
        done = kept_runs(journal.records, out, moments_file_name)
        owner = {name: own for record in done for name, own in record["owner"].items()}
        left = [part for part in parts if not part.widths.keys() <= owner.keys()]
        runs = in_runs(left, lambda part: part.size(limit))
        total = len(windows) * max(len(runs), 1)
        for number, run in enumerate(runs):
            with _Sums(loaded, run, experts, limit) as sums:
                for count, window in enumerate(windows, start=1):
                    sums.read(window)
                    on_progress(number * len(windows) + count, total)
            path = out / moments_file_name(len(done) + number)
            _write(path, sums, limit, positions=positions, model=model)
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
        kept = open_moments(out)
        own = [kept[name] for name in set(owner.values())]
        return InputStatistics(
            model=model.name,
            documents=len(documents),
            positions=positions,
            inputs=len(own),
            matrices=len(owner),
            widest=max(one.width for one in own),
            squares=sum(one.is_diagonal for one in own),
            unreached=sum(one.is_empty for one in own),
            unseen=unseen_experts(stored, owner),
        )


def _parts(loaded: LoadedModel, names: StoredNames) -> tuple[list[_Part], dict[str, Any]]:
    """What is to be measured, in the order of the network; and the parameters of experts, by name in memory.

    Linear layers whose weights lie on disk go by layer of the network; each expert of a layer goes by itself.
    """
    import torch

    parts: dict[tuple[str, int, int | None], _Part] = {}
    experts = {}
    for path, module in loaded.network.named_modules():
        if isinstance(module, torch.nn.Linear):
            stored = names.find(f"{path}.weight")
            if stored is None or not is_projection(stored.name) or stored.shape != tuple(module.weight.shape):
                continue
            at = parse_layer_place(stored.name)
            assert at is not None, "a projection stands in a layer"
            parts.setdefault((at.stack, at.index, None), _Part()).modules[stored.name] = module
            continue
        for last, parameter in module.named_parameters(recurse=False):
            name = f"{path}.{last}"
            matrices = _matrices(name, names.find_parameter(path, last)) if parameter.ndim == 3 else []
            if {one.number for one in matrices} != set(range(len(parameter))):
                continue
            experts[name] = parameter
            for one in matrices:
                at = parse_layer_place(one.stored[0][0])
                assert at is not None, "a projection stands in a layer"
                parts.setdefault((at.stack, at.index, one.number), _Part()).matrices.append(one)
    return list(parts.values()), experts


def _matrices(parameter: str, places: Sequence[ExpertPlace]) -> list[_ExpertMatrix]:
    """What lies on disk of a parameter of experts; empty where that is not the matrices of each."""
    found: dict[int, list[tuple[str, tuple[int, ...]]]] = {}
    for place in places:
        if place.experts is None or len(place.tensor.shape) != 2 or not is_projection(place.tensor.name):
            return []
        found.setdefault(place.experts, []).append((place.tensor.name, place.tensor.shape))
    widths = {input_width(*one) for every in found.values() for one in every}
    return [_ExpertMatrix(parameter, number, tuple(own)) for number, own in found.items()] if len(widths) == 1 else []


def _write(path: Path, sums: _Sums, limit: int, *, positions: int, model: Model) -> None:
    import torch
    from safetensors.torch import save_file

    for name, total in sums.of.items():
        require_numbers(total, name, model)
    kept = {name: pack_moments((total / positions).cpu().numpy()) for name, total in sums.of.items()}
    kept |= {name: empty_moments(width, is_diagonal=width > limit) for name, width in sums.unreached.items()}
    save_file({name: torch.from_numpy(values) for name, values in kept.items()}, path)
