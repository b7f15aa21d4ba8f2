"""Where a release comes from: an in-toto statement (v1) with a SLSA provenance predicate (v1), as plain JSON.

Sources: in-toto attestation framework, Statement v1; SLSA v1.0 provenance. No dates and no paths of this machine: the
same inputs give the same bytes.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

from tasks.gate import Verdict
from tasks.pin import Parent
from tasks.publish.content import ReleaseFile

_BUILD_TYPE = "urn:mergegate:merge:v1"


def provenance(
    files: Sequence[ReleaseFile],
    *,
    recipe: object,
    seed: int,
    parents: Sequence[Parent],
    versions: Mapping[str, str],
    verdict: Verdict,
) -> str:
    """``provenance.json`` over ``files``: what was made, from what, by which recipe, and why it was let through."""
    statement = {
        "_type": "https://in-toto.io/Statement/v1",
        "subject": [
            {"name": file.name, "digest": {"sha256": file.sha256}} for file in sorted(files, key=lambda f: f.name)
        ],
        "predicateType": "https://slsa.dev/provenance/v1",
        "predicate": {
            "buildDefinition": {
                "buildType": _BUILD_TYPE,
                "externalParameters": {"recipe": recipe, "seed": seed},
                "internalParameters": {"versions": dict(versions)},
                "resolvedDependencies": [_dependency(parent) for parent in parents],
            },
            "runDetails": {"builder": {"id": "urn:mergegate", "version": {"mergegate": versions["mergegate"]}}},
            "verdict": verdict.model_dump(mode="json"),
        },
    }
    return json.dumps(statement, indent=1, sort_keys=True, ensure_ascii=False) + "\n"


def _dependency(parent: Parent) -> dict[str, object]:
    digest = {"mergegateCheckpoint": parent.digest}
    if parent.revision:
        digest["gitCommit"] = parent.revision
    return {"name": parent.ref, "digest": digest}
