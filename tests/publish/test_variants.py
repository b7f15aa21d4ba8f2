"""Test the places of quantized variants: next to the merge at every target, each with releases of its own."""

from __future__ import annotations

from pathlib import Path

import pytest
from pydantic import TypeAdapter
from shelf_target import ShelfTarget

from mergegate.merge_core.errors import InvalidInput
from mergegate.tasks.publish.targets import PublishTarget, Target, check_target
from mergegate.tasks.publish.targets.directory import DirectoryTarget

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
