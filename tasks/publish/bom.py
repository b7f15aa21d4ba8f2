"""Write the machine-learning bill of materials of a release: CycloneDX 1.6 (ECMA-424), as plain JSON.

Its main component is the released model; the other components are the files. The pedigree of a merge is its parents,
and that of quantized variants is the release of the merge. The file has no dates and no random serial number, so the
same release gives the same bytes.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from mergegate.tasks.checkpoints import PinnedCheckpoint
from mergegate.tasks.publish.content import ReleaseFile
from mergegate.tasks.publish.provenance import MergeRelease
from mergegate.tasks.report import ReportContent, wording


def bill_of_materials(
    files: Sequence[ReleaseFile],
    content: ReportContent,
    parents: Sequence[PinnedCheckpoint],
    license: Mapping[str, object],
) -> str:
    """Return the content of ``bom.json`` for ``files``.

    ``license`` is in the notation of the model card: ``license``, or ``license: other`` with ``license_name``.
    """
    parent_licenses = {model.ref: model.licence for model in content.parents}
    merge = next(model for model in content.models if model.role == "merge")
    ancestors = [
        _ancestor(
            f"parent:{parent.name}",
            parent.ref,
            parent.revision or parent.digest,
            parent_licenses.get(parent.ref, "unknown"),
        )
        for parent in parents
    ]
    metrics = {
        f"{score.task}: {wording.metric_name(score.metric, content.kind)}": score.score
        for score in (merge.scores.tasks if merge.scores else ())
    }
    description = f"A merge made without training: {content.method}."
    return _bill(files, content, _model(content, description, license, ancestors, metrics))


def variant_bill_of_materials(
    files: Sequence[ReleaseFile],
    content: ReportContent,
    merge: MergeRelease,
    license: Mapping[str, object],
) -> str:
    """Return the content of ``bom.json`` for a release of quantized variants, whose only ancestor is ``merge``."""
    metrics = {
        f"{verdict.type}: {guard.task}: {wording.metric_name(guard.metric, content.kind)}": guard.merge_score
        for verdict in content.variants
        if verdict.publishable and verdict.gate
        for guard in verdict.gate.all_guards
    }
    types = ", ".join(verdict.type for verdict in content.variants if verdict.publishable)
    ancestor = _ancestor("merge", merge.name, merge.sums, content.licence)
    description = f"Quantized variants of {merge.name} {merge.version}: {types}."
    return _bill(files, content, _model(content, description, license, [ancestor], metrics))


def _ancestor(reference: str, name: str, version: str, license: str) -> dict[str, object]:
    return {
        "type": "machine-learning-model",
        "bom-ref": reference,
        "name": name,
        "version": version,
        "licenses": [_license(license)],
    }


def _model(
    content: ReportContent,
    description: str,
    license: Mapping[str, object],
    ancestors: Sequence[Mapping[str, object]],
    metrics: Mapping[str, float],
) -> dict[str, object]:
    """Return the main component. ``metrics`` holds scores in [0, 1] by task and metric."""
    return {
        "type": "machine-learning-model",
        "bom-ref": "model",
        "name": content.name,
        "description": description,
        "licenses": [_license(str(license.get("license_name") or license.get("license") or "unknown"))],
        "pedigree": {"ancestors": ancestors},
        "modelCard": {
            "modelParameters": {"task": content.kind.pipeline_tag} if content.kind.pipeline_tag else {},
            "quantitativeAnalysis": {
                "performanceMetrics": [{"type": name, "value": f"{score:.4f}"} for name, score in metrics.items()]
            },
        },
    }


def _bill(files: Sequence[ReleaseFile], content: ReportContent, model: Mapping[str, Any]) -> str:
    bom = {
        "$schema": "http://cyclonedx.org/schema/bom-1.6.schema.json",
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "version": 1,
        "metadata": {
            "component": model,
            "tools": {
                "components": [
                    {"type": "application", "name": library.name, "version": library.version}
                    for library in content.versions
                ]
            },
        },
        "components": [
            {
                "type": "file",
                "bom-ref": f"file:{file.name}",
                "name": file.name,
                "hashes": [{"alg": "SHA-256", "content": file.sha256}],
            }
            for file in sorted(files, key=lambda file: file.name)
        ],
        "dependencies": [
            {"ref": "model", "dependsOn": [ancestor["bom-ref"] for ancestor in model["pedigree"]["ancestors"]]}
        ],
    }
    return json.dumps(bom, indent=1, sort_keys=True, ensure_ascii=False) + "\n"


def _license(name: str) -> dict[str, object]:
    # Use the name, not the id: an id must be an SPDX identifier, and the Hub's lowercase identifiers only partly match.
    return {"license": {"name": name}}
