"""Collect the facts about a release that the card, the compliance sheet and the bill of materials state.

Each fact has a source: the profile (``publish.about``), the merged checkpoint, the evaluation, or the card of a parent.
A fact without a source is missing: it is empty or None, and the documents list it as missing. The same inputs give the
same facts, so they contain no dates and no measured times.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mergegate.merge_core.checkpoint import config_parts, read_gguf_header, read_header
from mergegate.merge_core.errors import InvalidInput
from mergegate.merge_core.parsing import read_json
from mergegate.tasks.checkpoints import PinnedRecipe
from mergegate.tasks.evaluation import Scores
from mergegate.tasks.merge import MergeSummary
from mergegate.tasks.preflight.licenses import LicenseVerdict
from mergegate.tasks.publish.compute import Modification, merge_computation
from mergegate.tasks.publish.content import ReleaseFile
from mergegate.tasks.publish.parent_facts import ParentFacts, parent_facts
from mergegate.tasks.publish.provenance import MergeRelease
from mergegate.tasks.publish.public_names import PublicNames
from mergegate.tasks.publish.settings import AboutRelease, Supplier
from mergegate.tasks.publish.targets.contract import PublishTarget
from mergegate.tasks.report import ReportContent
from mergegate.tasks.store import Artifact
from mergegate.tasks.variants import CalibrationSettings

# Keys of a configuration that are sizes, and those that are settings of the network.
_SIZE_KEY = re.compile(r"(num|n|max|d)_[a-z0-9_]+|[a-z0-9_]+_(size|dim|rank|layers|heads|experts|window|embd)|r")
_SETTING_KEYS = ("hidden_act", "rope_theta", "lora_alpha", "tie_word_embeddings")
_NO_SIZES = re.compile(r".*(_id|_ids|token|labels|return_sequences|max_length|max_new).*")


@dataclass(frozen=True)
class DatasetFacts:
    """A dataset that a release was evaluated on or calibrated with.

    Attributes:
        name: Name of the task, or public path of a text.
        purpose: ``evaluation``, ``perplexity`` or ``calibration``.
        digest: 64 hex digits that pin the data, or empty.
        documents: Number of documents that were used, or None if unknown.
        sources: Datasets on the Hub, as ``id@revision``. Empty for local data.
    """

    name: str
    purpose: str
    digest: str = ""
    documents: int | None = None
    sources: tuple[str, ...] = ()


@dataclass(frozen=True)
class ReleaseFacts:
    """Facts about a release.

    Attributes:
        name: Name of the release.
        address: Reference for ``mergegate verify``. '.' for a local directory.
        hub_id: Id ``org/name`` of the repository on the Hub, or None.
        about: Statements of the publisher, with the supplier filled in from the Hub repository if it is known.
        architecture: Class of the model, such as ``LlamaForCausalLM``, or empty.
        model_type: Type in ``config.json``, such as ``llama``, or empty.
        hyperparameters: Sizes in ``config.json``, such as ``hidden_size``.
        parameters: Number of parameters of the released weights, or None if unknown.
        dtypes: Types of the stored weights, such as ``BF16``, the most frequent first.
        method: Description of the merge, such as ``ties of 2 over base``.
        parents: Facts about each parent, in the recipe's order. For variants, the release of the merge.
        datasets: Datasets of the evaluation, the perplexity check and the calibration.
        modification: Sizes that bound the computation.
        ancestors: For variants, facts about the parents of the merge. Empty for a merge.
        supplier_source: ``publish.about`` or ``Hub repository``. Empty if the supplier is unknown.
    """

    name: str
    address: str
    hub_id: str | None
    about: AboutRelease
    architecture: str
    model_type: str
    hyperparameters: Mapping[str, int | float | str]
    parameters: int | None
    dtypes: tuple[str, ...]
    method: str
    parents: tuple[ParentFacts, ...]
    datasets: tuple[DatasetFacts, ...]
    modification: Modification
    ancestors: tuple[ParentFacts, ...] = ()
    supplier_source: str = ""


def release_facts(
    content: ReportContent,
    pinned_recipe: PinnedRecipe,
    license: LicenseVerdict,
    merge: Artifact[MergeSummary],
    target: PublishTarget,
    names: PublicNames,
    held_out: DatasetFacts | None = None,
) -> ReleaseFacts:
    """Return the facts about the release of a merge.

    ``content`` and ``license`` have public names. ``held_out`` identifies the held-out text, if there is one.
    """
    config = _readable_config(merge.directory)
    if pinned_recipe.recipe.output:  # The configuration of an adapter, and that of its base model.
        config |= _readable_config(next(parent for parent in pinned_recipe.parents if parent.adapter).directory)
    likelihoods = next((model.likelihoods for model in content.models if model.likelihoods), None)
    datasets = [
        *_evaluation_data(model.scores for model in content.models),
        *([_held_out_data(held_out, likelihoods.documents)] if likelihoods else []),
        *(
            DatasetFacts(names.rename_text(text), "calibration", sha256)
            for text, sha256 in pinned_recipe.recipe.text_digests().items()
        ),
    ]
    return _facts(
        content,
        config,
        target,
        names,
        parameters=merge.value.parameters,
        dtypes=_dtypes(merge.directory / name for name in merge.files),
        parents=_parents(content, pinned_recipe, license, target, names),
        datasets=tuple(datasets),
        modification=merge_computation(pinned_recipe, config, merge.value.parameters),
    )


def variant_facts(
    content: ReportContent,
    pinned_recipe: PinnedRecipe,
    license: LicenseVerdict,
    merge: MergeRelease,
    files: Mapping[str, Sequence[ReleaseFile]],
    target: PublishTarget,
    names: PublicNames,
    held_out: DatasetFacts | None = None,
    calibration: CalibrationSettings | None = None,
) -> ReleaseFacts:
    """Return the facts about a release of quantized variants of ``merge``.

    ``files`` holds the files of each published variant by its type. ``calibration`` names the text that the quantizer
    reads. The other arguments are those of `release_facts`.
    """
    published = [verdict for verdict in content.variants if verdict.type in files]
    weights = [file for each in files.values() for file in each if isinstance(file.source, Path)]
    config: dict[str, Any] = {}
    parameters: int | None = None
    for file in weights:
        assert isinstance(file.source, Path)
        if file.name.endswith("config.json"):
            config = config or _readable_config(file.source.parent)
    with suppress(InvalidInput):
        shards = [file for file in next(iter(files.values()), ()) if file.name.endswith(".gguf")]
        for file in shards:
            assert isinstance(file.source, Path)
            header = read_gguf_header(file.source)
            config = config or {"model_type": header.metadata.get("general.architecture", "")}
            parameters = (parameters or 0) + sum(math.prod(tensor.shape) for tensor in header.tensors)
    donor = next((parent for parent in pinned_recipe.parents if parent.ref == str(pinned_recipe.recipe.donor)), None)
    own_config = _readable_config(donor.directory) if donor else {}
    config = {**own_config, **config}
    types: dict[str, int] = {}
    for verdict in published:
        for name, count in (verdict.record.tensor_types if verdict.record else {}).items():
            types[name] = types.get(name, 0) + count
    datasets: dict[DatasetFacts, None] = {}
    tokens = 0
    for verdict in published:
        if verdict.record and verdict.record.calibration and calibration:
            tokens += calibration.samples * calibration.max_length
            text = names.rename_text(str(calibration.documents))
            datasets[DatasetFacts(text, "calibration", verdict.record.calibration)] = None
        for guard in verdict.gate.all_guards if verdict.gate else ():
            datasets[DatasetFacts(guard.task, "evaluation", documents=guard.n)] = None
    if any(verdict.gate and verdict.gate.drift for verdict in published):
        documents = max(v.gate.drift.documents for v in published if v.gate and v.gate.drift)
        datasets[_held_out_data(held_out, documents)] = None
    parent = ParentFacts(
        name=merge.name,
        role="merge",
        identity=merge.sums,
        hub_id=merge.hub_id or "",
        license=content.licence,
    )
    return _facts(
        content,
        config,
        target,
        names,
        parameters=parameters,
        dtypes=tuple(sorted(types, key=lambda name: (-types[name], name))),
        parents=(parent,),
        datasets=tuple(datasets),
        # A weight has at least one bit.
        modification=Modification.of_network(
            config, parameters or 8 * sum(file.size for file in weights), len(published), tokens
        ),
        ancestors=_parents(content, pinned_recipe, license, target, names),
    )


def _facts(
    content: ReportContent,
    config: Mapping[str, Any],
    target: PublishTarget,
    names: PublicNames,
    *,
    parameters: int | None,
    dtypes: tuple[str, ...],
    parents: tuple[ParentFacts, ...],
    datasets: tuple[DatasetFacts, ...],
    modification: Modification,
    ancestors: tuple[ParentFacts, ...] = (),
) -> ReleaseFacts:
    about, source = _statements(target, names)
    return ReleaseFacts(
        name=content.name,
        address=target.address,
        hub_id=target.hub_id,
        about=about,
        supplier_source=source,
        architecture=_architecture(config),
        model_type=str(config.get("model_type") or ""),
        hyperparameters=_hyperparameters(config),
        parameters=parameters,
        dtypes=dtypes,
        method=content.method,
        parents=parents,
        datasets=datasets,
        modification=modification,
        ancestors=ancestors,
    )


def _statements(target: PublishTarget, names: PublicNames) -> tuple[AboutRelease, str]:
    """Return the publisher's statements with the supplier, and the source of the supplier."""
    about = names.apply(target.about)
    if about.supplier:
        return about, "publish.about"
    if not target.hub_id:
        return about, ""
    namespace = target.hub_id.partition("/")[0]
    supplier = Supplier(name=namespace, url=f"https://huggingface.co/{namespace}")
    return about.model_copy(update={"supplier": supplier}), "Hub repository"


def _parents(
    content: ReportContent,
    pinned_recipe: PinnedRecipe,
    license: LicenseVerdict,
    target: PublishTarget,
    names: PublicNames,
) -> tuple[ParentFacts, ...]:
    licenses = {model.ref: model.licence for model in content.parents} | dict(license.licenses)
    computes, facts = names.apply(target.about).training_compute, []
    for parent in pinned_recipe.parents:
        public = parent.rename(names.rename_text)
        own_license = licenses.get(public.ref) or licenses.get(public.name) or ""
        facts.append(parent_facts(public, own_license, computes.get(public.ref)))
    return tuple(facts)


def _evaluation_data(all_scores: Iterable[Scores | None]) -> Iterator[DatasetFacts]:
    """Yield the data of each task that at least one model was evaluated on."""
    by_task: dict[str, DatasetFacts] = {}
    for scores in all_scores:
        if scores is None:
            continue
        for score in scores.tasks:
            data = scores.data.get(score.task)
            sources = [
                f"{source.path}@{source.revision}" if source.revision else source.path
                for source in (data.sources if data else ())
            ]
            own = DatasetFacts(
                score.task, "evaluation", data.digest if data else "", score.n, tuple(dict.fromkeys(sources))
            )
            known = by_task.get(score.task)
            if known is None or (known.documents or 0) < score.n or (own.digest and not known.digest):
                by_task[score.task] = own
    yield from by_task.values()


def _held_out_data(held_out: DatasetFacts | None, documents: int) -> DatasetFacts:
    name, digest = (held_out.name, held_out.digest) if held_out else ("held-out text", "")
    return DatasetFacts(name, "perplexity", digest, documents)


def _architecture(config: Mapping[str, Any]) -> str:
    classes = config.get("architectures")
    return str(classes[0] or "") if isinstance(classes, list) and classes else ""


def _hyperparameters(config: Mapping[str, Any]) -> dict[str, int | float | str]:
    """Return the sizes in a configuration and in those of the language model inside it, by key."""
    found: dict[str, int | float | str] = {}
    for part in config_parts(config):
        for key, value in part.items():
            if not isinstance(key, str) or key in found or len(key) > 60:
                continue
            is_size = isinstance(value, int) and not isinstance(value, bool) and _SIZE_KEY.fullmatch(key)
            is_setting = key in _SETTING_KEYS and isinstance(value, int | float | str)
            if (is_size and not _NO_SIZES.fullmatch(key)) or is_setting:
                found[key] = value[:100] if isinstance(value, str) else value
    return dict(sorted(found.items()))


def _dtypes(files: Iterable[Path]) -> tuple[str, ...]:
    """Return the types in the headers of safetensors files, by the number of elements."""
    counts: dict[str, int] = {}
    for file in files:
        if file.suffix == ".safetensors":
            with suppress(InvalidInput):
                for tensor in read_header(file):
                    counts[tensor.dtype.code] = counts.get(tensor.dtype.code, 0) + tensor.numel
    return tuple(sorted(counts, key=lambda code: (-counts[code], code)))


def _readable_config(directory: Path) -> dict[str, Any]:
    """Return the configurations of a model and of an adapter, or an empty mapping if they cannot be read."""
    config: dict[str, Any] = {}
    for name in ("adapter_config.json", "config.json"):
        with suppress(InvalidInput):
            config |= read_json(directory / name)
    return config
