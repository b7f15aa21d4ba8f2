"""Write the machine-learning bill of materials of a release: CycloneDX 1.6 (ECMA-424), as plain JSON.

``metadata.component`` is the release, with its parents as pedigree. The first of ``components`` is the model with its
model card, and the others are the files. Properties of the model have names from the taxonomy of the OWASP AIBOM
project, and those without such a name begin with ``mergegate:``. The bill contains only facts with a source (see
``facts``). A fact without a source is listed as missing. The file has no dates, and its serial number is a hash of the
content, so the same release gives the same bytes.
"""

from __future__ import annotations

import json
import math
import re
import uuid
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from urllib.parse import quote

from mergegate.merge_core.errors import InvalidInput
from mergegate.merge_core.parsing import parse_json
from mergegate.tasks.base.store import merkle
from mergegate.tasks.preflight.licenses import load_table
from mergegate.tasks.quality.gate import GuardVerdict
from mergegate.tasks.release.publish.content import (
    CARD,
    COMPLIANCE,
    PROVENANCE,
    RECIPE,
    REPORT,
    ReleaseFile,
    file_identities,
)
from mergegate.tasks.release.publish.documents.card import score_interval
from mergegate.tasks.release.publish.documents.facts import DocumentFacts, MergeOrigin, ParentFacts
from mergegate.tasks.release.report import compares_per_byte, wording

# Forms of inputs and outputs by the task of a model on the Hub.
_FORMATS: Mapping[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "audio-text-to-text": (("audio", "text"), ("text",)),
    "automatic-speech-recognition": (("audio",), ("text",)),
    "feature-extraction": (("text",), ("vector",)),
    "fill-mask": (("text",), ("text",)),
    "image-classification": (("image",), ("label",)),
    "image-text-to-text": (("image", "text"), ("text",)),
    "sentence-similarity": (("text",), ("vector",)),
    "text-classification": (("text",), ("label",)),
    "text-generation": (("text",), ("text",)),
    "text-ranking": (("text", "text"), ("score",)),
    "text2text-generation": (("text",), ("text",)),
    "token-classification": (("text",), ("label",)),
    "zero-shot-image-classification": (("image", "text"), ("score",)),
}
_WEIGHTS = (".safetensors", ".gguf")
# A web address in the characters of RFC 3986, without user and without an address in brackets.
_CHARACTER = r"(?:[A-Za-z0-9._~!$&'()*+,;=:@/-]|%[0-9A-Fa-f]{2})"
_WEB_ADDRESS = re.compile(
    rf"https?://[A-Za-z0-9.-]{{1,253}}(:\d{{1,5}})?(/{_CHARACTER}*)?(\?(?:{_CHARACTER}|\?)*)?(#(?:{_CHARACTER}|\?)*)?"
)
_EMAIL = re.compile(r"[A-Za-z0-9._%+-]{1,64}@[A-Za-z0-9-]{1,63}(\.[A-Za-z0-9-]{1,63})+")
_UNKNOWN_LICENSES = ("", "unknown", "other")
MISSING_FACT = "mergegate:missing"  # property of the metadata, one for each fact without a source
# Names in the taxonomy of the OWASP AIBOM project, and the keys of ``config.json`` with this size.
_SIZES: Mapping[str, tuple[str, ...]] = {
    "vocabSize": ("vocab_size",),
    "contextLength": ("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len"),
    "embeddingLength": ("hidden_size", "n_embd", "d_model", "dim"),
    "blockCount": ("num_hidden_layers", "n_layer", "n_layers", "num_layers"),
    "attentionHeadCount": ("num_attention_heads", "n_head", "n_heads"),
    "attentionHeadCountKV": ("num_key_value_heads",),
    "feedForwardLength": ("intermediate_size", "n_inner", "d_ff", "ffn_dim"),
}
_MODEL_CARD, _DISTRIBUTION = "genai:aibom:modelcard:", "owasp:aibom:distribution:"
# Types of references to files of the release.
_DOCUMENTS = (
    *(("documentation", CARD), ("model-card", CARD), ("license", "LICENSE"), ("quality-metrics", REPORT)),
    *(("evidence", "evidence/gate.json"), ("formulation", RECIPE), ("risk-assessment", COMPLIANCE)),
)
_DATASET_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*(/[A-Za-z0-9._-]+)?")
# Facts that mergegate has no source for.
_ALWAYS_MISSING = (
    *("release date", "learning approach", "users", "ethical considerations", "assessment of safety risks"),
    *("measured energy and its provider", "personal data in the training data"),
)


@dataclass(frozen=True)
class _Metric:
    """A result of the released model on one task, with its 95 % interval if that is known."""

    task: str
    metric: str
    value: float
    low: float | None = None
    high: float | None = None

    def __str__(self) -> str:
        interval = "" if self.low is None or self.high is None else f" [{self.low:.4f}, {self.high:.4f}]"
        return f"{self.metric} {self.value:.4f}{interval}"


class BillOfMaterials:
    """Bill of materials of a release with these facts and files. Files that are written later are not listed."""

    def __init__(self, facts: DocumentFacts, files: Iterable[ReleaseFile]) -> None:
        content = facts.content
        self.facts, self.content, self.license = facts.facts, content, facts.license_name
        self.files = sorted(files, key=lambda file: file.name)
        # Digest of the files, which names the version of the model: 64 hex digits.
        self.version = merkle(file_identities(self.files))
        self.task = content.kind.pipeline_tag or ""
        self.page = f"https://huggingface.co/{self.facts.hub_id}" if self.facts.hub_id else ""
        address = quote(self.facts.address, safe=":/@") if "://" in self.facts.address else ""
        self.download = self.page or address  # empty for a local directory
        self.variant_types: tuple[str, ...] = ()
        self.guards: list[tuple[str, GuardVerdict]]  # guards of the released models, by task
        self.metrics: list[_Metric]
        if isinstance(facts.origin, MergeOrigin):
            training = content.routers.sentences if content.routers else "Nothing was trained."
            self.description = f"A merge of weights: {content.method}. {training}"
            self.metrics = list(self._metrics_of_merge())
            self.guards = [(guard.task, guard) for guard in content.verdict.all_guards]
        else:
            published = [verdict for verdict in content.variants if verdict.publishable]
            gates = [(verdict.type, verdict.gate) for verdict in published if verdict.gate]
            self.variant_types = tuple(verdict.type for verdict in published)
            types = ", ".join(self.variant_types)
            self.description = f"Quantized variants, {content.method}: {types}. Nothing was trained."
            self.guards = [(f"{name}: {guard.task}", guard) for name, gate in gates for guard in gate.all_guards]
            self.metrics = [
                _Metric(name, wording.metric_name(guard.metric, content.kind), guard.merge_score)
                for name, guard in self.guards
            ]

    def _metrics_of_merge(self) -> Iterator[_Metric]:
        content = self.content
        merge = next(model for model in content.models if model.role == "merge")
        for score in merge.scores.tasks if merge.scores else ():
            low, high = score_interval(score)
            metric = _Metric(score.task, wording.metric_name(score.metric, content.kind), score.score)
            yield metric if math.isnan(low) else replace(metric, low=low, high=high)
        if merge.likelihoods:
            measured = tuple(model for model in content.models if model.likelihoods)
            per_byte = compares_per_byte(measured, content.verdict.drift)
            value = merge.likelihoods.bits_per_byte if per_byte else merge.likelihoods.perplexity
            if value is not None:
                yield _Metric("held-out text", "bits per byte" if per_byte else "perplexity", value)

    @property
    def package_url(self) -> str:
        """Package URL. The commit on the Hub is not known before the release is published, so it is not included."""
        if self.facts.hub_id:
            return f"pkg:huggingface/{self.facts.hub_id}"
        address = f"?download_url={quote(self.facts.address, safe='')}" if self.download else ""
        return f"pkg:generic/{quote(self.facts.name, safe='')}@{self.version}{address}"

    @property
    def tokenizer_class(self) -> str:
        """Class in ``tokenizer_config.json``, or empty."""
        file = next((file for file in self.files if file.name == "tokenizer_config.json"), None)
        try:
            value = parse_json(file.read(), file.name) if file else None
        except (InvalidInput, OSError):
            return ""
        name = value.get("tokenizer_class") if isinstance(value, dict) else None
        return name if isinstance(name, str) else ""

    @property
    def training(self) -> str:
        known = [f"{parent.name}: {', '.join(parent.datasets)}" for parent in self.facts.parents if parent.datasets]
        stated = f" Training data of the parents, as their cards name it: {'; '.join(known)}." if known else ""
        return f"{self.description}{stated}"

    @property
    def limits(self) -> tuple[str, ...]:
        """Limits of the model, one sentence each."""
        about, note = self.facts.about, self.content.verdict.untested_note
        return (
            *about.limits,
            *(f"Out of scope: {use}" for use in about.out_of_scope),
            *([f"{note[0].upper()}{note[1:]}."] if note else []),
            "The evaluation says nothing about other tasks, languages and uses.",
            "A merge can inherit the limits of every model that it was computed from.",
        )

    @property
    def contact(self) -> tuple[str, str]:
        """Email address and web page for questions to the supplier. Each is empty if it is unknown."""
        contact = (self.facts.about.supplier.contact if self.facts.about.supplier else None) or ""
        return contact if _EMAIL.fullmatch(contact) else "", web_address(contact)

    @property
    def missing(self) -> tuple[str, ...]:
        """Names of the facts for which mergegate has no source."""
        facts, about = self.facts, self.facts.about
        statements = {
            "supplier": about.supplier,
            "contact of the supplier": about.supplier and self.contact != ("", ""),
            "download location": self.download,
            "license": self.license not in _UNKNOWN_LICENSES,
            "task": self.task,
            "forms of inputs and outputs": self.task in _FORMATS,
            "architecture": facts.architecture,
            "number of parameters": facts.parameters,
            "results of an evaluation": self.metrics,
            "intended use": about.intended_use,
            "uses that are out of scope": about.out_of_scope,
            "limits that the publisher knows": about.limits,
        }
        missing = [*(name for name, value in statements.items() if not value), *_ALWAYS_MISSING]
        for parent in facts.parents:
            has_license = parent.license not in _UNKNOWN_LICENSES
            per_parent: dict[str, object] = {"supplier": parent.supplier, "license": has_license}
            if parent.role != "merge":  # the release of the merge describes the training of its own parents
                per_parent |= {"training data": parent.datasets, "training energy": parent.energy}
            missing += [f"{name} of {parent.name}" for name, value in per_parent.items() if not value]
        missing += [f"digest of the data of {data.name}" for data in facts.datasets if not data.digest]
        return tuple(missing)

    def text(self) -> str:
        """Return the content of ``bom.json``."""
        facts, supplier, names = self.facts, self._supplier(), [file.name for file in self.files]
        references = [{"type": kind, "url": name} for kind, name in _DOCUMENTS if name in names]
        references.append({"type": "attestation", "url": PROVENANCE})
        links = (("website", self.page), ("vcs", self.page), ("distribution", self.download))
        references += [{"type": kind, "url": url} for kind, url in links if url]
        about_model = {
            "type": "machine-learning-model",
            "name": facts.name,
            "version": self.version,
            "description": self.description,
            "licenses": _licenses(self.license),
            "externalReferences": references,
            **_stated(supplier=supplier, manufacturer=supplier, publisher=supplier.get("name")),
        }
        ancestors = [_ancestor(number, parent) for number, parent in enumerate(facts.parents, 1)]
        model_properties = {
            "mergegate:method": facts.method,
            "mergegate:parameters": facts.parameters,
            "mergegate:dtypes": ", ".join(facts.dtypes),
        }
        model = {
            **about_model,
            "bom-ref": "model",
            "purl": self.package_url,
            "modelCard": self._model_card(),
            "properties": _properties(model_properties.items()),
        }
        hashes = {file.name: [{"alg": "SHA-256", "content": file.sha256}] for file in self.files}
        listed = [{"type": "file", "bom-ref": f"file:{name}", "name": name, "hashes": hashes[name]} for name in names]
        thresholds = {
            task: f"drop of at most {each.max_drop:g} points from {each.reference}" for task, each in self.guards
        }
        tools = [{"type": "application", "name": tool.name, "version": tool.version} for tool in self.content.versions]
        properties = [
            ("primaryPurpose", self.task),
            ("suppliedBy", supplier.get("name")),
            ("intendedUse", " ".join(facts.about.intended_use)),
            ("informationAboutTraining", self.training),
            ("informationAboutApplication", " ".join(facts.about.intended_use)),
            ("metric", "; ".join(f"{metric.task}: {metric}" for metric in self.metrics)),
            ("metricDecisionThreshold", "; ".join(": ".join(pair) for pair in thresholds.items())),
            *((MISSING_FACT, name) for name in self.missing),
        ]
        bom = {
            "$schema": "http://cyclonedx.org/schema/bom-1.6.schema.json",
            "bomFormat": "CycloneDX",
            "specVersion": "1.6",
            "version": 1,
            "metadata": {
                "component": {**about_model, "bom-ref": "release", "pedigree": {"ancestors": ancestors}},
                **_stated(supplier=supplier, manufacturer=supplier),
                "lifecycles": [{"phase": "build"}],
                "tools": {"components": tools},
                "properties": _properties(properties),
            },
            "components": [model, *listed],
            "compositions": [{"aggregate": "complete", "assemblies": ["release"]}],
            "dependencies": [
                {"ref": "release", "dependsOn": ["model", *(file["bom-ref"] for file in listed)]},
                {"ref": "model"},  # its parents are its pedigree: it does not need them
            ],
        }
        # A version 5 UUID, as RFC 9562 defines it for names: the name is the content.
        content = json.dumps(bom, sort_keys=True, ensure_ascii=False)
        bom["serialNumber"] = uuid.uuid5(uuid.NAMESPACE_URL, f"urn:mergegate:bom:{content}").urn
        return json.dumps(bom, indent=1, sort_keys=True, ensure_ascii=False, allow_nan=False) + "\n"

    def _model_card(self) -> dict[str, object]:
        facts, (inputs, outputs) = self.facts, _FORMATS.get(self.task, ((), ()))
        datasets = []
        for number, data in enumerate(facts.datasets, 1):
            properties = [
                ("mergegate:purpose", data.purpose),
                ("mergegate:sha256", data.digest),
                ("mergegate:documents", data.documents),
                *(("mergegate:source", source) for source in data.sources),
            ]
            url = next(filter(None, map(_dataset_address, data.sources)), "")
            contents = {**_stated(url=url), "properties": _properties(properties)}
            datasets.append(
                {"type": "dataset", "bom-ref": f"dataset:{number}", "name": data.name, "contents": contents}
            )
        metrics = []
        for metric in self.metrics:
            interval = {}
            if metric.low is not None and metric.high is not None:
                interval = {"lowerBound": f"{metric.low:.4f}", "upperBound": f"{metric.high:.4f}"}
            result = {"type": metric.metric, "slice": metric.task, "value": f"{metric.value:.4f}"}
            metrics.append({**result, **_stated(confidenceInterval=interval)})
        sizes = {
            _MODEL_CARD + name: next((facts.hyperparameters[key] for key in keys if key in facts.hyperparameters), None)
            for name, keys in _SIZES.items()
        }
        hyperparameters = json.dumps(dict(facts.hyperparameters), sort_keys=True) if facts.hyperparameters else ""
        has_gguf = any(file.name.endswith(".gguf") for file in self.files)
        card_properties = {
            f"{_MODEL_CARD}hyperparameter": hyperparameters,
            **sizes,
            f"{_MODEL_CARD}tokenizerClass": self.tokenizer_class,
            f"{_MODEL_CARD}quantizationFileType": ", ".join(self.variant_types),
            f"{_DISTRIBUTION}modelFileSize": sum(file.size for file in self.files if file.name.endswith(_WEIGHTS)),
            f"{_DISTRIBUTION}runtimeRequirement": "llm-stack" if has_gguf else "python",
        }
        return {
            "bom-ref": "model-card",
            "modelParameters": _stated(
                task=self.task,
                architectureFamily=facts.model_type,
                modelArchitecture=facts.architecture,
                inputs=[{"format": name} for name in dict.fromkeys(inputs)],
                outputs=[{"format": name} for name in outputs],
                datasets=datasets,
            ),
            **_stated(quantitativeAnalysis=_stated(performanceMetrics=metrics)),
            "considerations": _stated(
                useCases=list(facts.about.intended_use),
                technicalLimitations=list(self.limits),
                performanceTradeoffs=self._tradeoffs(),
            ),
            "properties": _properties(card_properties.items()),
        }

    def _tradeoffs(self) -> list[str]:
        if not self.variant_types:
            return [guard.reason for _, guard in self.guards]
        return [f"{task.removesuffix(f': {guard.task}')}: {guard.reason}" for task, guard in self.guards]

    def _supplier(self) -> dict[str, object]:
        supplier = self.facts.about.supplier
        if supplier is None:
            return {}
        email, page = self.contact
        pages = list(dict.fromkeys(filter(None, (web_address(supplier.url), page))))
        return {"name": supplier.name, **_stated(url=pages, contact=[{"email": email}] if email else [])}


def _ancestor(number: int, parent: ParentFacts) -> dict[str, object]:
    """Return a parent with the facts that its card states."""
    reference, purl = f"parent:{number}", ""
    if parent.hub_id:
        purl = f"pkg:huggingface/{parent.hub_id}" + (f"@{parent.identity}" if parent.role != "merge" else "")
    datasets = [
        {
            "type": "dataset",
            "bom-ref": f"{reference}:dataset:{position}",
            "name": name,
            **_stated(contents=_stated(url=_dataset_address(name))),
        }
        for position, name in enumerate(parent.datasets, 1)
    ]
    links = [("website", parent.url), *(("documentation", link.url) for link in parent.training_summaries)]
    links += [("other", link.url) for link in parent.copyright_policies]
    references = [{"type": kind, "url": url} for kind, link in links if (url := web_address(link))]
    card = _stated(modelParameters=_stated(datasets=datasets))
    if parent.energy:  # The schema requires a provider, which is not known.
        energy = {"value": float(f"{parent.energy:.3g}"), "unit": "kWh"}
        provider = {"organization": {"name": "unknown"}, "energySource": "unknown", "energyProvided": energy}
        consumption = {"activity": "training", "energyProviders": [provider], "activityEnergyCost": energy}
        card["considerations"] = {"environmentalConsiderations": {"energyConsumptions": [consumption]}}
    return {
        "type": "machine-learning-model",
        "bom-ref": reference,
        "name": parent.name,
        "version": parent.identity,
        "licenses": _licenses(parent.license),
        **_stated(supplier=_stated(name=parent.supplier), purl=purl, externalReferences=references, modelCard=card),
        "properties": _properties([("mergegate:role", parent.role)]),
    }


def web_address(url: str | None) -> str:
    """Return ``url`` if it is a web address that every reader accepts, or empty."""
    return url if url and _WEB_ADDRESS.fullmatch(url) else ""


def _licenses(license: str) -> list[dict[str, object]]:
    # An id must be an SPDX identifier, and not every identifier of the Hub is one.
    identifier = load_table().lookup(license).spdx if license else None
    return [{"license": {"id": identifier} if identifier else {"name": license or "unknown"}}]


def _dataset_address(source: str) -> str:
    """Return the web page of a dataset on the Hub, given as ``id`` or ``id@revision``, or empty."""
    name, _, revision = source.partition("@")
    if not _DATASET_ID.fullmatch(name):
        return ""
    tree = f"/tree/{revision}" if re.fullmatch(r"[A-Za-z0-9._-]+", revision) else ""
    return f"https://huggingface.co/datasets/{name}{tree}"


def _properties(items: Iterable[tuple[str, object]]) -> list[dict[str, str]]:
    """Return the properties that have a value."""
    return [{"name": name, "value": str(value)} for name, value in items if value not in (None, "")]


def _stated(**fields: object) -> dict[str, object]:
    """Return the fields that have a value."""
    return {name: value for name, value in fields.items() if value}
