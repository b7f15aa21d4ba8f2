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

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

from merge_core.adapters import StoredNames
from merge_core.architecture import is_projection, layer_place
from merge_core.checkpoint import file_of_moments, open_checkpoint, packed_moments, write_inputs
from merge_core.errors import InvalidInput
from merge_core.recipe import ReadingOfTexts
from merge_core.store import JournalPlace, NotInKey, open_journal, sha256_file
from merge_core.system import system_memory
from tasks.checkpoints import LoadedModel, Model, TellProgress, load_model
from tasks.perplexity import HeldOutText, encode_text, read_texts
from tasks.stage import StageValue

if TYPE_CHECKING:
    import torch

# Of the memory that is available once the model is loaded, what sums may take; and what they always may.
_SHARE, _LEAST = 0.5, 256 << 20


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


class _Window(NamedTuple):
    """Tokens that are read at once; the last ``new`` of them were in no window before."""

    tokens: list[int]
    new: int


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

    def read(self, loaded: LoadedModel, window: _Window) -> None:
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
    texts = read_texts(text, reading.documents)
    with load_model(model, dtype=dtype, device=device) as loaded, open_journal(place, _is_record) as journal:
        windows = list(_windows(loaded, model, [text for _, text in texts], reading.max_length))
        positions = sum(window.new for window in windows)
        layers = _layers(loaded, model)
        done = _kept(journal.records, out)
        owner = {name: own for record in done for name, own in record["owner"].items()}
        left = [layer for layer in layers if not layer.modules.keys() <= owner.keys()]
        runs = _runs(left, reading.diagonal_above)
        total = len(windows) * max(len(runs), 1)
        for number, run in enumerate(runs):
            with _Sums(
                {name: module for layer in run for name, module in layer.modules.items()}, reading.diagonal_above
            ) as sums:
                for count, window in enumerate(windows, start=1):
                    sums.read(loaded, window)
                    on_progress(number * len(windows) + count, total)
            file = file_of_moments(len(done) + number)
            _write(out / file, sums.of, positions=positions, model=model)
            journal.append({"file": file, "sha256": sha256_file(out / file), "owner": sums.owner})
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
            documents=len(texts),
            positions=positions,
            inputs=len(own),
            matrices=len(owner),
            widest=max(own),
            squares=squares,
        )


def _windows(loaded: LoadedModel, model: Model, texts: Sequence[str], most: int) -> Iterator[_Window]:
    """Every token of every text in one window; one that would be short begins with context from before. A text begins
    as its model's tokenizer begins it for whoever asks: what is measured is what will flow."""
    length = min(most, loaded.context or most)
    for text in texts:
        tokens = encode_text(loaded, model, text, with_specials=True)
        for start in range(0, len(tokens), length):
            end = min(start + length, len(tokens))
            yield _Window(tokens[max(0, end - length) : end], end - start)


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


def _runs(layers: Sequence[_Layer], limit: int) -> list[list[_Layer]]:
    """Layers whose sums fit into memory together; at least one at a time."""
    memory = system_memory()
    room = max(_LEAST, int(_SHARE * memory.available)) if memory else _LEAST
    runs: list[list[_Layer]] = []
    taken = 0
    for layer in layers:
        size = layer.size(limit)
        if not runs or taken + size > room:
            runs.append([])
            taken = 0
        runs[-1].append(layer)
        taken += size
    return runs


def _is_record(record: object) -> bool:
    match record:
        case {"file": str(), "sha256": str(), "owner": dict()}:
            return True
    return False


def _kept(records: Iterable[Mapping[str, Any]], out: Path) -> list[Mapping[str, Any]]:
    """What a killed run has measured, as far as it lies there as it was written; nothing else lies there."""
    done: list[Mapping[str, Any]] = []
    for record in records:
        path = out / file_of_moments(len(done))
        if record["file"] != path.name or not path.is_file() or sha256_file(path) != record["sha256"]:
            break
        done.append(record)
    expected = {record["file"] for record in done}
    for path in out.glob("*.safetensors"):
        if path.name not in expected:
            path.unlink()
    return done


def _write(path: Path, sums: Mapping[str, torch.Tensor], *, positions: int, model: Model) -> None:
    import torch
    from safetensors.torch import save_file

    kept = {}
    for name, total in sums.items():
        if not torch.isfinite(total).all():
            raise InvalidInput(
                f"{model.name}: {name}",
                found="inputs that are not finite, of its own text",
                expected="numbers",
                remedy="the model is damaged, or computed in a format that is too narrow for it",
            )
        kept[name] = torch.from_numpy(packed_moments((total / positions).cpu().numpy()))
    save_file(kept, path)
