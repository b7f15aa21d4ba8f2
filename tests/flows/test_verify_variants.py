"""`mergegate verify` and `reproduce` on released variants: every change is detected, and so is another merge."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import forged_evidence
import pytest
from demo_project import Project, expect
from gguf_samples import METADATA, gguf
from other_words import read_with_other_words
from safetensors.torch import save_file
from signing_keys import write_keys
from tampering import flip

import mergegate
from mergegate.merge_core.errors import InvalidInput
from mergegate.tasks.models.checkpoints import Model
from mergegate.tasks.quality.gate.verdict_record import LIKELIHOODS
from mergegate.tasks.quality.variants.gguf import GgufFormat
from mergegate.tasks.release.publish.content import BOM, CARD, FACTS, PROVENANCE, SUMS, sha256_of
from mergegate.tasks.release.publish.releases.origin import MergeLink, find_merge
from mergegate.tasks.release.publish.releases.reproduce import first_difference, is_rebuilt
from mergegate.tasks.release.publish.releases.verify import check_release
from mergegate.tasks.release.publish.targets.directory import DirectoryRelease

pytestmark = pytest.mark.story


@dataclass(frozen=True)
class Places:
    """Copies of the release of variants and of the release of their merge, next to each other."""

    variants: Path
    merge: Path


@pytest.fixture(scope="module")
def project(published_variants: Project) -> Project:
    """Return the project of the released demo after it has released variants in two places, too."""
    return published_variants


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


# Verification of the files and statements.


def test_released_variants_and_their_merge_are_what_they_say(project: Project) -> None:
    release = "releases/demo-Rounded/latest"
    result = expect(project.mergegate("verify", release), 0)
    merge = (project.root / "releases/demo/latest").resolve()
    assert f"quantized from demo {merge.name}, whose release was verified, too:" in result.output
    assert f"    releases/demo/{merge.name}" in result.output.splitlines()
    answer = json.loads(project.mergegate("verify", release, "--json").stdout)
    assert answer["merge"]["version"] == merge.name
    assert answer["merge"]["problem"] == ""
    assert "merge" not in json.loads(project.mergegate("verify", "releases/demo/latest", "--json").stdout)
    narrow = expect(project.mergegate("verify", release, "--verdict", columns=80), 0)
    assert max(map(len, narrow.output.splitlines())) <= 80
    # The releases of both places are whole, and name their merge.
    assert project.mergegate("verify", "releases/demo-Second/latest").exit_code == 0
    for suffix in ("Rounded", "Second"):
        latest = project.root / "releases" / f"demo-{suffix}" / "latest"
        subprocess.run(["sha256sum", "--quiet", "--check", SUMS], cwd=latest, check=True)
        assert merge.name in (latest / CARD).read_text()


def test_one_changed_byte_of_weights_is_found_in_a_forged_release_only_by_its_version(places: Places) -> None:
    """Digests that agree with the change are the reason why releases are signed and versions are content hashes."""
    weights = places.variants / "demo-R8.safetensors"
    flip(weights)
    assert f"{weights.name}: sha256 is" in forged_evidence.refusal_of(places.variants)
    named = places.variants.name
    forged = forged_evidence.forge(places.variants)
    check_release(DirectoryRelease(forged))
    assert f"its version is {named}, its content is" in forged_evidence.refusal_of(
        forged.rename(forged.with_name(named))
    )


BUILD, OWN = "buildDefinition", "buildDefinition.internalParameters.variants"
DEPENDENCIES = f"{BUILD}.resolvedDependencies"
ONLY_DEPENDENCY = "it does not name the release of the merge as its only dependency"
NO_VERDICT = "but no verdict that allows them"


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("mergegate_variants.1", ..., f"it has files of R6, {NO_VERDICT}"),
        ("mergegate_variants.0.publishable", False, f"it has files of R8, {NO_VERDICT}"),
        (f"{OWN}.R6.files", [], "it has no weights of R6"),
        (
            f"{OWN}.R6.files",
            ["demo-R8.safetensors"],
            "R6.safetensors: provenance.json does not say which variant it is",
        ),
        (f"{OWN}.R6", ..., "its verdict allows R6, but no file is one of it"),
        (f"{DEPENDENCIES}.0.digest.sha256", "0" * 64, "the address and the digest of its dependency differ"),
        (f"{DEPENDENCIES}.0.digest.sha256", "0" * 64, "bom.json: its ancestors are not those"),
        (DEPENDENCIES, lambda old: 2 * old, ONLY_DEPENDENCY),
        (DEPENDENCIES, [], ONLY_DEPENDENCY),
        (
            "mergegate_card.base_model",
            ["acme/another"],
            f"{CARD}: its metadata is not that of {PROVENANCE} (base_model)",
        ),
        (f"{BUILD}.buildType", "urn:mergegate:merge:v1", "recipe.yaml: missing"),
        (f"{BUILD}.buildType", "urn:mergegate:other:v1", "buildType: 'urn:mergegate:other:v1'"),
    ],
)
def test_a_statement_that_disagrees_is_refused_although_all_digests_agree(
    places: Places, path: str, value: Any, message: str
) -> None:
    forged_evidence.edit_provenance(places.variants, path, value)
    assert message in forged_evidence.refusal_of(forged_evidence.forge(places.variants))


def test_a_card_and_a_provenance_that_name_the_same_wrong_base_model_are_refused(places: Places) -> None:
    forged_evidence.edit_provenance(
        places.variants, "mergegate_card", forged_evidence.edit_card(places.variants, base_model=["acme/another"])
    )
    found = forged_evidence.refusal_of(forged_evidence.forge(places.variants))
    assert "README.md: its base_model differs from the ancestors in provenance.json" in found
    assert "README.md: its base_model_relation is not 'quantized'" in found


def test_an_edited_card_must_still_name_the_merge(places: Places) -> None:
    card = places.variants / CARD
    card.write_text(card.read_text().replace(places.merge.name, "0" * 12))
    assert f"README.md: does not name the merge demo {places.merge.name}" in forged_evidence.refusal_of(
        forged_evidence.forge(places.variants)
    )


def test_a_release_of_a_merge_that_claims_to_be_variants_is_refused(places: Places) -> None:
    forged_evidence.edit_provenance(places.merge, f"{BUILD}.buildType", "urn:mergegate:variant:v1")
    found = forged_evidence.refusal_of(forged_evidence.forge(places.merge))
    assert ONLY_DEPENDENCY in found
    assert "model.safetensors: provenance.json does not say which variant it is" in found


# The link to the merge.


def test_variants_alone_are_verified_and_say_that_their_merge_was_not(places: Places, project: Project) -> None:
    shutil.rmtree(places.merge)
    verified = mergegate.verify(places.variants)
    assert verified.merge is not None
    assert f"{places.merge} does not exist; pass it with --merge" in verified.merge.problem
    moved = places.variants.rename(places.variants.parents[2] / "variants")
    result = expect(project.mergegate("verify", str(moved)), 0, "whose release was not checked:")
    assert "    it is not next to these variants; pass it with --merge" in result.output.splitlines()


def test_the_merge_can_be_named(places: Places, project: Project) -> None:
    expected = _link(places)
    moved = places.merge.rename(places.merge.parents[2] / "merge")
    assert mergegate.verify(places.variants, merge=moved).merge == replace(expected, reference=str(moved))
    result = project.mergegate("verify", str(places.variants), "--merge", str(moved.with_name("nothing")))
    expect(result, 2, "no such directory")
    expect(project.mergegate("verify", str(moved), "--merge", str(moved)), 2, "is itself the release of a merge")


def _link(places: Places) -> MergeLink:
    address = f"../../demo/{places.merge.name}"
    return MergeLink("demo", places.merge.name, sha256_of((places.merge / SUMS).read_bytes()), address)


def test_a_merge_that_is_not_the_one_is_refused(places: Places) -> None:
    merge = places.merge
    flip(merge / "model.safetensors")
    assert "model.safetensors: sha256 is" in forged_evidence.refusal_of(places.variants)
    flip(merge / "model.safetensors")
    assert "a release of quantized variants" in forged_evidence.refusal_of(places.variants, merge=str(places.variants))
    (merge / "report.html").write_text("another report")
    forged = forged_evidence.forge(merge)
    check_release(DirectoryRelease(forged))
    found = forged_evidence.refusal_of(places.variants, merge=str(forged))
    assert "the release of the merge that the variants were quantized from" in found


def test_a_key_must_have_signed_the_merge_too(places: Places, tmp_path: Path) -> None:
    private, public = write_keys(tmp_path)
    release = places.variants.rename(places.variants.with_name("signed"))
    forged_evidence.sign_release(release, private, "demo-Rounded")
    assert "model.sig: missing; the release is not signed" in forged_evidence.refusal_of(release, key=public)
    merge = places.merge.rename(places.merge.with_name("signed"))
    forged_evidence.sign_release(merge, private)
    assert check_release(DirectoryRelease(release), public, merge=str(merge)).signed == "valid"


@dataclass(frozen=True)
class Elsewhere:
    """A release that is not a directory."""

    reference: str


HUB = "acme/demo-GGUF@3f9a0c71b2de"
NOT_NEXT = ("../../../etc/passwd", "/etc", "../../demo/../../x", "../../../demo/1", "../../other/1")


@pytest.mark.parametrize(
    ("variants", "address", "opened"),
    [
        *((None, address, False) for address in (*NOT_NEXT, "oci://evil.example/a:1", "evil/demo@1")),
        (HUB, "acme/demo@1", True),
        ("s3://models/acme/demo-GGUF@3f9a0c71b2de", "s3://models/acme/demo@1", True),
        ("oci://localhost:5000/demo-gguf@sha256:3f9a", "oci://localhost:5000/demo:1", True),
        (HUB, "evil/demo@1", False),
        ("oci://ghcr.io/acme/demo-gguf@sha256:3f9a", "oci://evil.example/acme/demo:1", False),
        (HUB, "../../demo/1", False),
    ],
)
def test_only_the_place_next_to_the_variants_is_opened(
    places: Places, variants: str | None, address: str, opened: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    found: list[str] = []
    monkeypatch.setattr(
        "mergegate.tasks.release.publish.releases.origin.find_release",
        lambda address: found.append(address) or Elsewhere(address),
    )
    release: Any = Elsewhere(variants) if variants else DirectoryRelease(places.variants)
    link = find_merge(release, replace(_link(places), address=address))
    assert found == ([address] if opened else [])
    if opened:
        assert link == Elsewhere(address)
    else:
        assert isinstance(link, MergeLink)
        assert "--merge" in link.problem


# The verdicts.


def swap_variant_and_merge(evidence: forged_evidence.Evidence) -> None:
    names = {"merge": "R8", "R8": "merge"}

    def change(columns: forged_evidence.Columns) -> None:
        columns["model"] = [names.get(model, model) for model in columns["model"]]
        columns["loglik"] = [value - 0.01 * (number % 7) for number, value in enumerate(columns["loglik"])]

    evidence.edit_table(LIKELIHOODS, change)


def exchange_the_evidence(evidence: forged_evidence.Evidence) -> None:
    """Give the better variant the evidence of the worse one, and the reverse."""
    folder = evidence.release / "evidence"
    (folder / "R8").rename(folder / "x")
    (folder / "R6").rename(folder / "R8")
    (folder / "x").rename(folder / "R6")


ALL_FORGERIES: dict[str, Callable[[forged_evidence.Evidence], object]] = {
    "flip an outcome": forged_evidence.FORGERIES["flip an outcome"],
    "truncate the record": forged_evidence.FORGERIES["truncate the record"],
    "flip an outcome of the merge": lambda evidence: evidence.flip_outcome("merge", at=3),
    "swap variant and merge": swap_variant_and_merge,
    "raise a limit": forged_evidence.record(
        "inputs.guards.0", lambda guard: {**guard, "max_drop": 9.0, "margin": None}
    ),
    "exchange the evidence": exchange_the_evidence,
}


@pytest.mark.proof
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


@pytest.mark.parametrize("change", ALL_FORGERIES.values(), ids=ALL_FORGERIES)
def test_a_change_is_noticed_by_its_digest_or_else_by_the_verdict(
    places: Places, change: Callable[[forged_evidence.Evidence], object]
) -> None:
    change(forged_evidence.Evidence(places.variants, "R8"))
    forged_evidence.require_digest_or_verdict_notices(places.variants)


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
    forged_evidence.edit_provenance(places.variants, "mergegate_variants.0", lambda variant: {**variant, **update})
    assert message in forged_evidence.refusal_of(forged_evidence.forge(places.variants), recompute=True)


def test_variants_without_evidence_are_verified_only_without_their_verdicts(places: Places) -> None:
    forged_evidence.remove(places.variants, "evidence/R6")
    forged = DirectoryRelease(forged_evidence.forge(places.variants))
    check_release(forged)
    with pytest.raises(InvalidInput, match=r"R6: no file evidence/R6/gate\.json"):
        check_release(forged, recompute=True)


# Reproduction.


def test_variants_are_reproduced_to_the_byte_from_the_release_of_their_merge(places: Places, project: Project) -> None:
    before = project.artifacts("variant")
    result = expect(project.mergegate("reproduce", str(places.variants), "--json"), 0)
    answer = json.loads(result.stdout)
    assert answer["status"] == "reproduced"
    assert answer["files"] == ["demo-R6.safetensors", "demo-R8.safetensors"]
    assert project.artifacts("variant") == before
    # Without the merge next to it, its directory must be passed.
    moved = places.merge.rename(places.merge.parents[2] / "merge")
    expect(project.mergegate("reproduce", str(places.variants)), 2, "pass its directory or address with --merge")
    assert project.mergegate("reproduce", str(places.variants), "--merge", str(moved)).exit_code == 0


@pytest.mark.parametrize("name", ["demo-R8.safetensors", "demo-R6.safetensors"])
def test_weights_that_the_merge_does_not_give_are_refused_with_the_first_tensor(
    places: Places, project: Project, name: str
) -> None:
    flip(places.variants / name)
    forged = forged_evidence.forge(places.variants)
    result = project.mergegate("reproduce", str(forged))
    expect(result, 3, f"1 of 2 rebuilt files differ: {name} (tensor ", "device and tools are the same")
    # Other versions of the tools are named.
    for kind in ("R8", "R6"):
        forged_evidence.edit_provenance(forged, f"{OWN}.{kind}.versions.rounder", "0.9")
    result = project.mergegate("reproduce", str(forged_evidence.forge(forged)))
    expect(result, 3, "the release was built with rounder 0.9 (here 1.0); use those versions")


def test_a_file_of_weights_that_is_not_rebuilt_is_refused_in_any_format(places: Places, project: Project) -> None:
    release = places.variants
    (release / "extra.onnx").write_bytes(b"weights")
    forged_evidence.edit_provenance(release, f"{OWN}.R8.files", lambda files: [*files, "extra.onnx"])
    forged_evidence.edit(release / FACTS, "files", lambda files: {**files, "extra.onnx": ""})
    part, subject = {"name": "extra.onnx", "hashes": [{"content": ""}]}, {"name": "extra.onnx", "digest": {}}
    forged_evidence.edit(release / BOM, "components", lambda components: [*components, part])
    forged_evidence.edit(release / PROVENANCE, "subject", lambda subjects: [*subjects, subject])
    expect(project.mergegate("reproduce", str(forged_evidence.forge(release))), 3, "extra.onnx (it was not rebuilt)")


@pytest.mark.parametrize(
    "variant", [{"format": "nothing"}, {"format": "rounded"}, {"format": "rounded", "bits": 8}, None]
)
def test_settings_that_this_version_cannot_read_are_refused_in_words(
    places: Places, project: Project, variant: object
) -> None:
    forged_evidence.edit_provenance(places.variants, f"{BUILD}.externalParameters.variant", variant)
    result = project.mergegate("reproduce", str(forged_evidence.forge(places.variants)))
    expect(result, 3, "provenance that this version of mergegate can read")


# The rule about weights, and the first difference.


def test_a_rebuild_must_give_every_file_except_those_about_the_model(places: Places) -> None:
    companions = ("config.json", "tokenizer.json", ".safetensors", ".jinja")
    for release in (places.variants, places.merge):
        names = {path.relative_to(release).as_posix() for path in forged_evidence.files_of(release)}
        assert {name for name in names if is_rebuilt(name)} == {name for name in names if name.endswith(companions)}
    weights = [f"model{suffix}" for suffix in (".gguf", ".bin", ".pt", ".onnx", ".npz", ".new")]
    read = ("special_tokens_map.json", "adapter_config.json", "model", "1_Pooling/README.md", "evidence/x.json")
    assert all(map(is_rebuilt, (*weights, *read)))


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
