"""Test the bill of materials: the official validator reads it, and missing facts are listed as missing."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from release_samples import COMMIT, content, cyclonedx_finds, facts_of, files, needs_validators, publishable, sha, share

from mergegate.tasks.preflight.licenses import load_table
from mergegate.tasks.release.publish.documents.bom import MISSING_FACT, BillOfMaterials, web_address
from mergegate.tasks.release.publish.documents.facts import (
    DatasetFacts,
    DocumentLink,
    Modification,
    ParentFacts,
    ReleaseFacts,
)
from mergegate.tasks.release.publish.settings import AboutRelease, Supplier
from mergegate.tasks.release.publish.targets.directory import DirectoryTarget

HUB_PARENT = ParentFacts(
    name="acme/general@main", role="base", identity=COMMIT, hub_id="acme/general", license="apache-2.0",
    datasets=("acme/corpus", "A corpus of ours"),
    training_summaries=(DocumentLink("summary of the training content", "https://acme.example/summary"),), energy=12.5,
)  # fmt: skip
OTHER_PARENT = replace(HUB_PARENT, name="acme/other", role="parent", identity=COMMIT[::-1])
LOCAL_PARENT = ParentFacts(name="../models/local_one", role="parent", identity=sha("local"))
STATEMENTS = AboutRelease(
    supplier=Supplier(name="Acme", url="https://acme.example/models", contact="models@acme.example"),
    intended_use=("Answer support questions.",),
    out_of_scope=("Medical advice.",),
    limits=("Was tested in English only.",),
)
# Facts that mergegate cannot know, so that even a complete profile leaves them open.
ALWAYS_MISSING = {
    *("release date", "learning approach", "users", "ethical considerations", "assessment of safety risks"),
    *("measured energy and its provider", "personal data in the training data"),
}


def facts(about: AboutRelease = STATEMENTS, **update: Any) -> ReleaseFacts:
    """Return the facts about a release on the Hub whose parents are on the Hub."""
    known = ReleaseFacts(
        name="demo", address="acme/demo", hub_id="acme/demo", about=about, architecture="LlamaForCausalLM",
        model_type="llama",
        hyperparameters={"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "rope_theta": 1e4},
        parameters=1234, dtypes=("BF16",), method="linear of 2", parents=(HUB_PARENT, OTHER_PARENT),
        datasets=(
            DatasetFacts("arc_easy", "evaluation", sha("arc"), 400, (f"allenai/ai2_arc@{COMMIT}",)),
            DatasetFacts("texts/own.jsonl", "calibration", sha("own")),
        ),
        modification=Modification(1234, 2, 0, 32, 2),
    )  # fmt: skip
    return replace(known, **update)


def bill(about: ReleaseFacts, license: str = "apache-2.0") -> BillOfMaterials:
    judged = content((share("arc_easy", 300, 400), share("gsm8k", 700, 1319, "exact_match,flexible-extract")))
    with TemporaryDirectory() as root:
        document = facts_of(Path(root), content=judged, facts=about)
    combination = document.license.combination.model_copy(update={"card": {"license": license}})
    verdict = document.license.model_copy(update={"combination": combination})
    return BillOfMaterials(document.model_copy(update={"license": verdict}), files())


COMPLETE = bill(facts())
LOCAL = bill(facts(AboutRelease(), hub_id=None, address=".", parents=(HUB_PARENT, LOCAL_PARENT), datasets=()))
OCI = bill(facts(hub_id=None, address="oci://registry.example/acme/demo"), "a license of ours")
LICENSES = [license.id for license in load_table().licenses.values()]
ALL_LICENSES = bill(facts(parents=tuple(replace(LOCAL_PARENT, name=name, license=name) for name in LICENSES)), "other")
# Texts that no validator may stumble over.
STRANGE = bill(
    facts(
        AboutRelease(
            supplier=Supplier(name="Ä“ \\ \n<b>", url="http://[not-an-address", contact="b@c"),
            limits=("Grüße, 100 % \x7f",),
        ),
        name="my model #1/ü",
        parents=(replace(HUB_PARENT, datasets=("../x y", "ü", "a/b@c d")),),
    )
)
SAMPLES = (COMPLETE, LOCAL, OCI, ALL_LICENSES, STRANGE)


@pytest.mark.story
@needs_validators
def test_the_document_passes_the_official_validator_which_finds_every_mistake() -> None:
    documents = [sample.text() for sample in SAMPLES]
    unknown_type, more, no_address, unlisted = (json.loads(documents[0]) for _ in range(4))
    unknown_type["metadata"]["component"]["type"] = "weights"
    more["components"][0]["modelCard"]["more"] = 1
    # Only a format checker finds this error. The library silently skips format checks if the checkers are missing.
    no_address["externalReferences"] = [{"type": "website", "url": "http://[not an address"}]
    unlisted["dependencies"][1]["dependsOn"] = ["parent:1"]  # not one of the components
    found = cyclonedx_finds([*documents, *map(json.dumps, (unknown_type, more, no_address, unlisted))])
    assert found[: len(SAMPLES)] == [None] * len(SAMPLES)
    assert all(found[len(SAMPLES) :]), found


def test_missing_facts_are_listed() -> None:
    assert set(COMPLETE.missing) == ALWAYS_MISSING
    of_parent = {f"{name} of ../models/local_one" for name in ("supplier", "license", "training data")}
    assert {"supplier", "intended use", "download location"} | of_parent | ALWAYS_MISSING < set(LOCAL.missing)
    for sample in SAMPLES:
        properties = json.loads(sample.text())["metadata"]["properties"]
        assert [item["value"] for item in properties if item["name"] == MISSING_FACT] == list(sample.missing)


def test_the_document_states_the_facts_in_the_fields_of_the_standard() -> None:
    bom = json.loads(COMPLETE.text())
    model = bom["components"][0]
    assert (model["supplier"]["name"], model["purl"]) == ("Acme", "pkg:huggingface/acme/demo")
    assert model["licenses"] == [{"license": {"id": "Apache-2.0"}}]
    other = json.loads(OCI.text())["components"][0]
    assert other["licenses"] == [{"license": {"name": "a license of ours"}}]
    card = model["modelCard"]
    assert card["considerations"]["useCases"] == ["Answer support questions."]
    limits = card["considerations"]["technicalLimitations"][:2]
    assert limits == ["Was tested in English only.", "Out of scope: Medical advice."]
    metric = card["quantitativeAnalysis"]["performanceMetrics"][0]
    assert (metric["slice"], metric["type"], metric["value"]) == ("arc_easy", "acc,none", "0.7500")
    # Wilson's interval for 300 of 400, from statsmodels 0.14: proportion_confint(300, 400, method="wilson").
    assert metric["confidenceInterval"] == {"lowerBound": "0.7053", "upperBound": "0.7899"}
    data = card["modelParameters"]["datasets"][0]
    assert data["contents"]["url"] == f"https://huggingface.co/datasets/allenai/ai2_arc/tree/{COMMIT}"
    ancestor = bom["metadata"]["component"]["pedigree"]["ancestors"][0]
    assert ancestor["purl"] == f"pkg:huggingface/acme/general@{COMMIT}"
    assert [item["name"] for item in ancestor["modelCard"]["modelParameters"]["datasets"]] == list(HUB_PARENT.datasets)
    (energy,) = ancestor["modelCard"]["considerations"]["environmentalConsiderations"]["energyConsumptions"]
    assert energy["activityEnergyCost"] == {"value": 12.5, "unit": "kWh"}


def test_other_weights_have_another_serial_number(tmp_path: Path) -> None:
    def serial_number(name: str, weights: bytes = b"weights") -> object:
        parts = publishable(tmp_path / name, weights).parts
        released = {file.name: file for file in parts.files(DirectoryTarget(to="directory", path=Path("out")))}
        return json.loads(released["bom.json"].read())["serialNumber"]

    assert serial_number("first") == serial_number("second") != serial_number("other", b"others")


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("https://acme.example/a%20b?c=d#e", True), ("http://localhost:8080", True), ("http://[not an address", False),
        ("https://acme.example/a b", False), ("https://acme.example/%zz", False), ("https://acme.example/#a#b", False),
        ("javascript:alert(1)", False), (None, False),
    ],
)  # fmt: skip
def test_only_addresses_that_every_reader_accepts_are_stated(url: str | None, expected: bool) -> None:
    assert bool(web_address(url)) == expected
