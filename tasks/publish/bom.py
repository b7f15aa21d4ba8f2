"""Write the machine-learning bill of materials of a release: CycloneDX 1.6 (ECMA-424), as plain JSON.

Its main component is the merged model, with the parents as its pedigree; the other components are the files. It has no
dates and no random serial number, so the same release gives the same bytes.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

from mergegate.tasks.checkpoints import PinnedCheckpoint
from mergegate.tasks.publish.content import ReleaseFile
from mergegate.tasks.report import ReportContent


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
    model = {
        "type": "machine-learning-model",
        "bom-ref": "model",
        "name": content.name,
        "description": f"A merge made without training: {content.method}.",
        "licenses": [_license(str(license.get("license_name") or license.get("license") or "unknown"))],
        "pedigree": {
            "ancestors": [
                {
                    "type": "machine-learning-model",
                    "bom-ref": f"parent:{parent.name}",
                    "name": parent.ref,
                    "version": parent.revision or parent.digest,
                    "licenses": [_license(parent_licenses.get(parent.ref, "unknown"))],
                }
                for parent in parents
            ]
        },
        "modelCard": {
            "modelParameters": {"task": "text-generation"},
            "quantitativeAnalysis": {
                "performanceMetrics": [
                    {"type": f"{score.task}: {score.metric}", "value": f"{score.score:.4f}"}
                    for score in (merge.scores.tasks if merge.scores else ())
                ]
            },
        },
    }
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
        "dependencies": [{"ref": "model", "dependsOn": [f"parent:{parent.name}" for parent in parents]}],
    }
    return json.dumps(bom, indent=1, sort_keys=True, ensure_ascii=False) + "\n"


def _license(name: str) -> dict[str, object]:
    # Use the name, not the id: an id must be an SPDX identifier, and the Hub's lowercase identifiers only partly match.
    return {"license": {"name": name}}
