"""Refit the routers of a merged mixture of experts to the routing of its parents, while it reads texts (HARC).

Only the merge runs, in the model process. The parents contribute their routers, which the stage reads from their
checkpoints. Each router is fitted to the states that the new routers of the layers below produce. So each layer takes
one pass over the texts, which stops at its router. The states of one layer are in memory, one number of the network's
format for each position and dimension. Finished layers are on disk, so a killed stage resumes after them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

from mergegate.merge_core.adapters import StoredNames
from mergegate.merge_core.architecture import rename_to_layout
from mergegate.merge_core.architecture.experts import (
    RoutedText,
    RouterScore,
    find_routers,
    fit_router,
    match_experts,
    read_routers,
    routing_error,
    split_experts,
)
from mergegate.merge_core.checkpoint import AnyTensor, Checkpoint, config_parts, open_checkpoint
from mergegate.merge_core.errors import InvalidInput
from mergegate.merge_core.files import JOURNAL, JournalLocation, open_journal, sha256_file
from mergegate.merge_core.recipe import CalibrationReading, RouterRepair
from mergegate.tasks.base.stage import Runtime, StageValue, stage
from mergegate.tasks.base.store import NotInKey
from mergegate.tasks.merge.calibration import (
    CalibrationJob,
    PassIsObserved,
    ReadWindow,
    run_in_model_process,
    split_into_windows,
)
from mergegate.tasks.models.checkpoints import (
    LoadedModel,
    Model,
    PinnedCheckpoint,
    PinnedRecipe,
    TellProgress,
    load_model,
)
from mergegate.tasks.quality.perplexity import HeldOutText, read_documents_verbatim

if TYPE_CHECKING:
    import numpy as np
    import torch
    from numpy.typing import NDArray

FILES_OF_ROUTERS = "router-*.safetensors"


class RepairedLayer(StageValue):
    """Routing of one layer, as means over the texts of all parents. Pairs contain the values before and after.

    The values before are measured with the merged router of this layer and the new routers of the layers below.
    """

    module: str
    experts: int
    positions: int
    divergence: tuple[float, float]
    agreement: tuple[float, float]
    iterations: int
    replaced: bool  # False if the merged router is at least as close to those of the parents

    def summary(self) -> str:
        before, after = self.agreement
        return f"{self.module}: agreement {100 * before:.1f} → {100 * after:.1f} %"


class RouterRepairSummary(StageValue):
    """Summary of a repair. The artifact has one file for each layer with a new router."""

    model: Annotated[str, NotInKey]
    layers: tuple[RepairedLayer, ...]

    @property
    def new_layers(self) -> int:
        """Number of layers with a new router."""
        return sum(layer.replaced for layer in self.layers)

    def mean(self, measure: str) -> tuple[float, float]:
        """Return the mean of ``divergence`` or ``agreement`` over all layers, before and after."""
        pairs: list[tuple[float, float]] = [getattr(layer, measure) for layer in self.layers]
        before, after = (sum(values) / len(values) for values in zip(*pairs, strict=True))
        return before, after

    def summary(self) -> str:
        before, after = self.mean("agreement")
        agreement = f"agreement with the parents {100 * before:.1f} → {100 * after:.1f} %"
        return f"{self.new_layers} of {len(self.layers)} routers replaced · {agreement}"


class ParentRouters(NamedTuple):
    """One parent in a repair: its reference, its text, and its routers by the names of the merge's modules.

    A router is ``[experts, width]``, with the biases as its last column if it has them.
    """

    ref: str
    text: HeldOutText
    routers: Mapping[str, NDArray[np.float64]]


@dataclass(frozen=True)
class _NetworkRouter:
    """Router of one module of experts in memory, with the tensors on disk that it was loaded from.

    ``parameters`` are the weight and, if there are any, the biases. ``stored`` are the same tensors on disk.
    """

    module: str
    owner: Any
    parameters: tuple[Any, ...]
    stored: tuple[AnyTensor, ...]

    @property
    def shape(self) -> tuple[int, int]:
        experts, width = self.parameters[0].shape
        return int(experts), int(width)

    def matrix(self) -> torch.Tensor:
        """Return the router in float64, with the biases as its last column."""
        import torch

        return torch.cat([part.detach().double().reshape(len(part), -1) for part in self.parameters], dim=1)

    def change(self, matrix: torch.Tensor) -> None:
        """Change the network's router to ``matrix``, rounded to the format on disk."""
        width = self.shape[1]
        parts = (matrix[:, :width], matrix[:, width:])
        self.load(
            {
                tensor.name: part.reshape(tensor.shape).to(_torch_dtype(tensor))
                for tensor, part in zip(self.stored, parts, strict=False)
            }
        )

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return a copy of the router in float32, by the names on disk."""
        pairs = zip(self.stored, self.parameters, strict=True)
        return {tensor.name: part.detach().float().cpu().clone() for tensor, part in pairs}

    def load(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Change the network's router to ``tensors``."""
        import torch

        with torch.no_grad():
            for tensor, parameter in zip(self.stored, self.parameters, strict=True):
                parameter.copy_(tensors[tensor.name])


def repair_routers(
    job: CalibrationJob, parents: Sequence[ParentRouters], settings: RouterRepair, on_progress: TellProgress
) -> RouterRepairSummary:
    """Refit the routers of the model in ``job`` and write them. ``parents`` have the texts to read."""
    from safetensors.torch import load_file, save_file

    checkpoint = open_checkpoint(job.model.directory)
    top = _experts_per_token(checkpoint, job.model)
    layers: list[RepairedLayer] = []
    with (
        load_model(job.model, dtype=job.dtype, device=job.device) as loaded,
        open_journal(job.journal, _is_finished_layer) as journal,
    ):
        routers = _network_routers(loaded, checkpoint, job.model)
        windows = []
        for parent in parents:
            documents = read_documents_verbatim(parent.text, job.reading.documents)
            windows.append(list(split_into_windows(loaded, job.model, documents, job.reading.max_length)))
        done, total = 0, sum(map(len, windows)) * len(routers)

        def count_window() -> None:
            nonlocal done
            done += 1
            on_progress(done, total)

        merged = {router.module: router.tensors() for router in routers}
        try:
            for number, router in enumerate(routers):
                path = job.out / f"router-{number:05d}.safetensors"
                if number < len(journal.records):
                    layer = RepairedLayer.model_validate(journal.records[number]["layer"])
                    is_intact = not layer.replaced or (
                        path.is_file() and sha256_file(path) == journal.records[number]["sha256"]
                    )
                    if layer.module == router.module and is_intact:
                        if layer.replaced:
                            router.load(load_file(path))
                        layers.append(layer)
                        done += total // len(routers)
                        continue
                texts, score = [], None
                for parent, own_windows in zip(parents, windows, strict=True):
                    text, score = _read_states(loaded, job.model, router, top, parent, own_windows, count_window)
                    texts.append(text)
                assert score is not None  # a recipe has at least one parent
                start, selected = router.matrix(), min(top, router.shape[0])
                fit = fit_router(start, texts, off_diagonals=settings.off_diagonals, score=score)
                before = routing_error(start, texts, selected, score)
                router.change(fit.router)
                after = routing_error(router.matrix(), texts, selected, score)
                replaced = after.divergence < before.divergence
                if replaced:
                    save_file(router.tensors(), path)
                else:
                    router.load(merged[router.module])
                    path.unlink(missing_ok=True)
                final = after if replaced else before
                layers.append(
                    RepairedLayer(
                        module=router.module,
                        experts=router.shape[0],
                        positions=sum(len(text.inputs) for text in texts),
                        divergence=(before.divergence, final.divergence),
                        agreement=(before.agreement, final.agreement),
                        iterations=fit.iterations,
                        replaced=replaced,
                    )
                )
                sha256 = sha256_file(path) if replaced else ""
                journal.append({"sha256": sha256, "layer": layers[-1].model_dump(mode="json")})
        finally:  # The loaded model stays in memory for later calls.
            for router in routers:
                router.load(merged[router.module])
    return RouterRepairSummary(model=job.model.name, layers=tuple(layers))


def _is_finished_layer(record: object) -> bool:
    match record:
        case {"sha256": str(), "layer": dict()}:
            return True
    return False


def _torch_dtype(tensor: AnyTensor) -> torch.dtype:
    import torch

    dtype: torch.dtype = getattr(torch, tensor.dtype.torch_name)
    return dtype


def _experts_per_token(checkpoint: Checkpoint, model: Model) -> int:
    keys = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_top_k", "moe_k", "top_k_experts", "top_k")
    for part in config_parts(checkpoint.config):
        for key in keys:
            if type(value := part.get(key)) is int and value > 0:
                return value
    raise InvalidInput(
        f"{model.name}: config.json",
        found="no number of experts per token",
        expected=f"one of {', '.join(keys)}",
        remedy="remove router_repair",
    )


def _network_routers(loaded_model: LoadedModel, checkpoint: Checkpoint, model: Model) -> list[_NetworkRouter]:
    """Return the routers of all modules of experts, in network order."""
    names, found = StoredNames(split_experts(checkpoint)), dict[str, _NetworkRouter]()
    stored = {router.weight.name: router for router in find_routers(checkpoint).values()}
    for path, owner in loaded_model.network.named_modules():
        parameters = dict(owner.named_parameters(recurse=False))
        tensor = names.find(f"{path}.weight") if "weight" in parameters else None
        router = stored.get(tensor.name) if tensor is not None else None
        if router is None or tuple(parameters["weight"].shape) != router.weight.shape:
            continue
        own = [parameters.get(part) for part in ("weight", "bias")[: len(router.tensors)]]
        if all(parameter is not None for parameter in own):
            found[router.module] = _NetworkRouter(router.module, owner, tuple(own), router.tensors)
    missing = [router.weight.name for router in stored.values() if router.module not in found]
    if missing or not found:
        raise InvalidInput(
            f"{model.name}: {missing[0] if missing else 'experts'}",
            found="no such router in memory",
            expected="routers that are one matrix, with or without biases",
            remedy="remove router_repair",
        )
    return list(found.values())


def _read_states(
    loaded_model: LoadedModel,
    model: Model,
    router: _NetworkRouter,
    top: int,
    parent: ParentRouters,
    windows: Sequence[ReadWindow],
    on_window: Any,
) -> tuple[RoutedText, RouterScore]:
    """Return the states that enter ``router`` on a parent's text, with that parent's router, and its score function."""
    import torch

    from mergegate.tasks.merge.products import RouterProducts

    network, location = loaded_model.network, f"{model.name}: {router.stored[0].name}"
    rows: list[torch.Tensor] = []
    products = RouterProducts(router.owner, router.shape, top)
    try:
        for window in windows:
            products.states = None
            ids = torch.tensor([window.tokens], device=network.device)
            with torch.inference_mode(), products, suppress(PassIsObserved):
                network(input_ids=ids, use_cache=False)
            if products.states is None or len(products.states) != len(window.tokens) or products.score is None:
                raise InvalidInput(
                    location,
                    found="a router whose product or score function mergegate could not observe",
                    expected="states times one matrix, then softmax or sigmoid",
                    remedy="remove router_repair",
                )
            rows.append(products.states[-window.new_count :])
            on_window()
    finally:
        products.remove()
    inputs = torch.cat(rows) if rows else torch.zeros(0, router.shape[1])
    if len(inputs) < router.shape[1]:
        raise InvalidInput(
            f"{parent.text.path}",
            found=f"{len(inputs):,} tokens for {parent.ref}",
            expected=f"at least {router.shape[1]:,}, the width of the router's input, so that the text determines it",
            remedy="use a longer text, or raise statistics.documents",
        )
    if not torch.isfinite(inputs).all():
        raise InvalidInput(
            location,
            found=f"NaN or infinity on the text of {parent.ref}",
            expected="finite numbers",
            remedy="check whether the merge is damaged, or compute it in a wider format",
        )
    if len(router.parameters) > 1:
        inputs = torch.cat([inputs, torch.ones_like(inputs[:, :1])], dim=1)
    wanted = torch.from_numpy(parent.routers[router.module]).to(inputs.device)
    assert products.score is not None  # each window was observed
    return RoutedText(inputs, wanted), products.score


class RepairRequest(NamedTuple):
    """Text of each parent, and the settings for reading them and for the fit."""

    texts: tuple[tuple[PinnedCheckpoint, HeldOutText], ...]
    reading: CalibrationReading
    settings: RouterRepair


@stage("routers", version=1, subject="model", resumable=True)
def new_routers(
    out: Path, model: Model, pinned: PinnedRecipe, request: RepairRequest, dtype: str, runtime: Runtime
) -> RouterRepairSummary:
    """Compute new routers for ``model``, the merge of the recipe ``pinned``, resuming from a killed run's journal.

    Raises:
        InvalidInput: The merge cannot be loaded or cannot read a text, a text is too short, or a router cannot be
            observed or computes NaN or infinity.
    """
    matched = match_experts(pinned.recipe, {parent.ref: parent.open() for parent in pinned.parents})
    donor = split_experts(matched.checkpoints[str(pinned.recipe.donor)])
    parents = []
    for parent, text in request.texts:
        checkpoint = rename_to_layout(donor, split_experts(matched.checkpoints[parent.ref]))
        parents.append(ParentRouters(parent.ref, text, read_routers(find_routers(checkpoint).values())))
    journal = JournalLocation(out / JOURNAL, new_routers.key(model, pinned, request, dtype, runtime))
    job = CalibrationJob(model, request.texts[0][1], request.reading, dtype, runtime.device, out, journal)
    return run_in_model_process(repair_routers, job, tuple(parents), request.settings, noun="routers")
