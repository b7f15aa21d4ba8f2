"""Collect the facts and the files of a release: a merge, or the quantized variants of a merge that share a place.

The files of the release of variants are::

    demo-Q8_0.gguf, …                        weights and companions of every variant that passed
    evidence/Q8_0/gate.json, …               evidence of its verdict, as in the release of a merge
    LICENSE, licenses/…, NOTICE, …           the license files of the merge
    report.html, README.md, bom.json         about all variants of this place, including failed ones
    provenance.json, SHA256SUMS, model.sig   with the release of the merge as the only dependency

The release of the merge says nothing about its variants. So a profile can gain a variant, and a variant can fail,
without a new release of the merge.
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from mergegate.merge_core.checkpoint import config_parts, read_gguf_header, read_header
from mergegate.merge_core.errors import InvalidInput, Refused
from mergegate.merge_core.parsing import read_json
from mergegate.tasks.base.stage import store
from mergegate.tasks.base.store import Artifact, NotInKey, StoredValue, without_unkeyed
from mergegate.tasks.merge import MergeSummary, Numerics, WeightComparison, pin_calibration_texts
from mergegate.tasks.models.checkpoints import PinnedCheckpoint, PinnedRecipe
from mergegate.tasks.preflight.licenses import LicenseVerdict
from mergegate.tasks.quality.evaluation import Scores
from mergegate.tasks.quality.gate import GateVerdict, RecordedEvidence
from mergegate.tasks.quality.variants import VariantFormat, VariantRecord, VariantVerdict
from mergegate.tasks.release.publish.content import (
    BOM,
    CARD,
    COMPLIANCE,
    FACTS,
    PROVENANCE,
    RECIPE,
    REPORT,
    RESERVED_NAMES,
    ReleaseFile,
    stored_files,
    variant_evidence,
    written_file,
)
from mergegate.tasks.release.publish.documents.bom import BillOfMaterials
from mergegate.tasks.release.publish.documents.card import compliance_sheet, model_card
from mergegate.tasks.release.publish.documents.card_metadata import (
    card_metadata,
    check_card,
    contributing_references,
    eval_results,
    front_matter,
    model_index,
)
from mergegate.tasks.release.publish.documents.facts import (
    DatasetFacts,
    DocumentFacts,
    MergeOrigin,
    MergeRelease,
    Modification,
    ParentFacts,
    ReleaseFacts,
    VariantOrigin,
    parent_facts,
    read_facts,
)
from mergegate.tasks.release.publish.documents.license_files import license_files, open_obligations
from mergegate.tasks.release.publish.documents.provenance import provenance
from mergegate.tasks.release.publish.public_names import PublicNames
from mergegate.tasks.release.publish.settings import Supplier
from mergegate.tasks.release.publish.targets.contract import PublishTarget
from mergegate.tasks.release.report import ReportContent, render

# Keys of a configuration that are sizes, and those that are settings of the network.
_SIZE_KEY = re.compile(r"(num|n|max|d)_[a-z0-9_]+|[a-z0-9_]+_(size|dim|rank|layers|heads|experts|window|embd)|r")
_SETTING_KEYS = ("hidden_act", "rope_theta", "lora_alpha", "tie_word_embeddings")
_NO_SIZES = re.compile(r".*(_id|_ids|token|labels|return_sequences|max_length|max_new).*")


class ReleaseParts(NamedTuple):
    """Inputs of the release of a merge, independent of its target.

    ``evidence`` holds the files from which anyone can recompute the verdict. ``names`` are the public names of local
    models and texts, as used in ``content``. ``held_out`` identifies the held-out text, if there is one.
    ``weights`` compares the merge with its parents. None: it was not compared, and the release claims nothing about it.
    """

    content: ReportContent
    pinned: PinnedRecipe
    numerics: Numerics
    license: StoredValue[LicenseVerdict]
    merge: Artifact[MergeSummary]
    evidence: Artifact[RecordedEvidence]
    names: PublicNames = PublicNames({})
    held_out: DatasetFacts | None = None
    weights: WeightComparison | None = None

    @property
    def name(self) -> str:
        return self.content.name

    @property
    def directories(self) -> tuple[Path, ...]:
        return _input_directories(self.pinned)

    def files(self, target: PublishTarget) -> list[ReleaseFile]:
        """Return all files before SHA256SUMS."""
        pinned, names = self.pinned, self.names
        license, parents = names.apply(self.license.value), _public_parents(self)
        files = [
            *stored_files(self.merge),
            *license_files(parents, license, weights=self.weights),
            *stored_files(self.evidence),
        ]
        merged = contributing_references(pinned.recipe)
        unused_refs = [parent.ref for parent, own in zip(parents, pinned.parents, strict=True) if own.ref not in merged]
        is_adapter = pinned.recipe.output is not None
        metadata = card_metadata(
            self.content, parents, license.combination, is_adapter=is_adapter, unused_refs=unused_refs
        )
        origin = MergeOrigin(
            self.numerics.model_copy(update={"where": ""}),
            [_without_directories(parent) for parent in parents],
            texts={names.rename_text(text): sha256 for text, sha256 in pinned.recipe.text_digests().items()},
            unused_refs=unused_refs,
            weights=self.weights,
        )
        return _with_documents(files, self, target, metadata, self._facts(target), origin)

    def _facts(self, target: PublishTarget) -> ReleaseFacts:
        content, pinned, merge = self.content, self.pinned, self.merge
        config = _readable_config(merge.directory)
        if pinned.recipe.output:  # The configuration of an adapter, and that of its base model.
            config |= _readable_config(next(parent for parent in pinned.parents if parent.adapter).directory)
        dtypes: Counter[str] = Counter()
        for name in merge.files:
            if name.endswith(".safetensors"):
                with suppress(InvalidInput):
                    for tensor in read_header(merge.directory / name):
                        dtypes[tensor.dtype.code] += tensor.numel
        likelihoods = next((model.likelihoods for model in content.models if model.likelihoods), None)
        datasets = [
            *_evaluation_data(model.scores for model in content.models),
            *([_held_out_data(self.held_out, likelihoods.documents)] if likelihoods else []),
            *(
                DatasetFacts(self.names.rename_text(text), "calibration", sha256)
                for text, sha256 in pinned.recipe.text_digests().items()
            ),
        ]
        return _release_facts(
            *(self, target, config),
            parameters=merge.value.parameters,
            dtypes=_by_count(dtypes),
            parents=_facts_about_parents(self, target),
            datasets=tuple(datasets),
            modification=merge_computation(pinned, config, merge.value.parameters),
        )


class PassedVariant(NamedTuple):
    """A variant that is published: its type, its weights, and the evidence of its verdict."""

    type: str
    weights: Artifact[VariantRecord]
    evidence: Artifact[RecordedEvidence]


class VariantParts(NamedTuple):
    """Inputs of a release of variants, independent of its target.

    ``content`` is that of the report on the variants of this place (see ``variant_content``). ``merge`` is the release
    that they were quantized from.
    """

    content: ReportContent
    settings: VariantFormat
    passed: tuple[PassedVariant, ...]
    merge: MergeRelease
    pinned: PinnedRecipe
    license: StoredValue[LicenseVerdict]
    names: PublicNames = PublicNames({})
    held_out: DatasetFacts | None = None

    @property
    def name(self) -> str:
        return self.content.name

    @property
    def directories(self) -> tuple[Path, ...]:
        python = self.settings.python
        return (*_input_directories(self.pinned), *([python] if python else []))

    def files(self, target: PublishTarget) -> list[ReleaseFile]:
        """Return all files before SHA256SUMS."""
        names, settings = self.names, self.settings
        license, parents = names.apply(self.license.value), _public_parents(self)
        weights = {each.type: self._weights(each) for each in self.passed}
        files = [
            *(file for each in weights.values() for file in each),
            *license_files(parents, license, quantized_from=f"{self.merge.name} {self.merge.version}"),
            *(
                ReleaseFile(variant_evidence(file.name, each.type), file.size, file.sha256, file.source)
                for each in self.passed
                for file in stored_files(each.evidence)
            ),
        ]
        files = self._distinct(files)
        local = {name for name, field in type(settings).model_fields.items() if NotInKey in field.metadata}
        entry = names.apply(settings.model_dump(mode="json", exclude=local, exclude_defaults=True))
        origin = VariantOrigin(self.merge, entry, {each: [file.name for file in weights[each]] for each in weights})
        tags = (str(entry["format"]), *weights)
        bases = ("quantized", [self.merge.hub_id] if self.merge.hub_id else [])
        kind, library = self.content.kind, settings.library_name
        metadata = front_matter(kind, parents, license.combination, library, tags, bases)
        return _with_documents(files, self, target, metadata, self._facts(target, weights), origin)

    def _facts(self, target: PublishTarget, weights: Mapping[str, Sequence[ReleaseFile]]) -> ReleaseFacts:
        """Return the facts about the release. ``weights`` holds the files of each published variant by its type."""
        recipe, calibration = self.pinned.recipe, self.settings.calibration
        published = [verdict for verdict in self.content.variants if verdict.type in weights]
        files = [(file, file.source) for each in weights.values() for file in each if isinstance(file.source, Path)]
        configs = (_readable_config(path.parent) for file, path in files if file.name.endswith("config.json"))
        config = next(filter(None, configs), {})
        parameters: int | None = None
        with suppress(InvalidInput):
            for file in next(iter(weights.values()), ()):
                if file.name.endswith(".gguf") and isinstance(file.source, Path):
                    header = read_gguf_header(file.source)
                    config = config or {"model_type": header.metadata.get("general.architecture", "")}
                    parameters = (parameters or 0) + sum(math.prod(tensor.shape) for tensor in header.tensors)
        donor = next((parent for parent in self.pinned.parents if parent.ref == str(recipe.donor)), None)
        config = {**(_readable_config(donor.directory) if donor else {}), **config}
        types: Counter[str] = Counter()
        datasets: dict[DatasetFacts, None] = {}
        tokens = 0
        for verdict in published:
            types.update(verdict.record.tensor_types if verdict.record else {})
            if verdict.record and verdict.record.calibration and calibration:
                tokens += calibration.samples * calibration.max_length
                text = self.names.rename_text(str(calibration.documents))
                datasets[DatasetFacts(text, "calibration", verdict.record.calibration)] = None
            for guard in verdict.gate.all_guards if verdict.gate else ():
                datasets[DatasetFacts(guard.task, "evaluation", documents=guard.n)] = None
        if drifts := [verdict.gate.drift for verdict in published if verdict.gate and verdict.gate.drift]:
            datasets[_held_out_data(self.held_out, max(drift.documents for drift in drifts))] = None
        merge = self.merge
        bound = parameters or 8 * sum(file.size for file, _ in files)  # a weight has at least one bit
        return _release_facts(
            *(self, target, config),
            parameters=parameters,
            dtypes=_by_count(types),
            parents=(ParentFacts(merge.name, "merge", merge.sums, merge.hub_id or "", self.content.licence),),
            datasets=tuple(datasets),
            modification=Modification.of_network(config, bound, len(published), tokens),
            ancestors=_facts_about_parents(self, target),
        )

    def _weights(self, variant: PassedVariant) -> tuple[ReleaseFile, ...]:
        """Return the files of a variant by their public names, with the hashes that the store recorded."""
        artifact, files = variant.weights, []
        for name, path in self.settings.release_files(self.merge.name, artifact).items():
            stored = path.relative_to(artifact.directory).as_posix() if path.is_relative_to(artifact.directory) else ""
            sha256 = artifact.files.get(stored) or store().hashes.sha256(path)
            files.append(ReleaseFile(name, path.stat().st_size, sha256, path))
        return tuple(files)

    def _distinct(self, files: Sequence[ReleaseFile]) -> list[ReleaseFile]:
        """Return each file once. Raise Refused if two different files have the same name."""
        by_name: dict[str, ReleaseFile] = {}
        for file in files:
            if by_name.setdefault(file.name, file).sha256 != file.sha256 or file.name in RESERVED_NAMES:
                raise Refused(
                    f"{self.name}: {file.name}",
                    found="a file of a variant has the name of another file of the release",
                    expected="a name of its own for each file",
                    remedy="list the variants as two entries of 'variants', each with a 'suffix' of its own",
                )
        return list(by_name.values())


Releasable = ReleaseParts | VariantParts
"""Inputs of a release, independent of its target."""


def _input_directories(inputs: PinnedRecipe) -> tuple[Path, ...]:
    """Return the local directories of the parents and of the recipe, whose paths must not be published."""
    recipe = inputs.recipe.directory
    parents = (path for parent in inputs.parents for path in parent.directories)
    return (*parents, *([recipe] if recipe else []))


def _public_parents(parts: Releasable) -> tuple[PinnedCheckpoint, ...]:
    return tuple(parent.rename(parts.names.rename_text) for parent in parts.pinned.parents)


def _without_directories(parent: PinnedCheckpoint) -> PinnedCheckpoint:
    adapter = parent.adapter and parent.adapter.model_copy(update={"directory": Path()})
    return parent.model_copy(update={"directory": Path(), "files": (), "adapter": adapter})


def _with_documents(
    other_files: Sequence[ReleaseFile],
    parts: Releasable,
    target: PublishTarget,
    metadata: dict[str, Any],
    facts: ReleaseFacts,
    origin: MergeOrigin | VariantOrigin,
) -> list[ReleaseFile]:
    """Return all files of a release before SHA256SUMS: ``other_files``, the facts, and the documents."""
    license = parts.names.apply(parts.license.value)
    ancestors = tuple(ancestor.model_copy(update={"own_text": ""}) for ancestor in license.ancestors)
    keyless = target.sigstore
    if keyless and keyless.trust_config:  # The documents only state that there is such a file.
        keyless = keyless.model_copy(update={"trust_config": Path("FILE")})
    recorded = DocumentFacts(
        files={file.name: file.sha256 for file in other_files},
        content=without_unkeyed(parts.content),
        license=license.model_copy(update={"ancestors": ancestors}),
        missing=open_obligations(_public_parents(parts), license),
        metadata=metadata,
        facts=facts,
        origin=origin,
        signed=target.sign_key is not None,
        keyless=keyless,
        version=target.version,
    )
    # Not sorted: the order of the metadata and of other mappings is that in the documents.
    text = json.dumps(recorded.model_dump(mode="json"), indent=1, ensure_ascii=False, allow_nan=False)
    files = [*other_files, written_file(FACTS, f"{text}\n")]
    documents = release_documents(read_facts(files[-1].read()), files)  # as ``mergegate verify`` reads them
    card = next(file for file in documents if file.name == CARD)
    check_card(card.read().decode(), metadata, [file.name for file in (*files, *documents)])
    return [*files, *documents]


def release_documents(facts: DocumentFacts, other_files: Sequence[ReleaseFile]) -> list[ReleaseFile]:
    """Return the documents of the release. ``other_files`` are all other files that are written before SHA256SUMS.

    Each document describes the files before it: the card describes the checkpoint, the bill of materials lists the
    files, and the provenance covers them all.
    """
    content = facts.content
    # The license and the scores are those of the verdicts, also in edited facts.
    metadata = {**facts.metadata, **facts.license.combination.card, **model_index(content)}
    facts = facts.model_copy(update={"metadata": metadata})
    files = [*other_files, written_file(REPORT, render(content))]
    if isinstance(facts.origin, MergeOrigin):
        results = eval_results(content, facts.facts.hub_id, facts.version)
        files += [written_file(name, text) for name, text in results.items()]
        files.append(written_file(RECIPE, content.recipe))
    names = sorted(file.name for file in files)
    files.append(written_file(COMPLIANCE, compliance_sheet(facts, names)))
    files.append(written_file(CARD, model_card(facts, names)))
    files.append(written_file(BOM, BillOfMaterials(facts, files).text()))
    return [*files[len(other_files) :], written_file(PROVENANCE, provenance(facts, files))]


def variant_content(
    content: ReportContent, name: str, merge: MergeRelease, verdicts: Sequence[VariantVerdict]
) -> ReportContent:
    """Return the content of the report on the variants of one place.

    ``content`` is that of the merge, and ``name`` that of the variants' release. The result has no judgment of the
    merge, which depends on the release that was current at the time. So the same variants of the same merge give the
    same report in every run. Observations that differ between machines, and the texts that a tokenizer splits
    differently, are removed.
    """
    published = []
    for verdict in verdicts:
        checks = tuple(check.model_copy(update={"seen": "", "where": ""}) for check in verdict.checks)
        update: dict[str, object] = {"checks": checks}
        if conversion := verdict.conversion:
            hidden = ("…",) * len(conversion.different_texts)
            update["conversion"] = conversion.model_copy(update={"different_texts": hidden})
        published.append(verdict.model_copy(update=update))
    passed = [verdict for verdict in published if verdict.publishable]
    inconclusive = [verdict for verdict in passed if verdict.outcome != "pass"]
    joint = GateVerdict(
        outcome=inconclusive[0].outcome if inconclusive else "pass",
        publishable=True,
        guards=(),
        drift=None,
        overall_drop=None,
        overall_low=None,
        overall_high=None,
        on_inconclusive=content.verdict.on_inconclusive,
        reasons=tuple(f"variant {verdict.type}: {reason}" for verdict in inconclusive for reason in verdict.reasons),
    )
    kept = ("kind", "licence", "obligations", "scoring", "asked", "windows", "files", "versions", "overrides")
    return ReportContent(
        name=name,
        method=f"quantized from {merge.name} {merge.version}",
        models=tuple(model.model_copy(update={"scores": None, "likelihoods": None}) for model in content.models),
        verdict=joint,
        reproduce=(
            "mergegate verify RELEASE --verdict    # decide again from the outcomes in evidence/, without a model",
            "mergegate reproduce RELEASE           # quantize again, and compare the weights byte by byte",
        ),
        variants=tuple(published),
        **{field: getattr(content, field) for field in kept},
    )


def merge_computation(pinned_recipe: PinnedRecipe, config: Mapping[str, Any], parameters: int) -> Modification:
    """Return the sizes of a merge whose result has this ``config`` and this number of parameters.

    A parent can have more parameters than the result, but not more than two for each byte of its weights. Texts have at
    most two tokens per byte, because windows overlap.
    """
    models, tokens, prompts = 0, 0, 0
    for document in (*pinned_recipe.recipe.steps, pinned_recipe.recipe):
        models += len(document.own_references())
        if (mixture := document.mixture) is not None and mixture.needs_prompts:
            texts = [text for each in (*mixture.experts, *mixture.shared) for text in (*each.positive, *each.negative)]
            prompts += len(texts)
            tokens += sum(2 * len(text.encode()) for text in texts)
        if document.reads_texts and document.texts:
            pinned = pin_calibration_texts(document, store().hashes)
            tokens += sum(2 * text.path.stat().st_size for _, text in pinned)
    weights = [
        [file.stat().st_size for file in parent.directory.glob("*.*") if file.suffix in (".safetensors", ".bin")]
        for parent in pinned_recipe.parents
    ]
    bound = max(parameters, *(2 * sum(sizes) for sizes in weights))
    return Modification.of_network(config, bound, models, tokens, prompts)


def _release_facts(parts: Releasable, target: PublishTarget, config: Mapping[str, Any], **own: Any) -> ReleaseFacts:
    """Return the facts of both kinds of releases, with those that only one kind has in ``own``."""
    content = parts.content
    about, source = parts.names.apply(target.about), "publish.about"
    if not about.supplier:
        source = "Hub repository" if target.hub_id else ""
        namespace = (target.hub_id or "").partition("/")[0]
        supplier = Supplier(name=namespace, url=f"https://huggingface.co/{namespace}") if namespace else None
        about = about.model_copy(update={"supplier": supplier})
    classes = config.get("architectures")
    return ReleaseFacts(
        name=content.name,
        address=target.address,
        hub_id=target.hub_id,
        about=about,
        supplier_source=source,
        architecture=str(classes[0] or "") if isinstance(classes, list) and classes else "",
        model_type=str(config.get("model_type") or ""),
        hyperparameters=_hyperparameters(config),
        method=content.method,
        **own,
    )


def _facts_about_parents(parts: Releasable, target: PublishTarget) -> tuple[ParentFacts, ...]:
    license = parts.names.apply(parts.license.value)
    licenses = {model.ref: model.licence for model in parts.content.parents} | dict(license.licenses)
    computes = parts.names.apply(target.about).training_compute
    return tuple(
        parent_facts(parent, licenses.get(parent.ref) or licenses.get(parent.name) or "", computes.get(parent.ref))
        for parent in _public_parents(parts)
    )


def _by_count(counts: Mapping[str, int]) -> tuple[str, ...]:
    return tuple(sorted(counts, key=lambda name: (-counts[name], name)))


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


def _readable_config(directory: Path) -> dict[str, Any]:
    """Return the configurations of a model and of an adapter, or an empty mapping if they cannot be read."""
    config: dict[str, Any] = {}
    for name in ("adapter_config.json", "config.json"):
        with suppress(InvalidInput):
            config |= read_json(directory / name)
    return config
