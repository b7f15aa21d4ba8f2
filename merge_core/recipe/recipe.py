"""Define a parsed recipe: its models, slices and settings, and the values derived from them.

:func:`~merge_core.recipe.parser.load_recipe` creates recipes. Once the distances between models are measured,
:func:`select_models` drops or reweights models by them::

    merge_method: geometric_median      # derives the weights from the distances
    leave_out_beyond: 5                 # drops models whose task vector is longer than 5 medians; needs a base
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from mergegate.merge_core.checkpoint import DType
from mergegate.merge_core.errors import Finding
from mergegate.merge_core.methods import UPCYCLING, Method, find_method
from mergegate.merge_core.recipe.blocks import (
    AdapterOutput,
    CalibrationReading,
    CalibrationRequest,
    InputMeasurements,
    RepairedRouters,
    RouterRepair,
    TokenizerChoice,
)
from mergegate.merge_core.recipe.mixture import Mixture
from mergegate.merge_core.recipe.parameters import Condition, Parameters, Setting
from mergegate.merge_core.recipe.reference import CheckpointRef
from mergegate.merge_core.wording import format_count


@dataclass(frozen=True)
class Source:
    """One input of a slice: a model, a range of its layers, its parameters and its calibration text.

    ``layers`` is ``(first, end)``, without the end. None means all layers.
    """

    model: CheckpointRef
    layers: tuple[int, int] | None
    parameters: Parameters
    text: str | None = None


@dataclass(frozen=True)
class Slice:
    """Consecutive output layers that are merged from a layer range of the same length in each source."""

    sources: tuple[Source, ...]
    base: CheckpointRef | None
    parameters: Parameters
    location: str


@dataclass(frozen=True)
class Module:
    """A part of a network with its own layers. Without a ``name``, it is the entire network."""

    name: str | None
    slices: tuple[Slice, ...]
    parameters: Parameters


@dataclass(frozen=True)
class RelativeDistance:
    """Distance of one merged model from the base and from the other models.

    Args:
        length: Length of the model's task vector, divided by the median length over all models. None if the vector
            contains NaN or infinity.
        apart: Median distance to the other models, divided by the same median length. None without other models.
        left_out: Reason for leaving the model out, or an empty string.
    """

    length: float | None
    apart: float | None
    left_out: str = ""


@dataclass(frozen=True)
class Recipe:
    """A parsed merge recipe: the models to merge and how to merge them. Use :func:`load_recipe` to create one.

    Args:
        merge_method: Name of the method.
        modules: Parts of the network. A recipe without ``modules`` has one unnamed part.
        base: ``base_model``.
        dtype: Number format of the result unless ``out_dtype`` is set. Does not affect the format of arithmetic.
        out_dtype: Number format of the result. Takes precedence over ``dtype``.
        chat_template: Chat template, as written in the recipe.
        name: Name that other documents of a multi-document recipe use to refer to this one.
        directory: Directory in which relative paths are searched first. None for inline text.
        location: Location of the recipe for messages.
        parameters: Top-level parameters.
        tokenizer: ``tokenizer_source`` or ``tokenizer``. None selects the donor's tokenizer.
        steps: The other documents of a multi-document recipe, each after those that it needs.
        align_experts: Whether to renumber the experts of mixtures so that they correspond to those of the donor.
        drop_prediction_layers: Whether to leave out the layers for multi-token prediction.
        experts_in_order: Whether the experts have been matched; see
            :func:`merge_core.architecture.experts.match_experts`.
        mixture: Mixture of experts to build from dense models. None if the recipe merges models. With a mixture, the
            sources are the base and all experts, and ``merge_method`` is the name of
            :data:`merge_core.methods.UPCYCLING`.
        output: Settings of the adapter that the recipe produces. None if it produces a model.
        reading: Settings for reading the calibration texts, for recipes that read texts.
        measured: Measurements by model. None until the models have read their texts.
        router_repair: Settings for refitting the routers of the merge. None if they stay as merged.
        repaired: The new routers. None until the merge has read the texts.
        leave_out_beyond: Largest length of a task vector, in medians. Models with longer task vectors, NaN or infinity
            are left out.
        distances: Distances by model. None until measured; after that, the sources and their weights are final.
        findings: Warnings about this document. Cache keys exclude them, because two spellings of the same merge can
            cause different warnings.
    """

    merge_method: str
    modules: tuple[Module, ...]
    base: CheckpointRef | None
    dtype: DType | None
    out_dtype: DType | None
    chat_template: str | None
    name: str | None
    directory: Path | None
    location: str
    parameters: Parameters = field(default_factory=Parameters)
    tokenizer: TokenizerChoice | None = None
    steps: tuple[Recipe, ...] = ()
    align_experts: bool = False
    drop_prediction_layers: bool = False
    experts_in_order: bool = False
    mixture: Mixture | None = None
    output: AdapterOutput | None = None
    reading: CalibrationReading = field(default_factory=CalibrationReading)
    measured: Mapping[str, InputMeasurements] | None = None
    router_repair: RouterRepair | None = None
    repaired: RepairedRouters | None = None
    leave_out_beyond: float | None = None
    distances: Mapping[str, RelativeDistance] | None = None
    findings: tuple[Finding, ...] = ()

    @property
    def documents(self) -> tuple[Recipe, ...]:
        """All steps, followed by this document."""
        return (*self.steps, self)

    @property
    def all_findings(self) -> tuple[Finding, ...]:
        """Warnings about the steps, followed by those about this document."""
        return tuple(finding for document in self.documents for finding in document.findings)

    @property
    def method(self) -> Method:
        if self.mixture is not None:
            return UPCYCLING
        return find_method(self.merge_method, f"{self.location}: merge_method")

    @property
    def slices(self) -> tuple[Slice, ...]:
        """All slices of this document, in order."""
        return tuple(cut for module in self.modules for cut in module.slices)

    @property
    def sources(self) -> tuple[Source, ...]:
        """All sources of this document, in order."""
        return tuple(source for cut in self.slices for source in cut.sources)

    @property
    def needs_distances(self) -> bool:
        """Whether the distances between the models must be measured before the merge."""
        by_distance = self.mixture is None and self.method.traits.weights_by_distance
        return by_distance or self.leave_out_beyond is not None

    @property
    def left_out(self) -> dict[str, str]:
        """Reasons for leaving models out, by model. Empty until the distances have been measured."""
        return {model: item.left_out for model, item in (self.distances or {}).items() if item.left_out}

    @property
    def texts(self) -> dict[CheckpointRef, str]:
        """Path of each calibration text in this document, by model."""
        return {source.model: source.text for source in self.sources if source.text is not None}

    @property
    def reads_texts(self) -> bool:
        """Whether this document needs a calibration text for each model."""
        return self.router_repair is not None or (self.mixture is None and self.method.traits.reads_text is not None)

    @property
    def needs_statistics(self) -> bool:
        """Whether the models must be measured on their texts before the merge."""
        return bool(self.texts) and self.method.traits.reads_text is not None

    @property
    def calibration_requests(self) -> tuple[CalibrationRequest, ...]:
        """Measurements that this document needs of its models on their calibration texts."""
        if not self.needs_statistics:
            return ()
        statistic = str(self.method.traits.reads_text)
        return tuple(CalibrationRequest(str(ref), text, statistic, self.reading) for ref, text in self.texts.items())

    def calibration_results(self) -> dict[CalibrationRequest, InputMeasurements]:
        """Return the measurements that are available so far for all documents, by request."""
        results: dict[CalibrationRequest, InputMeasurements] = {}
        for document in self.documents:
            measured = document.measured or {}
            requests = [request for request in document.calibration_requests if request.model in measured]
            results |= {request: measured[request.model] for request in requests}
        return results

    def text_digests(self) -> dict[str, str]:
        """Return the SHA-256 digests of all texts that were read for all documents, by the paths in the recipe."""
        digests = {request.text: measured.text for request, measured in self.calibration_results().items()}
        for document in self.documents:
            own = document.repaired.texts if document.repaired else {}
            digests |= {text: own[str(ref)] for ref, text in document.texts.items() if str(ref) in own}
        return digests

    @property
    def donor(self) -> CheckpointRef:
        """Model that provides config, tokenizer and layout: the base or, without a base, the first model."""
        return self.base or self.sources[0].model

    def map_documents(self, change: Callable[[Recipe], Recipe]) -> Recipe:
        """Return the recipe with ``change`` applied to each document, or the recipe itself if nothing changes."""
        steps, own = tuple(change(step) for step in self.steps), change(self)
        return self if own is self and steps == self.steps else replace(own, steps=steps)

    def own_references(self) -> tuple[CheckpointRef, ...]:
        """Return all models that this document names: first the sources, then the base and the tokenizer's model."""
        references = [source.model for source in self.sources]
        references += [cut.base for cut in self.slices if cut.base]
        if self.base:
            references.append(self.base)
        if self.tokenizer and isinstance(self.tokenizer.source, CheckpointRef):
            references.append(self.tokenizer.source)
        return tuple(dict.fromkeys(references))

    def references(self) -> tuple[CheckpointRef, ...]:
        """Return all checkpoints that must exist before the merge, in order. Results of ``steps`` are not included."""
        results = {step.name for step in self.steps}
        references = [ref for document in self.documents for ref in document.own_references()]
        return tuple(dict.fromkeys(ref for ref in references if str(ref) not in results))

    def merged_references(self) -> tuple[CheckpointRef, ...]:
        """Return the checkpoints from :meth:`references` whose weights contribute to the result.

        This excludes models that only provide the tokenizer or the configuration, and a base from which the method only
        computes task vectors, even if the recipe lists that base among its models.
        """
        merged: dict[CheckpointRef, None] = {}
        for document in self.documents:
            method = document.method
            only_origin = method.has_task_vectors and not method.traits.merges_base
            for cut in document.slices:
                base = cut.base or document.base
                merged |= {source.model: None for source in cut.sources if not (only_origin and source.model == base)}
                if base is not None and method.traits.merges_base:
                    merged[base] = None
        return tuple(ref for ref in self.references() if ref in merged)

    def summary(self, noun: str = "") -> str:
        """Return a short description, for example ``ties of 2 over llama-base``. ``noun`` names the inputs."""
        models = {source.model for source in self.sources}
        if self.mixture is not None:
            shared = f" and {len(self.mixture.shared)} shared" if self.mixture.shared else ""
            return f"mixture of {len(self.mixture.experts)} experts{shared} over {self.base.name if self.base else ''}"
        others = models - {self.base} if self.base else models
        base = f" over {self.base.name}" if self.base and self.method.has_task_vectors else ""
        cuts = len(self.slices)
        slices = f" in {cuts} slices" if cuts > len(self.modules) else ""
        steps = f" after {len(self.steps)} steps" if self.steps else ""
        count = len(others) if base else len(models)
        inputs = format_count(count, noun) if noun else f"{count} adapters" if self.output else str(count)
        return f"{self.merge_method} of {inputs}{base}{slices}{steps}"

    def canonical(self) -> dict[str, Any]:
        """Return everything that determines the result, as JSON-compatible data. Equivalent recipes give equal data."""
        # Later additions to the format appear only if they are set, so that the keys of existing artifacts stay valid.
        switches = ("align_experts", "drop_prediction_layers")
        later: dict[str, Any] = {name: True for name in switches if getattr(self, name)}
        if self.mixture is not None:
            later["mixture"] = self.mixture.canonical()
        if self.output is not None:
            later["output"] = self.output.canonical()
        if self.distances is not None:
            later["chosen"] = {"left_out": sorted(self.left_out)}
        elif self.leave_out_beyond is not None:
            later["leave_out_beyond"] = self.leave_out_beyond
        if self.measured is not None:  # The measurements replace the names of the texts.
            later["measured"] = {model: measured.digest for model, measured in self.measured.items()}
        elif self.needs_statistics or (self.router_repair is not None and self.repaired is None):
            later["texts"] = {str(model): text for model, text in self.texts.items()}
            later["statistics"] = self.reading.canonical()
        if self.repaired is not None:
            later["routers"] = self.repaired.digest
        elif self.router_repair is not None:
            later["router_repair"] = self.router_repair.content_key()
        return {
            **later,
            "merge_method": self.merge_method,
            "base_model": str(self.base) if self.base else None,
            "parameters": self.parameters.canonical(),
            "dtype": self.dtype.torch_name if self.dtype else None,
            "out_dtype": self.out_dtype.torch_name if self.out_dtype else None,
            **(self.tokenizer.canonical() if self.tokenizer else {"tokenizer_source": None}),
            "chat_template": self.chat_template,
            "modules": [
                {
                    "name": module.name,
                    "parameters": module.parameters.canonical(),
                    "slices": [
                        {
                            "base_model": str(cut.base) if cut.base else None,
                            "parameters": cut.parameters.canonical(),
                            "sources": [
                                {
                                    "model": str(source.model),
                                    "layer_range": list(source.layers) if source.layers else None,
                                    "parameters": source.parameters.canonical(),
                                }
                                for source in cut.sources
                            ],
                        }
                        for cut in module.slices
                    ],
                }
                for module in self.modules
            ],
            "name": self.name,
            "steps": [step.canonical() for step in self.steps],
        }

    content_key = canonical  # Everything that determines the result belongs in a cache key.


def select_models(
    recipe: Recipe, distances: Mapping[str, RelativeDistance], shares: Mapping[str, float] | None
) -> Recipe:
    """Return ``recipe`` without the models that ``distances`` leaves out, and with the weights in ``shares``."""

    def with_share(source: Source) -> Source:
        share = (shares or {}).get(str(source.model))
        if share is None:
            return source
        settings = [setting for setting in source.parameters.settings if setting.name != "weight"]
        weight = Setting("weight", (Condition((share,), None, f"{recipe.location}: {source.model}"),))
        return replace(source, parameters=Parameters((*settings, weight)))

    def select_sources(cut: Slice) -> Slice:
        left_out = [model for model, distance in distances.items() if distance.left_out]
        return replace(
            cut, sources=tuple(with_share(source) for source in cut.sources if str(source.model) not in left_out)
        )

    modules = (replace(module, slices=tuple(map(select_sources, module.slices))) for module in recipe.modules)
    return replace(recipe, modules=tuple(modules), distances=dict(distances))
