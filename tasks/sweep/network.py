"""One network in memory, into which one merge after another is copied. In the process that holds models only.

The first candidate of a structure goes the way of a release: the engine writes it, transformers loads it with all that
it knows of the family (names that changed, tensors that it joins, weights that are tied). What is in the network then
is compared with what was written, name by name. Where each tensor of the network is that tensor of the files, further
candidates of the same structure are copied in as they are merged, one tensor at a time. Where one is not (transformers
computes it from others), or weights that the network ties differ in a candidate, it is written and loaded like the
first: slower, and never wrong.
"""

from __future__ import annotations

import hashlib
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from mergegate.merge_core import (
    Checkpoint,
    EngineSettings,
    MergePlan,
    load_recipe,
    merge_tensors,
    merge_weights,
    plan_merge,
)
from mergegate.merge_core.files import sha256_file
from mergegate.merge_core.methods import PASSTHROUGH
from mergegate.tasks.checkpoints import LoadedModel, Model, load_private_model
from mergegate.tasks.store import digest

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class CandidateMergeSettings:
    """How candidates are merged.

    Args:
        seed: Of the random masks.
        device: Where they are computed.
        threads: That compute.
    """

    seed: int
    device: str
    threads: int

    @property
    def engine(self) -> EngineSettings:
        """Compiled kernels: they take a third of the time of a small merge, and are kept for all that come."""
        return EngineSettings(threads=self.threads, kernels="fused")


class Stopwatch:
    """Seconds of wall time by what they were spent on.

    Args:
        alive: Called now and then: whoever waits for a long trial must not take it for dead.
    """

    def __init__(self, alive: Callable[[], None] = lambda: None) -> None:
        self.seconds: dict[str, float] = {}
        self.alive = alive

    @contextmanager
    def on(self, what: str) -> Iterator[None]:
        """Count the time of ``with`` as that of ``what``."""
        began = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[what] = self.seconds.get(what, 0.0) + time.perf_counter() - began
            self.alive()


def structure_of(plan: MergePlan, seen: dict[Path, str]) -> str:
    """Digest of all that decides which network ``plan`` makes, and how it reads text, without its weights.

    Args:
        seen: sha256 of the files beside the weights that were looked at before; added to.
    """
    beside = {}
    for name, source in plan.companions.sources.items():
        if isinstance(source, bytes):
            beside[name] = hashlib.sha256(source).hexdigest()
            continue
        path = source / name
        if path not in seen:
            seen[path] = sha256_file(path)
        beside[name] = seen[path]
    return digest(
        {
            "config": plan.config,
            "tensors": [
                [tensor.name, tensor.dtype.code, list(tensor.shape)] for shard in plan.shards for tensor in shard.stored
            ],
            "beside": beside,
        }
    )


@dataclass(frozen=True)
class CandidateNetwork:
    """A network with the weights of the last candidate.

    Args:
        loaded: It and its tokenizer.
        structure: See :func:`structure_of`.
        places: Of each tensor of the files, that of the network which it is copied to. Empty: it has to be loaded.
        twins: Tensors of the files that share their place with one before: they must be equal.
    """

    loaded: LoadedModel
    structure: str
    places: Mapping[str, torch.Tensor]
    twins: frozenset[str]

    def fill(self, plan: MergePlan, how: CandidateMergeSettings, watch: Stopwatch, change: Change | None) -> bool:
        """Merge ``plan`` into the network; False where it does not fit, and the network holds nothing that is whole.

        Raises:
            MergegateError: as :func:`merge_core.merge_tensors`.
        """
        import torch

        if not self.places:
            return False
        tensors = merge_tensors(plan, seed=how.seed, device=how.device, settings=how.engine)
        base = change.begin(plan) if change else None
        with torch.no_grad():
            while True:
                with watch.on("merge"):
                    name, merged = next(tensors, ("", None))
                if merged is None:
                    return True
                with watch.on("load"):
                    place = self.places.get(name)
                    if name in self.twins:
                        if place is None or not torch.equal(place, merged.to(place)):
                            return False
                    elif place is not None:
                        place.copy_(merged)
                if change and base:
                    with watch.on("change"):
                        change.add(name, merged, base)


@dataclass
class Change:
    """How far merges are from their base: ``|merge - base| / |base|`` over all tensors that both have.

    Args:
        base: The base, with its adapter if it has one.
    """

    base: Checkpoint
    _squares: dict[str, float] = field(default_factory=dict)  # of the base's tensors, by name
    _seen: float = 0.0
    _moved: float = 0.0

    def __post_init__(self) -> None:
        recipe = load_recipe({"merge_method": PASSTHROUGH.name, "models": [{"model": "base"}]})
        self._plan = plan_merge(recipe, {"base": self.base})
        self._shapes = {one.name: one.shape for shard in self._plan.shards for one in shard.stored}

    def begin(self, plan: MergePlan) -> Iterator[tuple[str, torch.Tensor]]:
        """Begin with a candidate; the tensors of the base in the order in which those of the candidate will come."""
        self._seen = self._moved = 0.0
        stored = [one for shard in plan.shards for one in shard.stored]
        self._common = {
            one.name for one in stored if one.dtype.kind == "float" and self._shapes.get(one.name) == one.shape
        }
        return merge_tensors(self._plan, names=[one.name for one in stored if one.name in self._common])

    def add(self, name: str, merged: torch.Tensor, base: Iterator[tuple[str, torch.Tensor]]) -> None:
        """Add a tensor of the candidate."""
        if name not in self._common:
            return
        before = next(base)[1].double()
        if name not in self._squares:
            self._squares[name] = float(before.square().sum())
        self._seen += self._squares[name]
        self._moved += float((merged.double() - before).square_().sum())

    def measure(self, plan: MergePlan, how: CandidateMergeSettings) -> None:
        """Merge a candidate once more, for this alone."""
        base = self.begin(plan)
        for name, merged in merge_tensors(plan, seed=how.seed, device=how.device, settings=how.engine):
            self.add(name, merged, base)

    @property
    def relative(self) -> float:
        """Of the candidate that was begun last; NaN where it has nothing in common with the base."""
        return float((self._moved / self._seen) ** 0.5) if self._seen else float("nan")


def network_from_files(
    plan: MergePlan,
    structure: str,
    how: CandidateMergeSettings,
    dtype: str,
    device: str,
    runs_code: bool,
    watch: Stopwatch,
) -> CandidateNetwork:
    """Write the merge of ``plan`` where temporary files go, load it, and see which tensor went where.

    Raises:
        MergegateError: The merge is refused, or what came out cannot be loaded.
    """
    with tempfile.TemporaryDirectory(prefix="mergegate-trial-") as name:
        place = Path(name)
        with watch.on("write"):
            record = merge_weights(plan, place, seed=how.seed, device=how.device, settings=how.engine)
            for finding in record.findings:
                if finding.severity == "block":
                    raise finding.refusal()
        with watch.on("load"):
            model = Model(name="candidate", digest=structure, directory=place, runs_code=runs_code)
            loaded = load_private_model(model, dtype=dtype, device=device)
            places, twins = _places(loaded, place)
    return CandidateNetwork(loaded, structure, places, twins)


def _places(loaded: LoadedModel, directory: Path) -> tuple[dict[str, torch.Tensor], frozenset[str]]:
    """Where in the network the tensors of the files are; nothing, unless they are all that is in it."""
    import torch
    from safetensors import safe_open

    state: dict[str, torch.Tensor] = loaded.network.state_dict(keep_vars=False)
    places: dict[str, torch.Tensor] = {}
    twins: set[str] = set()
    filled: set[tuple[int, int]] = set()  # address and size
    for file in sorted(directory.glob("*.safetensors")):
        with safe_open(file, framework="pt") as stored:
            for name in stored.keys():  # noqa: SIM118  # no mapping, though it has keys
                own = state.get(name)
                if own is None:
                    continue
                tensor = stored.get_tensor(name)
                if tensor.shape != own.shape or not torch.equal(tensor.to(own), own):
                    continue
                where = (own.data_ptr(), own.numel())
                if where in filled:
                    twins.add(name)
                filled.add(where)
                places[name] = own
    everything = {(tensor.data_ptr(), tensor.numel()) for tensor in state.values()}
    return (places, frozenset(twins)) if filled == everything else ({}, frozenset())
