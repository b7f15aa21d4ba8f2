"""Keep one network in memory, and copy one candidate after another into it. Runs only in the model process.

The engine writes the first candidate of a structure to files, and transformers loads them. If every tensor of the
network equals a tensor of the files, later candidates with the same structure are merged and copied into the network
tensor by tensor. If a tensor differs (transformers computes it from others), or if a candidate has different values for
tensors that the network ties, every such candidate is written and loaded like the first. This is slower, but correct.
"""

from __future__ import annotations

import hashlib
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

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
class NetworkSettings:
    """Settings for merging candidates and for loading their network.

    Args:
        seed: Seed of the random masks.
        merge_device: Device that merges are computed on.
        threads: Number of compute threads.
        dtype: Format of the network's weights.
        device: Device of the network.
    """

    seed: int
    merge_device: str
    threads: int
    dtype: str
    device: str

    @property
    def merge_options(self) -> dict[str, Any]:
        """Arguments for :func:`merge_core.merge_tensors` and :func:`merge_core.merge_weights`.

        Compiled kernels take a third of the time of a small merge, and are reused for all later merges.
        """
        engine = EngineSettings(threads=self.threads, kernels="fused")
        return {"seed": self.seed, "device": self.merge_device, "settings": engine}


class Stopwatch:
    """Wall time in seconds, by activity.

    Args:
        alive: Callback after each activity, so that the parent process does not consider a long trial dead. Default: do
            nothing.
    """

    def __init__(self, alive: Callable[[], None] = lambda: None) -> None:
        self.seconds: dict[str, float] = {}
        self.alive = alive

    @contextmanager
    def measure(self, activity: str) -> Iterator[None]:
        """Add the time of the ``with`` block to ``activity``."""
        began = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[activity] = self.seconds.get(activity, 0.0) + time.perf_counter() - began
            self.alive()


def structure_digest(plan: MergePlan, digests: dict[Path, str]) -> str:
    """Return a digest of a merged model without its weights: its config, tensor shapes and other files.

    ``digests`` is a cache of the sha256 digests of these files, to which new ones are added.
    """
    file_digests = {}
    for name, source in plan.companions.sources.items():
        if isinstance(source, bytes):
            file_digests[name] = hashlib.sha256(source).hexdigest()
            continue
        path = source / name
        if path not in digests:
            digests[path] = sha256_file(path)
        file_digests[name] = digests[path]
    return digest(
        {
            "config": plan.config,
            "tensors": [
                [tensor.name, tensor.dtype.code, list(tensor.shape)] for shard in plan.shards for tensor in shard.stored
            ],
            "beside": file_digests,
        }
    )


@dataclass(frozen=True)
class CandidateNetwork:
    """Network with the weights of the last candidate.

    Args:
        loaded: Network and tokenizer.
        structure: Digest from :func:`structure_digest`.
        targets: Tensor of the network for each tensor of the candidate, by name. Empty if candidates cannot be copied.
        tied: Names of candidate tensors that share their network tensor with an earlier one and must equal it.
    """

    loaded: LoadedModel
    structure: str
    targets: Mapping[str, torch.Tensor]
    tied: frozenset[str]

    def fill(self, plan: MergePlan, settings: NetworkSettings, watch: Stopwatch, distance: BaseDistance | None) -> bool:
        """Merge ``plan`` into the network, and return whether the merge fits. If not, the weights are unusable.

        Raises:
            MergegateError: See :func:`merge_core.merge_tensors`.
        """
        import torch

        if not self.targets:
            return False
        tensors = merge_tensors(plan, **settings.merge_options)
        base = distance.begin(plan) if distance else None
        with torch.no_grad():
            while True:
                with watch.measure("merge"):
                    name, merged = next(tensors, ("", None))
                if merged is None:
                    return True
                with watch.measure("load"):
                    target = self.targets.get(name)
                    if name in self.tied:
                        if target is None or not torch.equal(target, merged.to(target)):
                            return False
                    elif target is not None:
                        target.copy_(merged)
                if distance and base:
                    with watch.measure("change"):
                        distance.add(name, merged, base)


@dataclass
class BaseDistance:
    """Measurement of a candidate's change: ``|merge - base| / |base|`` over all tensors that both have.

    ``base`` is the base checkpoint, with its adapter if it has one.
    """

    base: Checkpoint
    _squares: dict[str, float] = field(default_factory=dict)  # squared norms of the base's tensors, by name
    _base_square: float = 0.0
    _change_square: float = 0.0

    def __post_init__(self) -> None:
        recipe = load_recipe({"merge_method": PASSTHROUGH.name, "models": [{"model": "base"}]})
        self._plan = plan_merge(recipe, {"base": self.base})
        self._shapes = {tensor.name: tensor.shape for shard in self._plan.shards for tensor in shard.stored}

    def begin(self, plan: MergePlan) -> Iterator[tuple[str, torch.Tensor]]:
        """Start a candidate, and return the tensors that the base shares with it, in the candidate's order."""
        self._base_square = self._change_square = 0.0
        stored = [tensor for shard in plan.shards for tensor in shard.stored]
        self._common = {
            tensor.name
            for tensor in stored
            if tensor.dtype.kind == "float" and self._shapes.get(tensor.name) == tensor.shape
        }
        return merge_tensors(self._plan, names=[tensor.name for tensor in stored if tensor.name in self._common])

    def add(self, name: str, merged_tensor: torch.Tensor, base: Iterator[tuple[str, torch.Tensor]]) -> None:
        """Add a tensor of the candidate. ``base`` comes from :meth:`begin`."""
        if name not in self._common:
            return
        before = next(base)[1].double()
        if name not in self._squares:
            self._squares[name] = float(before.square().sum())
        self._base_square += self._squares[name]
        self._change_square += float((merged_tensor.double() - before).square_().sum())

    def measure(self, plan: MergePlan, settings: NetworkSettings) -> None:
        """Merge a candidate again, only to measure its change."""
        base = self.begin(plan)
        for name, merged in merge_tensors(plan, **settings.merge_options):
            self.add(name, merged, base)

    @property
    def relative(self) -> float:
        """Relative change of the last candidate. NaN if it has no tensor in common with the base."""
        return float((self._change_square / self._base_square) ** 0.5) if self._base_square else float("nan")


def load_network(
    plan: MergePlan, structure: str, settings: NetworkSettings, runs_code: bool, watch: Stopwatch
) -> CandidateNetwork:
    """Write the merge of ``plan`` to a temporary directory, and load its network from there.

    Raises:
        MergegateError: The merge is refused, or its result cannot be loaded.
    """
    with tempfile.TemporaryDirectory(prefix="mergegate-trial-") as name:
        directory = Path(name)
        with watch.measure("write"):
            record = merge_weights(plan, directory, **settings.merge_options)
            for finding in record.findings:
                if finding.severity == "block":
                    raise finding.refusal()
        with watch.measure("load"):
            model = Model(name="candidate", digest=structure, directory=directory, runs_code=runs_code)
            loaded = load_private_model(model, dtype=settings.dtype, device=settings.device)
            targets, tied = _map_tensors(loaded, directory)
    return CandidateNetwork(loaded, structure, targets, tied)


def _map_tensors(loaded_model: LoadedModel, directory: Path) -> tuple[dict[str, torch.Tensor], frozenset[str]]:
    """Return ``targets`` and ``tied`` of :class:`CandidateNetwork`.

    Both are empty unless every tensor of the network equals a tensor of the files.
    """
    import torch
    from safetensors import safe_open

    state: dict[str, torch.Tensor] = loaded_model.network.state_dict(keep_vars=False)
    targets: dict[str, torch.Tensor] = {}
    tied: set[str] = set()
    filled: set[tuple[int, int]] = set()  # address and size
    for file in sorted(directory.glob("*.safetensors")):
        with safe_open(file, framework="pt") as stored:
            for name in stored.keys():  # noqa: SIM118  # has keys() but cannot be iterated
                target = state.get(name)
                if target is None:
                    continue
                tensor = stored.get_tensor(name)
                if tensor.shape != target.shape or not torch.equal(tensor.to(target), target):
                    continue
                storage = (target.data_ptr(), target.numel())
                if storage in filled:
                    tied.add(name)
                filled.add(storage)
                targets[name] = target
    all_storages = {(tensor.data_ptr(), tensor.numel()) for tensor in state.values()}
    return (targets, frozenset(tied)) if filled == all_storages else ({}, frozenset())
