"""Write the provenance of a release: an in-toto statement (v1) with a SLSA provenance predicate (v1), as plain JSON.

Sources: in-toto attestation framework, Statement v1 and ResourceDescriptor; SLSA build provenance v1 (slsa.dev). The
user's choices are in ``externalParameters``, and everything else that determines the bytes in ``internalParameters``.
Data without a SLSA field (verdict, license, metadata of the card) has a name with mergegate's own prefix, as the
specification asks. Without dates and local paths, the same inputs give the same bytes.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from types import MappingProxyType

from mergegate.merge_core.recipe import parse_reference
from mergegate.tasks.checkpoints import PinnedCheckpoint
from mergegate.tasks.gate import GateVerdict
from mergegate.tasks.merge import Numerics
from mergegate.tasks.preflight.licenses import LicenseVerdict
from mergegate.tasks.publish.content import ReleaseFile

_BUILD_TYPE = "urn:mergegate:merge:v1"
# Digest of a parent: sha256 of the canonical JSON {name: [size, sha256]} of the files that were read.
LISTING = "application/vnd.mergegate.checkpoint-listing+json"
_ARITHMETIC = "float32, float64 for float64 inputs; one rounding to the dtype that is written"


def provenance(
    files: Sequence[ReleaseFile],
    *,
    recipe: object,
    profile: str,
    overrides: Sequence[str] = (),
    numerics: Numerics,
    evaluation_seed: int | None,
    parents: Sequence[PinnedCheckpoint],
    texts: Mapping[str, str] = MappingProxyType({}),
    versions: Mapping[str, str],
    verdict: GateVerdict,
    license: LicenseVerdict,
    card: Mapping[str, object],
    byproducts: Mapping[str, tuple[str, str]] = MappingProxyType({}),
) -> str:
    """Return the content of ``provenance.json`` for ``files``: the products, inputs, recipe and verdict.

    Args:
        recipe: Documents of the recipe, as plain data.
        profile: Name of the profile.
        overrides: Settings of the run that override the profile.
        texts: Texts that parents read for the merge: sha256 by the path in the recipe.
        evaluation_seed: Seed of the document sample and the few-shot examples. None: nothing was evaluated.
        versions: Versions of the libraries that determine scores. For weights, see ``numerics``.
        card: Metadata of the model card.
        byproducts: Unpublished outputs of the merge, for the next merge: digest and path in the store, by name.
    """
    seeds = {"merge": numerics.seed} | ({} if evaluation_seed is None else {"evaluation": evaluation_seed})
    statement = {
        "_type": "https://in-toto.io/Statement/v1",
        "subject": [
            {"name": file.name, "digest": {"sha256": file.sha256}} for file in sorted(files, key=lambda f: f.name)
        ],
        "predicateType": "https://slsa.dev/provenance/v1",
        "predicate": {
            "buildDefinition": {
                "buildType": _BUILD_TYPE,
                "externalParameters": {"recipe": recipe, "profile": profile}
                | ({"overrides": list(overrides)} if overrides else {}),
                "internalParameters": {
                    "versions": {**versions, **numerics.versions},
                    "device": numerics.device,
                    "arithmetic": _ARITHMETIC,
                    "seeds": seeds,
                },
                "resolvedDependencies": [
                    *(_dependency(parent) for parent in parents),
                    *(_text_read(name, sha256) for name, sha256 in sorted(texts.items())),
                ],
            },
            "runDetails": {
                "builder": {"id": "urn:mergegate:builder", "version": {"mergegate": versions["mergegate"]}},
                **({"byproducts": [_byproduct(*item) for item in byproducts.items()]} if byproducts else {}),
            },
            "mergegate_verdict": verdict.model_dump(mode="json"),
            "mergegate_licence": _license(license),
            "mergegate_card": card,
        },
    }
    return json.dumps(statement, indent=1, sort_keys=True, ensure_ascii=False, allow_nan=False) + "\n"


def _dependency(parent: PinnedCheckpoint) -> dict[str, object]:
    digest = {"sha256": parent.digest}
    uri = f"urn:mergegate:checkpoint:{parent.digest}"
    if parent.revision:
        digest["gitCommit"] = parent.revision
        uri = f"pkg:huggingface/{hub_id(parent)}@{parent.revision}"
    notes: dict[str, object] = {"role": "base" if parent.is_base else "parent"}
    if parent.adapter:
        notes["adapter"] = {
            "name": parent.adapter.ref,
            "gitCommit": parent.adapter.revision,
            "files": dict(parent.adapter.files),
        }
    return {"name": parent.ref, "uri": uri, "digest": digest, "mediaType": LISTING, "annotations": notes}


def _byproduct(name: str, content: tuple[str, str]) -> dict[str, object]:
    digest, stored = content
    uri = f"urn:mergegate:checkpoint:{digest}"
    return {"name": name, "uri": uri, "digest": {"sha256": digest}, "annotations": {"stored": stored}}


def _text_read(name: str, sha256: str) -> dict[str, object]:
    uri = f"urn:mergegate:text:{sha256}"
    return {"name": name, "uri": uri, "digest": {"sha256": sha256}, "annotations": {"role": "text"}}


def hub_id(parent: PinnedCheckpoint) -> str:
    """Return the id ``org/name`` of a parent on the Hub."""
    return parse_reference(parent.ref, parent.name).path


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
        "accepted": [
            {"rule": reason.rule, "what": reason.sentence, "by": list(reason.accepted)}
            for reason in combination.reasons
            if reason.accepted
        ],
        "obligations": [obligation.model_dump(mode="json") for obligation in combination.obligations],
    }
