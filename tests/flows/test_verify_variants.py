"""`mergegate verify` and `reproduce` on released variants: every change is detected, and so is another merge."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from demo_project import Printed, Project
from forged_evidence import FORGERIES, Columns, Evidence, row_of
from gguf_samples import METADATA, gguf
from other_words import read_with_other_words
from safetensors.torch import load_file, save_file
from signing_keys import write_keys
from test_verify_and_reproduce import files_of, forge, hashes_of, write_sums

import mergegate
from mergegate.merge_core.errors import InvalidInput, Refused
from mergegate.tasks.checkpoints import Model
from mergegate.tasks.gate.verdict_record import LIKELIHOODS, OUTCOMES
from mergegate.tasks.publish.content import BOM, CARD, PROVENANCE, RECIPE, SIGNATURE, SUMS, sha256_of
from mergegate.tasks.publish.releases.origin import MergeLink, find_merge
from mergegate.tasks.publish.releases.verify import check_release
from mergegate.tasks.publish.releases.weights import first_difference, is_rebuilt
from mergegate.tasks.publish.signature import sign
from mergegate.tasks.publish.targets.directory import DirectoryRelease
from mergegate.tasks.variants.gguf import GgufFormat

sys.path.append(str(Path(__file__).resolve().parents[1] / "variants"))
from rounded_format import rounded_registered

pytestmark = pytest.mark.story


@dataclass(frozen=True)
class Places:
    """Copies of the release of variants and of the release of their merge, next to each other."""

    variants: Path
    merge: Path


@pytest.fixture(scope="module")
def project(released: tuple[Project, Printed], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Project]:
    """Return the project of the released demo after it has released two variants, too."""
    with rounded_registered(tmp_path_factory.mktemp("rounded") / "site"):
        own, _ = released
        path = own.root / "profiles" / "demo.yaml"
        path.write_text(path.read_text() + "variants: [{format: rounded, bits: [8, 6]}]\n")
        result = own.mergegate("run", "profiles/demo.yaml", "--json")
        assert result.exit_code == 0, result.output
        yield own


@pytest.fixture
def places(project: Project, tmp_path: Path) -> Places:
    copies = []
    for name in ("demo-Rounded", "demo"):
        version = (project.root / "releases" / name / "latest").resolve()
        copies.append(Path(shutil.copytree(version, tmp_path / "releases" / name / version.name)))
    return Places(*copies)


def statement_of(release: Path) -> dict[str, Any]:
    statement: dict[str, Any] = json.loads((release / PROVENANCE).read_text())
    return statement


def edit_provenance(release: Path, change: Callable[[dict[str, Any]], object]) -> None:
    statement = statement_of(release)
    change(statement["predicate"])
    (release / PROVENANCE).write_text(json.dumps(statement))


def refusal_of(release: Path, **options: Any) -> str:
    with pytest.raises(Refused) as refusal:
        check_release(DirectoryRelease(release), **options)
    return str(refusal.value)


# Verification of the files and statements.


def test_released_variants_and_their_merge_are_what_they_say(project: Project) -> None:
    result = project.mergegate("verify", "releases/demo-Rounded/latest")
    assert result.exit_code == 0, result.output
    merge = (project.root / "releases/demo/latest").resolve()
    assert f"quantized from demo {merge.name}, whose release was verified, too:" in result.output
    assert f"    releases/demo/{merge.name}" in result.output.splitlines()
    answer = json.loads(project.mergegate("verify", "releases/demo-Rounded/latest", "--json").stdout)
    assert answer["merge"]["version"] == merge.name
    assert answer["merge"]["problem"] == ""
    assert "merge" not in json.loads(project.mergegate("verify", "releases/demo/latest", "--json").stdout)


def test_the_answer_fits_into_80_columns(project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    result = project.mergegate("verify", "releases/demo-Rounded/latest", "--verdict")
    assert result.exit_code == 0, result.output
    assert max(map(len, result.output.splitlines())) <= 80


@pytest.mark.parametrize("signed", [False, True])
def test_a_byte_flipped_in_any_file_is_found(places: Places, tmp_path: Path, signed: bool) -> None:
    private, public = write_keys(tmp_path)
    release = places.variants.rename(places.variants.with_name("downloaded"))  # The version cannot give it away.
    key = public if signed else None
    if signed:
        for each in (release, places.merge):
            write_sums(each)
            (each / SIGNATURE).write_text(sign(each.parent.name, hashes_of(each, SIGNATURE), private))
        edited = places.merge.rename(places.merge.with_name("signed"))
        edited.rename(places.merge)
    assert {CARD, BOM, SUMS, "demo-R8.safetensors", "demo-R6.safetensors"} <= {path.name for path in files_of(release)}
    merge_version = places.merge.rename(places.merge.with_name("elsewhere"))
    check_release(DirectoryRelease(release), key)
    for path in files_of(release):
        original = path.read_bytes()
        last = len(original) - (2 if path.name == SIGNATURE else 1)
        for position in {0, len(original) // 3, len(original) // 2, last}:
            damaged = bytearray(original)
            damaged[position] ^= 1
            path.write_bytes(damaged)
            with pytest.raises(Refused):
                check_release(DirectoryRelease(release), key)
        path.write_bytes(original)
    merge_version.rename(places.merge)


def test_one_changed_byte_in_a_gguf_file_is_found_in_a_forged_release_only_by_its_version(places: Places) -> None:
    """Digests that agree with the change are the reason why releases are signed and versions are content hashes."""
    weights = places.variants / "demo-R8.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    assert f"{weights.name}: sha256 is" in refusal_of(places.variants)
    named = places.variants.name
    forged = forge(places.variants)
    check_release(DirectoryRelease(forged))
    assert f"its version is {named}, its content is" in refusal_of(forged.rename(forged.with_name(named)))


def test_a_missing_file_an_added_one_and_a_link_are_named(places: Places) -> None:
    (places.variants / "demo-R6.safetensors").unlink()
    (places.variants / "demo-R4.gguf").write_bytes(gguf())
    found = refusal_of(places.variants)
    assert "demo-R6.safetensors: missing, though SHA256SUMS lists it" in found
    assert "demo-R4.gguf: not listed by provenance.json" in found
    assert "demo-R4.gguf: provenance.json does not say which variant it is" in found


def drop_verdict(predicate: dict[str, Any]) -> None:
    predicate["mergegate_variants"].pop()


def fail_verdict(predicate: dict[str, Any]) -> None:
    predicate["mergegate_variants"][0]["publishable"] = False


def disown_file(predicate: dict[str, Any]) -> None:
    predicate["buildDefinition"]["internalParameters"]["variants"]["R6"]["files"] = []


def share_file(predicate: dict[str, Any]) -> None:
    variants = predicate["buildDefinition"]["internalParameters"]["variants"]
    variants["R6"]["files"] = variants["R8"]["files"]


def drop_variant(predicate: dict[str, Any]) -> None:
    del predicate["buildDefinition"]["internalParameters"]["variants"]["R6"]


def name_another_merge(predicate: dict[str, Any]) -> None:
    predicate["buildDefinition"]["resolvedDependencies"][0]["digest"]["sha256"] = "0" * 64


def add_a_dependency(predicate: dict[str, Any]) -> None:
    predicate["buildDefinition"]["resolvedDependencies"] *= 2


def drop_the_dependency(predicate: dict[str, Any]) -> None:
    predicate["buildDefinition"]["resolvedDependencies"] = []


def name_another_base(predicate: dict[str, Any]) -> None:
    predicate["mergegate_card"]["base_model"] = ["acme/another"]


def become_a_merge(predicate: dict[str, Any]) -> None:
    predicate["buildDefinition"]["buildType"] = "urn:mergegate:merge:v1"


def become_unknown(predicate: dict[str, Any]) -> None:
    predicate["buildDefinition"]["buildType"] = "urn:mergegate:other:v1"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (drop_verdict, "it has files of R6, but no verdict that allows them"),
        (fail_verdict, "it has files of R8, but no verdict that allows them"),
        (disown_file, "it has no weights of R6"),
        (share_file, "demo-R6.safetensors: provenance.json does not say which variant it is"),
        (drop_variant, "its verdict allows R6, but no file is one of it"),
        (name_another_merge, "the address and the digest of its dependency differ"),
        (name_another_merge, "bom.json: its ancestors are not those"),
        (add_a_dependency, "it does not name the release of the merge as its only dependency"),
        (drop_the_dependency, "it does not name the release of the merge as its only dependency"),
        (name_another_base, "README.md: its metadata is not that of provenance.json (base_model)"),
        (become_a_merge, "recipe.yaml: missing"),
        (become_unknown, "buildType: 'urn:mergegate:other:v1'"),
    ],
)
def test_a_statement_that_disagrees_is_refused_although_all_digests_agree(
    places: Places, change: Callable[[dict[str, Any]], object], message: str
) -> None:
    edit_provenance(places.variants, change)
    assert message in refusal_of(forge(places.variants))


def test_a_card_and_a_provenance_that_name_the_same_wrong_base_model_are_refused(places: Places) -> None:
    _, front, page = (places.variants / CARD).read_text().split("---\n", 2)
    metadata = {**yaml.safe_load(front), "base_model": ["acme/another"]}
    (places.variants / CARD).write_text(f"---\n{yaml.safe_dump(metadata)}---\n{page}")
    edit_provenance(places.variants, lambda predicate: predicate.update(mergegate_card=metadata))
    found = refusal_of(forge(places.variants))
    assert "README.md: its base_model differs from the ancestors in provenance.json" in found
    assert "README.md: its base_model_relation is not 'quantized'" in found


def test_an_edited_card_must_still_name_the_merge(places: Places) -> None:
    card = places.variants / CARD
    card.write_text(card.read_text().replace(places.merge.name, "0" * 12))
    assert f"README.md: does not name the merge demo {places.merge.name}" in refusal_of(forge(places.variants))


def test_a_release_of_a_merge_that_claims_to_be_variants_is_refused(places: Places) -> None:
    edit_provenance(
        places.merge, lambda predicate: predicate["buildDefinition"].update(buildType="urn:mergegate:variant:v1")
    )
    found = refusal_of(forge(places.merge))
    assert "it does not name the release of the merge as its only dependency" in found
    assert "model.safetensors: provenance.json does not say which variant it is" in found


def test_a_merge_without_a_recipe_is_refused_although_nothing_lists_one(places: Places) -> None:
    (places.merge / RECIPE).unlink()
    bom, statement = json.loads((places.merge / BOM).read_text()), statement_of(places.merge)
    for content, key in ((bom, "components"), (statement, "subject")):
        content[key] = [item for item in content[key] if item["name"] != RECIPE]
    (places.merge / BOM).write_text(json.dumps(bom))
    (places.merge / PROVENANCE).write_text(json.dumps(statement))
    assert "recipe.yaml: missing" in refusal_of(forge(places.merge))


# The link to the merge.


def test_variants_alone_are_verified_and_say_that_their_merge_was_not(places: Places, project: Project) -> None:
    shutil.rmtree(places.merge)
    verified = mergegate.verify(places.variants)
    assert verified.merge is not None
    assert f"{places.merge} does not exist; pass it with --merge" in verified.merge.problem
    moved = places.variants.rename(places.variants.parents[2] / "variants")
    result = project.mergegate("verify", str(moved))
    assert result.exit_code == 0, result.output
    assert "whose release was not checked:" in result.output
    assert "    it is not next to these variants; pass it with --merge" in result.output.splitlines()


def test_the_merge_can_be_named(places: Places, project: Project) -> None:
    expected = _link(places)
    moved = places.merge.rename(places.merge.parents[2] / "merge")
    assert mergegate.verify(places.variants, merge=moved).merge == replace(expected, reference=str(moved))
    result = project.mergegate("verify", str(places.variants), "--merge", str(moved.with_name("nothing")))
    assert result.exit_code == 2
    assert "no such directory" in result.output
    result = project.mergegate("verify", str(moved), "--merge", str(moved))
    assert result.exit_code == 2
    assert "is itself the release of a merge" in result.output


def _link(places: Places) -> MergeLink:
    address = f"../../demo/{places.merge.name}"
    return MergeLink("demo", places.merge.name, sha256_of((places.merge / SUMS).read_bytes()), address)


@pytest.mark.parametrize("change", ["weights", "another merge", "variants"])
def test_a_merge_that_is_not_the_one_is_refused(places: Places, change: str) -> None:
    merge = places.merge
    if change == "weights":
        content = bytearray((merge / "model.safetensors").read_bytes())
        content[-1] ^= 1
        (merge / "model.safetensors").write_bytes(content)
        assert "model.safetensors: sha256 is" in refusal_of(places.variants)
    if change == "another merge":
        (merge / "report.html").write_text("another report")
        forged = forge(merge)
        check_release(DirectoryRelease(forged))
        assert "the release of the merge that the variants were quantized from" in refusal_of(
            places.variants, merge=str(forged)
        )
    if change == "variants":
        assert "a release of quantized variants" in refusal_of(places.variants, merge=str(places.variants))


def test_a_key_must_have_signed_the_merge_too(places: Places, tmp_path: Path) -> None:
    private, public = write_keys(tmp_path)
    release = places.variants.rename(places.variants.with_name("signed"))
    (release / SIGNATURE).write_text(sign("demo-Rounded", hashes_of(release, SIGNATURE), private))
    assert "model.sig: missing; the release is not signed" in refusal_of(release, key=public)
    merge = places.merge.rename(places.merge.with_name("signed"))
    (merge / SIGNATURE).write_text(sign("demo", hashes_of(merge, SIGNATURE), private))
    verified = check_release(DirectoryRelease(release), public, merge=str(merge))
    assert verified.signed == "valid"


@pytest.mark.parametrize(
    "address",
    [
        "../../../etc/passwd",
        "/etc",
        "../../demo/../../x",
        "../../../demo/1",
        "../../other/1",
        "oci://evil.example/a:1",
        "evil/demo@1",
    ],
)
def test_an_address_that_is_not_next_to_the_variants_is_not_opened(
    places: Places, address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(reference: str) -> None:
        raise AssertionError(f"{reference} was opened")

    monkeypatch.setattr("mergegate.tasks.publish.releases.origin.find_release", refuse)
    link = find_merge(DirectoryRelease(places.variants), replace(_link(places), address=address))
    assert isinstance(link, MergeLink)
    assert "--merge" in link.problem


@dataclass(frozen=True)
class Elsewhere:
    """A release that is not a directory."""

    reference: str


@pytest.mark.parametrize(
    ("variants", "address", "opened"),
    [
        ("acme/demo-GGUF@3f9a0c71b2de", "acme/demo@1", True),
        ("s3://models/acme/demo-GGUF@3f9a0c71b2de", "s3://models/acme/demo@1", True),
        ("oci://localhost:5000/demo-gguf@sha256:3f9a", "oci://localhost:5000/demo:1", True),
        ("acme/demo-GGUF@3f9a0c71b2de", "evil/demo@1", False),
        ("oci://ghcr.io/acme/demo-gguf@sha256:3f9a", "oci://evil.example/acme/demo:1", False),
        ("acme/demo-GGUF@3f9a0c71b2de", "../../demo/1", False),
    ],
)
def test_only_the_place_next_to_the_variants_is_opened_over_the_network(
    places: Places, variants: str, address: str, opened: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mergegate.tasks.publish.releases.origin.find_release", Elsewhere)
    found = find_merge(Elsewhere(variants), replace(_link(places), address=address))  # type: ignore[arg-type]
    assert (found == Elsewhere(address)) is opened


# The verdicts.


def flip_an_outcome_of_the_merge(evidence: Evidence) -> None:
    evidence.flip_outcome("merge", at=3)


def swap_variant_and_merge(evidence: Evidence) -> None:
    names = {"merge": "R8", "R8": "merge"}

    def change(columns: Columns) -> None:
        columns["model"] = [names.get(model, model) for model in columns["model"]]
        if "loglik" in columns:
            columns["loglik"] = [value - 0.01 * (number % 7) for number, value in enumerate(columns["loglik"])]

    evidence.edit_table(LIKELIHOODS, change)


def change_a_prompt(evidence: Evidence) -> None:
    def change(columns: Columns) -> None:
        columns["prompt_hash"][row_of(columns, "R8")] = "0" * 64

    evidence.edit_table(OUTCOMES, change)


def raise_a_limit(evidence: Evidence) -> None:
    evidence.edit_record(lambda record: record["inputs"]["guards"][0].update(max_drop=9.0, margin=None))


def exchange_the_evidence(evidence: Evidence) -> None:
    """Give the better variant the evidence of the worse one, and the reverse."""
    folder = evidence.release / "evidence"
    one, other = folder / "R8", folder / "R6"
    one.rename(folder / "x")
    other.rename(one)
    (folder / "x").rename(other)


OWN_FORGERIES = (
    flip_an_outcome_of_the_merge,
    swap_variant_and_merge,
    change_a_prompt,
    raise_a_limit,
    exchange_the_evidence,
)


def test_the_verdict_of_each_variant_follows_from_the_release_alone(
    places: Places, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MERGEGATE_HOME", str(tmp_path / "no-store"))
    verified = mergegate.verify(places.variants, verdict=True)
    assert list(verified.variants) == ["R8", "R6"]
    stated = {each["type"]: each["gate"] for each in statement_of(places.variants)["predicate"]["mergegate_variants"]}
    for name, recomputed in verified.variants.items():
        assert recomputed.verdict.model_dump(mode="json") == stated[name]
        assert {guard.reference for guard in recomputed.verdict.guards} == {"merge"}
    (read,) = read_with_other_words(places.variants)
    assert read["differences"] == []
    assert len(read["sentences"]) >= len(stated)
    assert verified.recomputed is None
    assert mergegate.verify(places.variants).variants == {}
    assert not (tmp_path / "no-store").exists()


@pytest.mark.parametrize("change", [*FORGERIES, *OWN_FORGERIES])
def test_a_change_is_noticed_by_its_digest_or_else_by_the_verdict(
    places: Places, change: Callable[[Evidence], None]
) -> None:
    change(Evidence(places.variants, "R8"))
    with pytest.raises(Refused, match="sha256 is"):
        check_release(DirectoryRelease(places.variants), recompute=True)
    forged = DirectoryRelease(forge(places.variants))
    check_release(forged)  # All digests agree.
    with pytest.raises(Refused, match=r"does not follow from its outcomes|leads to no verdict"):
        check_release(forged, recompute=True)


@pytest.mark.parametrize(
    ("update", "message"),
    [
        ({"outcome": "inconclusive"}, "differs from that of its gate"),
        ({"reasons": ["a better reason"]}, "differs from that of its gate"),
        ({"gate": None}, "the gate did not decide"),
        ({"checks": [{"name": "text", "outcome": "fail", "seen": "no answer"}]}, "allows R8, though"),
        ({"gate": {}}, "verdicts that cannot be read"),
    ],
)
def test_a_verdict_on_a_variant_that_does_not_follow_from_its_parts_is_refused(
    places: Places, update: dict[str, Any], message: str
) -> None:
    edit_provenance(places.variants, lambda predicate: predicate["mergegate_variants"][0].update(update))
    forged = forge(places.variants)
    assert message in refusal_of(forged, recompute=True)


def test_variants_without_evidence_are_verified_only_without_their_verdicts(places: Places) -> None:
    shutil.rmtree(places.variants / "evidence" / "R6")
    bom, statement = json.loads((places.variants / BOM).read_text()), statement_of(places.variants)
    for content, key in ((bom, "components"), (statement, "subject")):
        content[key] = [item for item in content[key] if not item["name"].startswith("evidence/R6")]
    (places.variants / BOM).write_text(json.dumps(bom))
    (places.variants / PROVENANCE).write_text(json.dumps(statement))
    forged = DirectoryRelease(forge(places.variants))
    check_release(forged)
    with pytest.raises(InvalidInput, match=r"R6: no file evidence/R6/gate\.json"):
        check_release(forged, recompute=True)


# Reproduction.


def test_variants_are_reproduced_to_the_byte_from_the_release_of_their_merge(
    places: Places, project: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = project.artifacts("variant")
    result = project.mergegate("reproduce", str(places.variants), "--json")
    assert result.exit_code == 0, result.output
    answer = json.loads(result.stdout)
    assert answer["status"] == "reproduced"
    assert answer["files"] == ["demo-R6.safetensors", "demo-R8.safetensors"]
    assert project.artifacts("variant") == before
    assert project.mergegate("run", "profiles/demo.yaml", "--json").exit_code == 0


@pytest.mark.parametrize("name", ["demo-R8.safetensors", "demo-R6.safetensors"])
def test_weights_that_the_merge_does_not_give_are_refused_with_the_first_tensor(
    places: Places, project: Project, name: str
) -> None:
    weights = bytearray((places.variants / name).read_bytes())
    weights[-1] ^= 1
    (places.variants / name).write_bytes(weights)
    last = list(load_file(places.variants / name))[-1]
    result = project.mergegate("reproduce", str(forge(places.variants)))
    assert result.exit_code == 3
    assert f"1 of 2 rebuilt files differ: {name} (tensor " in result.output
    assert last in result.output or "tensor " in result.output
    assert "device and tools are the same" in result.output


def test_a_file_of_weights_that_is_not_rebuilt_is_refused_in_any_format(places: Places, project: Project) -> None:
    (places.variants / "extra.onnx").write_bytes(b"weights")
    edit_provenance(
        places.variants,
        lambda predicate: predicate["buildDefinition"]["internalParameters"]["variants"]["R8"]["files"].append(
            "extra.onnx"
        ),
    )
    bom, statement = json.loads((places.variants / BOM).read_text()), statement_of(places.variants)
    bom["components"].append({"name": "extra.onnx", "hashes": [{"content": ""}]})
    statement["subject"].append({"name": "extra.onnx", "digest": {}})
    (places.variants / BOM).write_text(json.dumps(bom))
    (places.variants / PROVENANCE).write_text(json.dumps(statement))
    result = project.mergegate("reproduce", str(forge(places.variants)))
    assert result.exit_code == 3, result.output
    assert "extra.onnx (it was not rebuilt)" in result.output


def test_other_versions_of_the_tools_are_named_if_the_bytes_differ(places: Places, project: Project) -> None:
    weights = bytearray((places.variants / "demo-R8.safetensors").read_bytes())
    weights[-1] ^= 1
    (places.variants / "demo-R8.safetensors").write_bytes(weights)

    def change(predicate: dict[str, Any]) -> None:
        predicate["buildDefinition"]["internalParameters"]["variants"]["R8"]["versions"]["rounder"] = "0.9"

    edit_provenance(places.variants, change)
    result = project.mergegate("reproduce", str(forge(places.variants)))
    assert result.exit_code == 3
    assert "the release was built with rounder 0.9 (here 1.0); use those versions" in result.output


def test_variants_whose_merge_is_missing_are_not_reproduced(places: Places, project: Project) -> None:
    moved = places.merge.rename(places.merge.parents[2] / "merge")
    result = project.mergegate("reproduce", str(places.variants))
    assert result.exit_code == 2
    assert "pass its directory or address with --merge" in result.output
    assert project.mergegate("reproduce", str(places.variants), "--merge", str(moved)).exit_code == 0


@pytest.mark.parametrize(
    "variant", [{"format": "nothing"}, {"format": "rounded"}, {"format": "rounded", "bits": 8}, None]
)
def test_settings_that_this_version_cannot_read_are_refused_in_words(
    places: Places, project: Project, variant: object
) -> None:
    edit_provenance(
        places.variants,
        lambda predicate: predicate["buildDefinition"]["externalParameters"].update(variant=variant),
    )
    result = project.mergegate("reproduce", str(forge(places.variants)))
    assert result.exit_code == 3, result.output
    assert "provenance that this version of mergegate can read" in result.output


# The rule about weights, and the first difference.


def test_a_rebuild_must_give_every_file_except_those_about_the_model(places: Places) -> None:
    for release in (places.variants, places.merge):
        names = {path.name for path in files_of(release)}
        assert {name for name in names if is_rebuilt(name)} == {
            name for name in names if name.endswith((".safetensors", ".jinja"))
        }
    assert all(is_rebuilt(f"model{suffix}") for suffix in (".gguf", ".bin", ".pt", ".onnx", ".npz", ".new"))


def test_the_name_in_a_gguf_file_depends_on_the_weights_only() -> None:
    """A published merge is not the stored artifact: the digest of the artifact covers records of the run, too."""
    files = (("config.json", "1" * 64), ("model.safetensors", "2" * 64))
    stored = Model(name="merge", digest="a" * 64, directory=Path("store"), files=(*files, ("value.json", "3" * 64)))
    published = Model(name="merge", digest="b" * 64, directory=Path("release"), files=files)
    name_of = GgufFormat(format="gguf", types=("Q8_0",))._name_of
    assert name_of(stored) == name_of(published)
    other = published.model_copy(update={"files": (files[0], ("model.safetensors", "4" * 64))})
    assert name_of(published) != name_of(other)


def test_the_first_difference_of_two_gguf_files_is_named(tmp_path: Path) -> None:
    def named(**changes: Any) -> str:
        (tmp_path / "a.gguf").write_bytes(gguf())
        (tmp_path / "b.gguf").write_bytes(changes.get("content") or gguf(**changes))
        return first_difference(tmp_path / "a.gguf", tmp_path / "b.gguf")

    assert named() == ""
    assert named(fill=2) == "tensor token_embd.weight"
    content = bytearray(gguf())
    content[-14] ^= 1
    assert named(content=bytes(content)) == "tensor output_norm.weight"
    assert named(metadata={**METADATA, "tokenizer.chat_template": ("s", "x")}) == "metadata tokenizer.chat_template"
    assert named(metadata={**METADATA, "tokenizer.ggml.tokens": ("[s", ["a"])}) == "metadata tokenizer.ggml.tokens"
    tensors = [("token_embd.weight", (0, 1, 4), (3, 64))]
    assert named(tensors=tensors) == "tensor token_embd.weight: Q8_0 [3, 64], rebuilt F32 [3, 64]"
    assert named(tensors=[("other", (0, 1, 4), (3,))]) == "tensor token_embd.weight, which only the release has"
    assert named(content=b"GGUF") == ""


def test_the_first_difference_of_two_safetensors_files_is_named(tmp_path: Path) -> None:
    import torch

    tensors = {"a": torch.zeros(3), "b": torch.ones(4)}
    save_file(tensors, tmp_path / "a.safetensors")
    save_file({**tensors, "b": torch.zeros(4)}, tmp_path / "b.safetensors")
    assert first_difference(tmp_path / "a.safetensors", tmp_path / "b.safetensors") == "tensor b"
