"""Write the machine-learning bill of materials of a release: CycloneDX 1.6 (ECMA-424), as plain JSON.

``metadata.component`` is the release, with its parents as pedigree. The first of ``components`` is the model with its
model card, and the others are the files. Properties of the model have names from the taxonomy of the OWASP AIBOM
project, and those without such a name begin with ``mergegate:``. The file has no dates, and its serial number is a hash
of the content, so the same release gives the same bytes.
"""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Iterable, Mapping

from mergegate.tasks.preflight.licenses import load_table
from mergegate.tasks.publish.bill_content import BillContent, contact_of, web_address
from mergegate.tasks.publish.content import CARD, COMPLIANCE, PROVENANCE, RECIPE
from mergegate.tasks.publish.parent_facts import ParentFacts

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
    ("documentation", CARD),
    ("model-card", CARD),
    ("license", "LICENSE"),
    ("quality-metrics", "report.html"),
    ("evidence", "evidence/gate.json"),
    ("formulation", RECIPE),
    ("risk-assessment", COMPLIANCE),
)
_DATASET_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*(/[A-Za-z0-9._-]+)?")


def bill_of_materials(bill: BillContent) -> str:
    """Return the content of ``bom.json``."""
    facts, supplier = bill.facts, _supplier(bill)
    about_model = {
        "type": "machine-learning-model",
        "name": facts.name,
        "version": bill.version,
        "description": bill.description,
        "licenses": _licenses(bill.license),
        **({"supplier": supplier, "manufacturer": supplier, "publisher": supplier["name"]} if supplier else {}),
    }
    names = [file.name for file in bill.files]
    references = [{"type": kind, "url": name} for kind, name in _DOCUMENTS if name in names]
    references.append({"type": "attestation", "url": PROVENANCE})
    if bill.page:
        references += [{"type": "website", "url": bill.page}, {"type": "vcs", "url": bill.page}]
    if bill.download:
        references.append({"type": "distribution", "url": bill.download})
    release = {
        **about_model,
        "bom-ref": "release",
        "pedigree": {"ancestors": [_ancestor(number, parent) for number, parent in enumerate(facts.parents, 1)]},
        "externalReferences": references,
    }
    model = {
        **about_model,
        "bom-ref": "model",
        "purl": bill.package_url,
        "externalReferences": references,
        "modelCard": _model_card(bill),
        "properties": _properties(
            {
                "mergegate:method": facts.method,
                "mergegate:parameters": facts.parameters,
                "mergegate:dtypes": ", ".join(facts.dtypes),
            }.items()
        ),
    }
    listed = [
        {
            "type": "file",
            "bom-ref": f"file:{file.name}",
            "name": file.name,
            "hashes": [{"alg": "SHA-256", "content": file.sha256}],
        }
        for file in bill.files
    ]
    bom = {
        "$schema": "http://cyclonedx.org/schema/bom-1.6.schema.json",
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "version": 1,
        "metadata": {
            "component": release,
            **({"supplier": supplier, "manufacturer": supplier} if supplier else {}),
            "lifecycles": [{"phase": "build"}],
            "tools": {
                "components": [
                    {"type": "application", "name": name, "version": version}
                    for name, version in bill.libraries.items()
                ]
            },
            "properties": _properties(
                (
                    ("primaryPurpose", bill.task),
                    ("suppliedBy", supplier.get("name")),
                    ("intendedUse", " ".join(facts.about.intended_use)),
                    ("informationAboutTraining", bill.training),
                    ("informationAboutApplication", " ".join(facts.about.intended_use)),
                    ("metric", "; ".join(f"{metric.task}: {metric}" for metric in bill.metrics)),
                    ("metricDecisionThreshold", "; ".join(": ".join(pair) for pair in bill.thresholds.items())),
                    *((MISSING_FACT, name) for name in bill.missing),
                )
            ),
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


def _model_card(bill: BillContent) -> dict[str, object]:
    facts, (inputs, outputs) = bill.facts, bill.formats
    parameters = {
        "task": bill.task,
        "architectureFamily": facts.model_type,
        "modelArchitecture": facts.architecture,
        "inputs": [{"format": name} for name in inputs],
        "outputs": [{"format": name} for name in outputs],
        "datasets": [
            {
                "type": "dataset",
                "bom-ref": f"dataset:{number}",
                "name": data.name,
                "contents": {
                    **({"url": url} if (url := next(filter(None, map(_dataset_address, data.sources)), "")) else {}),
                    "properties": _properties(
                        (
                            ("mergegate:purpose", data.purpose),
                            ("mergegate:sha256", data.digest),
                            ("mergegate:documents", data.documents),
                            *(("mergegate:source", source) for source in data.sources),
                        )
                    ),
                },
            }
            for number, data in enumerate(facts.datasets, 1)
        ],
    }
    considerations = {
        "useCases": list(facts.about.intended_use),
        "technicalLimitations": list(bill.limits),
        "performanceTradeoffs": list(bill.tradeoffs),
    }
    metrics = [
        {
            "type": metric.metric,
            "slice": metric.task,
            "value": f"{metric.value:.4f}",
            **(
                {"confidenceInterval": {"lowerBound": f"{metric.low:.4f}", "upperBound": f"{metric.high:.4f}"}}
                if metric.low is not None and metric.high is not None
                else {}
            ),
        }
        for metric in bill.metrics
    ]
    sizes = {
        _MODEL_CARD + name: next((facts.hyperparameters[key] for key in keys if key in facts.hyperparameters), None)
        for name, keys in _SIZES.items()
    }
    names = [file.name for file in bill.files]
    runtime = "llm-stack" if any(name.endswith(".gguf") for name in names) else "python"
    properties = {
        f"{_MODEL_CARD}hyperparameter": json.dumps(dict(facts.hyperparameters), sort_keys=True)
        if facts.hyperparameters
        else "",
        **sizes,
        f"{_MODEL_CARD}tokenizerClass": bill.tokenizer_class,
        f"{_MODEL_CARD}quantizationFileType": ", ".join(bill.variant_types),
        f"{_DISTRIBUTION}modelFileSize": bill.weight_bytes,
        f"{_DISTRIBUTION}runtimeRequirement": runtime,
    }
    return {
        "bom-ref": "model-card",
        "modelParameters": {name: value for name, value in parameters.items() if value},
        **({"quantitativeAnalysis": {"performanceMetrics": metrics}} if metrics else {}),
        "considerations": {name: value for name, value in considerations.items() if value},
        "properties": _properties(properties.items()),
    }


def _ancestor(number: int, parent: ParentFacts) -> dict[str, object]:
    """Return a parent with the facts that its card states."""
    reference, purl = f"parent:{number}", _package_url(parent)
    datasets = [
        {
            "type": "dataset",
            "bom-ref": f"{reference}:dataset:{position}",
            "name": name,
            **({"contents": {"url": url}} if (url := _dataset_address(name)) else {}),
        }
        for position, name in enumerate(parent.datasets, 1)
    ]
    links = [("website", parent.url), *(("documentation", link.url) for link in parent.training_summaries)]
    links += [("other", link.url) for link in parent.copyright_policies]
    references = [{"type": kind, "url": url} for kind, link in links if (url := web_address(link))]
    card: dict[str, object] = {"modelParameters": {"datasets": datasets}} if datasets else {}
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
        **({"supplier": {"name": parent.supplier}} if parent.supplier else {}),
        **({"purl": purl} if purl else {}),
        **({"externalReferences": references} if references else {}),
        **({"modelCard": card} if card else {}),
        "properties": _properties({"mergegate:role": parent.role}.items()),
    }


def _supplier(bill: BillContent) -> dict[str, object]:
    supplier = bill.facts.about.supplier
    if supplier is None:
        return {}
    email, page = contact_of(bill)
    pages = list(dict.fromkeys(filter(None, (web_address(supplier.url), page))))
    return {
        "name": supplier.name,
        **({"url": pages} if pages else {}),
        **({"contact": [{"email": email}]} if email else {}),
    }


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


def _package_url(parent: ParentFacts) -> str:
    """Return the package URL of a model on the Hub, or empty for a local model."""
    if not parent.hub_id:
        return ""
    return f"pkg:huggingface/{parent.hub_id}" + (f"@{parent.identity}" if parent.role != "merge" else "")


def _properties(items: Iterable[tuple[str, object]]) -> list[dict[str, str]]:
    """Return the properties that have a value."""
    return [{"name": name, "value": str(value)} for name, value in items if value not in (None, "")]
