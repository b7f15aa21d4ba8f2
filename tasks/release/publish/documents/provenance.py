"""Write the provenance of a release: an in-toto statement (v1) with a SLSA provenance predicate (v1), as plain JSON.

Sources: in-toto attestation framework, Statement v1 and ResourceDescriptor; SLSA build provenance v1 (slsa.dev). The
user's choices are in ``externalParameters``, and everything else that determines the bytes in ``internalParameters``.
Data without a SLSA field (verdict, license, metadata of the card) has a name with mergegate's own prefix, as the
specification requires. The file has no dates and no local paths, so the same inputs give the same bytes.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from mergegate.merge_core.parsing import parse_yaml
from mergegate.tasks.base.store import canonical
from mergegate.tasks.preflight.licenses import LicenseVerdict
from mergegate.tasks.release.publish.content import (
    MERGE_BUILD,
    RELEASE_URN,
    STATEMENT_TYPES,
    VARIANT_BUILD,
    VARIANT_VERDICTS,
    ReleaseFile,
)
from mergegate.tasks.release.publish.documents.facts import DocumentFacts, MergeOrigin, VariantOrigin, hub_id
from mergegate.tasks.release.report import ReportContent

# Digest of a parent: sha256 of the canonical JSON {name: [size, sha256]} of the files that were read.
LISTING = "application/vnd.mergegate.checkpoint-listing+json"


def provenance(facts: DocumentFacts, files: Sequence[ReleaseFile]) -> str:
    """Return the content of ``provenance.json`` for ``files``: products, inputs, recipe and verdict.

    The only dependency of quantized variants is the release of the merge.
    """
    content, origin = facts.content, facts.origin
    statements: dict[str, object]
    if isinstance(origin, MergeOrigin):
        definition, references = _merge_build(content, origin), {parent.name: parent.ref for parent in origin.parents}
        parts = {"verdict": content.verdict, "routers": content.routers, "weights": origin.weights}
        statements = {f"mergegate_{name}": part.model_dump(mode="json") for name, part in parts.items() if part}
    else:
        definition, references = _variant_build(content, origin), {}
        statements = {VARIANT_VERDICTS: [verdict.model_dump(mode="json") for verdict in content.variants]}
    definition["externalParameters"] |= {"overrides": list(content.overrides)} if content.overrides else {}
    seeds = {"merge": origin.numerics.seed} if isinstance(origin, MergeOrigin) else {}
    seeds |= {"evaluation": content.scoring.seed} if content.scoring else {}  # draws documents and few-shot examples
    definition["internalParameters"] |= {"versions": facts.versions, "device": facts.device, "seeds": seeds}
    evaluation = {  # the settings with which the scores in ``evidence/`` were measured
        "models": references,
        "scoring": canonical(content.scoring),
        "prompts": dict(content.asked),
        "windows": canonical(content.windows),
        "task_forms": list(content.kind.task_forms),  # without 'text', mergegate's own tasks scored the models
    }
    statements |= {"mergegate_evaluation": evaluation, "mergegate_licence": _license(facts.license)}
    statements["mergegate_card"] = facts.metadata
    builder = {"id": "urn:mergegate:builder", "version": {"mergegate": facts.versions["mergegate"]}}
    products = [{"name": file.name, "digest": {"sha256": file.sha256}} for file in sorted(files, key=lambda f: f.name)]
    statement = {
        "_type": STATEMENT_TYPES[0],
        "subject": products,
        "predicateType": STATEMENT_TYPES[1],
        "predicate": {"buildDefinition": definition, "runDetails": {"builder": builder}, **statements},
    }
    return json.dumps(statement, indent=1, sort_keys=True, ensure_ascii=False, allow_nan=False) + "\n"


def _merge_build(content: ReportContent, origin: MergeOrigin) -> dict[str, Any]:
    dependencies: list[dict[str, object]] = []
    for parent in origin.parents:
        digest = {"sha256": parent.digest}
        uri = f"urn:mergegate:checkpoint:{parent.digest}"
        if parent.revision:
            digest["gitCommit"] = parent.revision
            uri = f"pkg:huggingface/{hub_id(parent)}@{parent.revision}"
        notes: dict[str, object] = {"role": "base" if parent.is_base else "parent"}
        if adapter := parent.adapter:
            notes["adapter"] = {"name": adapter.ref, "gitCommit": adapter.revision, "files": dict(adapter.files)}
        if parent.ref in origin.unused_refs:
            notes["contributes"] = False
        dependencies.append(
            {"name": parent.ref, "uri": uri, "digest": digest, "mediaType": LISTING, "annotations": notes}
        )
    for name, sha256 in sorted(origin.texts.items()):
        text: dict[str, object] = {"name": name, "uri": f"urn:mergegate:text:{sha256}", "digest": {"sha256": sha256}}
        dependencies.append({**text, "annotations": {"role": "text"}})
    return {
        "buildType": MERGE_BUILD,
        "externalParameters": {"recipe": parse_yaml(content.recipe, "recipe"), "profile": content.name},
        "internalParameters": {
            "arithmetic": "float32, float64 for float64 inputs; one rounding to the dtype that is written",
        },
        "resolvedDependencies": dependencies,
    }


def _variant_build(content: ReportContent, origin: VariantOrigin) -> dict[str, Any]:
    merge = origin.merge
    variants = {
        verdict.type: {
            "files": list(origin.files[verdict.type]),
            "tensor_types": verdict.record.tensor_types,
            "versions": verdict.record.versions,
            "settings": verdict.record.settings,
            **({"calibration": verdict.record.calibration} if verdict.record.calibration else {}),
        }
        for verdict in content.variants
        if verdict.record and verdict.type in origin.files
    }
    dependency = {
        "name": merge.name,
        "uri": f"{RELEASE_URN}{merge.sums}",
        "digest": {"sha256": merge.sums},
        "annotations": {"role": "merge", "version": merge.version, "address": merge.reference},
    }
    return {
        "buildType": VARIANT_BUILD,
        "externalParameters": {"variant": dict(origin.settings), "profile": merge.name},
        "internalParameters": {"variants": variants},
        "resolvedDependencies": [dependency],
    }


def _license(license: LicenseVerdict) -> dict[str, object]:
    combination = license.combination
    return {
        "result": license.result,
        "status": combination.status,
        "card": combination.card,
        "parents": license.licenses,
        "ancestors": [
            {"name": ancestor.name, "license": ancestor.license}
            | ({"gitCommit": ancestor.revision} if ancestor.revision else {})
            for ancestor in license.ancestors
        ],
        "unread": license.unread,
        **({"undeclared": [item.model_dump(mode="json") for item in license.undeclared]} if license.undeclared else {}),
        "accepted": [
            {"rule": reason.rule, "what": reason.sentence, "by": list(reason.accepted)}
            for reason in combination.reasons
            if reason.accepted
        ],
        "obligations": [obligation.model_dump(mode="json") for obligation in combination.obligations],
    }
