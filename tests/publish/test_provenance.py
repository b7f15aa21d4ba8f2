"""Test the provenance: it follows its specifications, is complete and is reproducible."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from release_samples import COMMIT, RECIPE, content, facts_of, files, license_verdict, parents, sha, share

from mergegate.tasks.release.publish.documents.card_metadata import card_metadata
from mergegate.tasks.release.publish.documents.provenance import LISTING, provenance


def _object(required: str, extensions: Mapping[str, object] = {}, **properties: object) -> dict[str, object]:
    closed = {"type": "object", "additionalProperties": False, "patternProperties": dict(extensions)}
    return {**closed, "required": required.split(), "properties": properties}


def _list(item: object) -> dict[str, object]:
    return {"type": "array", "items": item}


# These schemas follow the specification texts (in-toto Statement and ResourceDescriptor v1, SLSA provenance v1).
# They allow no additional fields except extensions, whose names start with the vendor's name and an underscore.
_TEXT, _ANY = {"type": "string"}, {"type": "object"}
_URI = {"type": "string", "pattern": "^[a-z][a-z0-9+.-]*:[^ ]+$"}
_DIGEST = {
    **_object(
        "",
        sha256={"type": "string", "pattern": "^[0-9a-f]{64}$"},
        gitCommit={"type": "string", "pattern": "^[0-9a-f]{40}$"},
    ),
    "minProperties": 1,
}
_RESOURCE = {
    **_object("", name=_TEXT, uri=_URI, digest=_DIGEST, mediaType=_TEXT, annotations=_ANY),
    "anyOf": [{"required": ["uri"]}, {"required": ["digest"]}, {"required": ["content"]}],
}
_BUILD = _object(
    "buildType externalParameters", buildType=_URI, externalParameters=_ANY, internalParameters=_ANY,
    resolvedDependencies=_list(_RESOURCE),
)  # fmt: skip
_VERSIONS = {"type": "object", "additionalProperties": _TEXT}
_BUILDER = _object("id", id=_URI, version=_VERSIONS, builderDependencies=_list(_RESOURCE))
_RUN = _object("builder", builder=_BUILDER, metadata=_ANY, byproducts=_list(_RESOURCE))
_SCHEMA = _object(
    "_type subject predicateType predicate",
    _type={"const": "https://in-toto.io/Statement/v1"},
    subject={**_list({**_RESOURCE, "required": ["name", "digest"]}), "minItems": 1},
    predicateType={"const": "https://slsa.dev/provenance/v1"},
    predicate=_object(
        "buildDefinition runDetails", {"^mergegate_[a-zA-Z]+$": {}}, buildDefinition=_BUILD, runDetails=_RUN
    ),
)


def text_of(root: Path, **more: Any) -> str:
    said, both = content((share("arc_easy", 300, 400),)), parents(root)
    verdict = license_verdict("other", "mit", accepted={"acme/other": "alice: we have a contract"})
    metadata = card_metadata(said, both, verdict.combination)
    return provenance(facts_of(root, more, content=said, license=verdict, metadata=metadata), files())


@pytest.fixture
def statement(tmp_path: Path) -> Any:
    return json.loads(text_of(tmp_path))


@pytest.mark.parametrize(
    "path", [("predicate", "verdict"), ("predicate", "buildDefinition", "x"), ("subject", 0, "size"), ("extra",)]
)
def test_it_has_exactly_the_form_of_the_specifications(statement: Any, path: tuple[str | int, ...]) -> None:
    jsonschema.validate(statement, _SCHEMA)
    place = statement
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = {}
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(statement, _SCHEMA)


def test_in_totos_own_types_read_it(statement: Any) -> None:
    from google.protobuf import json_format
    from in_toto_attestation.predicates.provenance.v1 import provenance_pb2
    from in_toto_attestation.v1 import statement_pb2

    read = json_format.ParseDict(statement, statement_pb2.Statement())
    assert [subject.name for subject in read.subject] == ["licenses/mit.txt", "model.safetensors"]
    ours = {name: value for name, value in statement["predicate"].items() if not name.startswith("mergegate_")}
    predicate = json_format.ParseDict(ours, provenance_pb2.Provenance())  # rejects unknown fields
    build = predicate.build_definition
    assert [dependency.uri for dependency in build.resolved_dependencies] == [
        f"pkg:huggingface/acme/general@{COMMIT}",
        f"urn:mergegate:checkpoint:{sha('local')}",
    ]
    assert build.resolved_dependencies[0].digest["gitCommit"] == COMMIT
    assert build.resolved_dependencies[1].digest["sha256"] == sha("local")
    assert build.resolved_dependencies[0].media_type == LISTING
    assert build.external_parameters["profile"] == "demo"


def test_the_provenance_names_recipe_versions_and_seeds(statement: Any) -> None:
    build = statement["predicate"]["buildDefinition"]
    assert build["externalParameters"] == {"recipe": list(yaml.safe_load_all(RECIPE)), "profile": "demo"}
    inside = build["internalParameters"]
    assert inside["seeds"] == {"merge": 3, "evaluation": 11}
    assert inside["device"] == "cpu"
    assert inside["versions"] == {"mergegate": "0.1.0", "transformers": "5.23.0", "torch": "2.13.0", "numba": "0.68.1"}
    assert "float32" in inside["arithmetic"]


def test_the_provenance_names_who_accepted_which_doubt(statement: Any) -> None:
    said = statement["predicate"]["mergegate_licence"]
    assert said["status"] == "allowed"
    assert [one["by"] for one in said["accepted"]] == [["acme/other: alice: we have a contract"]]
    assert all(one["rule"] and one["what"] for one in said["accepted"])
