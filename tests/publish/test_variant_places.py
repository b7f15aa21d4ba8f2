"""Test releases of quantized variants: their places next to the merge at every target, and their files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from bucket import BUCKET, s3_on_loopback
from forked_publishers import forked_publishers
from gguf_samples import METADATA, gguf
from pydantic import TypeAdapter
from release_samples import publishable, sha, variant_parts
from shelf_target import ShelfTarget
from signing_keys import write_keys
from target_contract import attempts_with_fault

from mergegate.merge_core.errors import InvalidInput, Refused
from mergegate.tasks.models.checkpoints import parse_card
from mergegate.tasks.release import publish as publishing
from mergegate.tasks.release.publish.documents.facts import MergeRelease
from mergegate.tasks.release.publish.targets import PublishTarget, Target, check_target
from mergegate.tasks.release.publish.targets.directory import DirectoryTarget

S3 = {"to": "s3", "url": "s3://models/acme/demo"}
PLACES = [
    ({"to": "hub", "repo": "acme/demo", "visibility": "public", "gated": "auto"}, "acme/demo-GGUF", "acme/demo@v1"),
    (S3, "s3://models/acme/demo-GGUF", "s3://models/acme/demo@v1"),
    (S3 | {"url": "s3://models/acme/demo/"}, "s3://models/acme/demo-GGUF", "s3://models/acme/demo@v1"),
    ({"to": "oci", "repository": "ghcr.io/acme/demo"}, "oci://ghcr.io/acme/demo-gguf", "oci://ghcr.io/acme/demo:v1"),
    ({"to": "directory", "path": "releases/demo"}, ".", "../../demo/v1"),
]


def target(settings: dict[str, object]) -> PublishTarget:
    return TypeAdapter[PublishTarget](Target).validate_python(settings)


@pytest.mark.parametrize(("settings", "address", "reference"), PLACES)
def test_the_place_of_variants_is_next_to_the_merge_and_keeps_all_other_settings(
    settings: dict[str, object], address: str, reference: str
) -> None:
    shared = {"version": "v1", "sign_key": "release.key", "approval": {"timeout": "2 h"}}
    merge = target(settings | shared)
    place = merge.for_variants("GGUF")
    assert type(place) is type(merge)
    assert place.address == address
    assert merge.reference_to("v1") == reference
    changed = {name for name, value in place.model_dump().items() if value != merge.model_dump()[name]}
    assert len(changed) == 1
    assert place == merge.for_variants("GGUF")
    assert place != merge.for_variants("FP8")


def test_mlflow_has_a_registered_model_for_the_variants_next_to_files_at_its_storage() -> None:
    merge = target({"to": "mlflow", "model": "demo", "storage": {"to": "hub", "repo": "acme/demo"}})
    assert merge.for_variants("FP8") == target(
        {"to": "mlflow", "model": "demo-FP8", "storage": {"to": "hub", "repo": "acme/demo-FP8"}}
    )
    assert (merge.hub_id, target(S3).hub_id) == ("acme/demo", None)
    assert merge.reference_to("v1") == "acme/demo@v1"


def test_a_suffix_that_a_registry_does_not_accept_is_named() -> None:
    with pytest.raises(InvalidInput) as refused:
        target({"to": "oci", "repository": "ghcr.io/acme/demo"}).for_variants("Q8.")
    assert refused.value.where == "variants: suffix 'Q8.'"
    assert "ghcr.io/acme/demo-q8." in refused.value.found


@pytest.mark.parametrize("path", [".", "..", "a/.."])
def test_a_directory_without_a_name_has_no_place_for_variants(path: str) -> None:
    with pytest.raises(InvalidInput, match=r"publish\.path: "):
        DirectoryTarget(path=Path(path)).for_variants("GGUF")


def test_the_check_before_the_merge_looks_at_every_place(tmp_path: Path) -> None:
    place = DirectoryTarget(path=tmp_path / "demo")
    check_target(place, tmp_path, ["GGUF", "FP8"])
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "demo-FP8").write_text("a file in the way")
    with pytest.raises(InvalidInput, match="demo-FP8 is not a directory"):
        check_target(place, tmp_path, ["GGUF", "FP8"])


def test_two_entries_never_share_a_place(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="another entry would be published to the same place"):
        check_target(target({"to": "oci", "repository": "localhost:1/demo"}), tmp_path, ["GGUF", "gguf"])


def test_a_target_of_another_package_supports_variants_only_if_it_says_so(tmp_path: Path) -> None:
    shelf = ShelfTarget(to="shelf", place=tmp_path)
    check_target(shelf, tmp_path)
    with pytest.raises(InvalidInput, match="variants: the target shelf does not support variants"):
        check_target(shelf, tmp_path, ["GGUF"])


MERGE = MergeRelease("demo", "3f9a0c71b2de", sha("sums"), "acme/demo@3f9a0c71b2de", "acme/demo")
HUB = target({"to": "hub", "repo": "acme/demo"}).for_variants("GGUF")


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Return the files of a release of variants, of which one did not pass."""
    root = tmp_path_factory.mktemp("variants")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MERGEGATE_HOME", str(root / "state"))
        return texts(variant_parts(root, MERGE, "Q8_0", "Q4_0", "Q6_K", failed=["Q4_0"]))


def texts(parts: Any, place: PublishTarget = HUB) -> dict[str, str]:
    return {file.name: file.read().decode("latin-1") for file in parts.files(place)}


def test_a_release_of_variants_has_the_weights_that_passed_and_everything_about_them(files: dict[str, str]) -> None:
    licenses = {name for name in files if name.startswith("licenses/")}
    documents = {"COMPLIANCE.md", "LICENSE", "MODIFICATIONS", "README.md", "report.html"}
    statements = {"bom.json", "provenance.json"}
    evidence = {"evidence/Q6_K/gate.json", "evidence/Q8_0/gate.json", "evidence/facts.json"}
    assert set(files) == {"demo-Q6_K.gguf", "demo-Q8_0.gguf"} | licenses | documents | statements | evidence
    assert files["demo-Q8_0.gguf"] == gguf({**METADATA, "general.name": ("s", "Q8_0")}).decode("latin-1")
    assert "quantized from demo 3f9a0c71b2de" in files["MODIFICATIONS"]
    assert "recipe.yaml" not in files["MODIFICATIONS"]


def test_the_provenance_names_the_release_of_the_merge_as_the_only_dependency(files: dict[str, str]) -> None:
    statement = json.loads(files["provenance.json"])
    predicate, build = statement["predicate"], statement["predicate"]["buildDefinition"]
    assert build["buildType"] == "urn:mergegate:variant:v1"
    dependency = {
        "name": "demo",
        "uri": f"urn:mergegate:release:{sha('sums')}",
        "digest": {"sha256": sha("sums")},
        "annotations": {"role": "merge", "version": "3f9a0c71b2de", "address": "acme/demo@3f9a0c71b2de"},
    }
    assert build["resolvedDependencies"] == [dependency]
    variant = {"format": "gguf", "types": ["Q8_0", "Q4_0", "Q6_K"]}
    assert build["externalParameters"] == {"profile": "demo", "variant": variant}
    known = {"versions": {"llama-cpp-python": "0.3.36"}, "settings": {"imatrix": "none"}}
    assert build["internalParameters"]["variants"] == {
        name: {"files": [f"demo-{name}.gguf"], "tensor_types": {name: 24, "F32": 5}, **known}
        for name in ("Q8_0", "Q6_K")
    }
    outcomes = [(each["type"], each["outcome"]) for each in predicate["mergegate_variants"]]
    assert outcomes == [("Q8_0", "pass"), ("Q4_0", "fail"), ("Q6_K", "pass")]
    assert {subject["name"] for subject in statement["subject"]} == set(files) - {"provenance.json"}
    (ancestor,) = json.loads(files["bom.json"])["metadata"]["component"]["pedigree"]["ancestors"]
    assert (ancestor["name"], ancestor["version"]) == ("demo", sha("sums"))


def test_the_card_is_what_the_hub_expects_of_a_quantized_model(files: dict[str, str]) -> None:
    card = files["README.md"]
    metadata = parse_card(card.encode()).fields
    assert metadata["base_model"] == ["acme/demo"]
    assert metadata["base_model_relation"] == "quantized"
    assert metadata["library_name"] == "gguf"
    assert metadata["pipeline_tag"] == "text-generation"
    assert metadata["tags"] == ["gguf", "Q8_0", "Q6_K", "quantized", "merge", "mergegate"]
    for text in (
        "llama-server -hf acme/demo-GGUF:Q8_0",
        "ollama run hf.co/acme/demo-GGUF:Q8_0",
        "24 Q8\\_0, 5 F32",
        "* Q4\\_0: copying lost 5.0 points against merge",
        "mergegate verify acme/demo-GGUF",
        "mergegate verify acme/demo@3f9a0c71b2de",
    ):
        assert text in card


def test_the_card_of_variants_outside_the_hub_names_the_merge_in_its_text(tmp_path: Path, home: Path) -> None:
    place = DirectoryTarget(path=Path("releases/demo")).for_variants("GGUF")
    merge = MergeRelease("demo", "3f9a0c71b2de", sha("sums"), "../../demo/3f9a0c71b2de")
    card = texts(variant_parts(tmp_path, merge, "Q8_0"), place)["README.md"]
    metadata = parse_card(card.encode()).fields
    assert not {"base_model", "base_model_relation"} & set(metadata)
    assert "Quantized variants of **demo**, release `3f9a0c71b2de`" in card
    assert "llama-server --model demo-Q8_0.gguf" in card
    assert "mergegate verify ../../demo/3f9a0c71b2de" in card


def test_the_same_variants_give_the_same_bytes_on_another_machine(tmp_path: Path, home: Path) -> None:
    one, two = (texts(variant_parts(tmp_path / where, MERGE, "Q8_0", "Q4_0", failed=["Q4_0"])) for where in ("a", "b"))
    assert one == two
    assert not any(str(tmp_path) in text for text in one.values())


def test_two_variants_with_a_file_of_the_same_name_need_two_places(
    tmp_path: Path, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts = variant_parts(tmp_path, MERGE, "Q8_0", "Q6_K")
    for name in ("model.gguf", "README.md"):

        def same_name(self: object, release: str, artifact: Any, name: str = name) -> dict[str, Path]:
            return {name: artifact.directory / "variant.gguf"}

        monkeypatch.setattr(type(parts.settings), "release_files", same_name)
        with pytest.raises(Refused, match=f"demo-GGUF: {name}: a file of a variant has the name of another file"):
            parts.files(HUB)


@pytest.fixture
def merge_place(tmp_path: Path, prefect_api: None) -> DirectoryTarget:
    return DirectoryTarget(path=tmp_path / "releases" / "demo")


def test_a_variant_depends_on_exactly_the_published_release_of_its_merge(
    tmp_path: Path, merge_place: DirectoryTarget
) -> None:
    key, _ = write_keys(tmp_path)
    place, merge = merge_place.model_copy(update={"version": "v1", "sign_key": key}), publishable(tmp_path / "one")
    expected = publishing.describe_merge(place, tmp_path, merge.parts)
    release = merge.publish(place, tmp_path)
    current = place.current_release(tmp_path)
    assert current is not None
    assert publishing.published_merge(place, "demo", current.directory) == expected
    assert expected.version == release.version
    parts = variant_parts(tmp_path / "two", expected, "Q8_0")
    published = publishing.publish(place.for_variants("GGUF"), tmp_path, parts)
    assert (published.name, published.new) == ("demo-GGUF", True)
    assert (Path(published.location) / expected.reference / "model.safetensors").read_bytes() == b"weights"
    assert not publishing.publish(place.for_variants("GGUF"), tmp_path, parts).new


def test_a_published_merge_without_checksums_is_refused(tmp_path: Path, merge_place: DirectoryTarget) -> None:
    publishable(tmp_path / "one").publish(merge_place, tmp_path)
    current = merge_place.current_release(tmp_path)
    assert current is not None
    (current.directory / "SHA256SUMS").unlink()
    with pytest.raises(Refused, match="the published release cannot be read"):
        publishing.published_merge(merge_place, "demo", current.directory)


@pytest.mark.story
def test_variants_of_a_newer_merge_replace_older_ones_and_keep_them(
    tmp_path: Path, merge_place: DirectoryTarget
) -> None:
    place = merge_place.for_variants("GGUF")
    old = publishing.publish(place, tmp_path, variant_parts(tmp_path / "one", MERGE, "Q8_0"))
    newer = MergeRelease("demo", "b2de3f9a0c71", sha("newer"), "acme/demo@b2de3f9a0c71")
    new = publishing.publish(place, tmp_path, variant_parts(tmp_path / "two", newer, "Q8_0"))
    current = place.current_release(tmp_path)
    assert current is not None
    assert current.name == new.version != old.version
    assert {path.name for path in place.path.iterdir()} == {old.version, new.version, "latest"}


def test_an_approval_covers_the_merge_and_every_variant(tmp_path: Path, merge_place: DirectoryTarget) -> None:
    place = merge_place.for_variants("GGUF")

    def pending(**contents: bytes) -> publishing.PendingRelease:
        merge = publishable(tmp_path / "merge")
        first = publishing.pending_release(merge_place, tmp_path, merge.parts)
        parts = variant_parts(tmp_path / "variants", MERGE, "Q8_0", **contents)
        return first.with_variants([publishing.pending_release(place, tmp_path, parts)])

    approved = pending()
    assert approved == pending()
    assert approved.digest != publishable(tmp_path / "merge").publish(merge_place, tmp_path).version
    publishing.require_approved("demo", pending().digest, approved.digest)
    assert not pending().is_current
    publishing.publish(place, tmp_path, variant_parts(tmp_path / "variants", MERGE, "Q8_0"))
    assert pending().is_current
    changed = pending(Q8_0=gguf(fill=2))
    assert not changed.is_current
    with pytest.raises(Refused, match="the release that was approved"):
        publishing.require_approved("demo", changed.digest, approved.digest)


def test_a_path_of_this_machine_in_a_gguf_file_is_not_published(tmp_path: Path, merge_place: DirectoryTarget) -> None:
    leak = gguf({**METADATA, "general.source.url": ("s", f"file://{tmp_path}/releases")})
    place = merge_place.for_variants("GGUF")
    with pytest.raises(Refused, match=r"demo-GGUF: demo-Q8_0\.gguf: a path of this machine"):
        publishing.publish(place, tmp_path, variant_parts(tmp_path / "variants", MERGE, "Q8_0", Q8_0=leak))
    assert not place.path.exists()


@pytest.mark.proof
def test_a_kill_at_any_request_leaves_the_merge_as_it_was_and_running_again_completes_the_variants(
    tmp_path: Path, home: Path
) -> None:
    of_merge = {"to": "s3", "url": f"s3://{BUCKET}/demo"}
    place = target(of_merge).for_variants("GGUF")
    variants = place.model_dump(mode="json")
    files = {}
    for file in variant_parts(tmp_path / "parts", MERGE, "Q8_0").files(place):
        files[file.name] = path = tmp_path / "files" / file.name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(file.read())
    with s3_on_loopback() as s3, forked_publishers(tmp_path / "warm", "s3", AWS_ENDPOINT_URL_S3=s3.url) as warm:
        warm.publish(of_merge, {"model.safetensors": files["demo-Q8_0.gguf"]}, "v1")
        before, results = s3.objects(), []

        def attempt(nth: int, on_start: Any) -> Any:
            s3.put_back(before)
            return warm.publish(variants, files, "v2", on_start=on_start)

        for outcome in attempts_with_fault(s3.proxy, "kill", 6, 15, attempt):
            assert outcome == {"killed": True}
            warm.publish(variants, files, "v2")
            results.append(s3.objects())
            assert {key: results[-1][key] for key in before} == before
            assert all(key.startswith("demo-GGUF/") for key in results[-1].keys() - before.keys())
        assert all(result == results[0] for result in results)
