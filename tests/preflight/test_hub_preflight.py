"""``mergegate check`` and ``run`` on parents on the Hub refuse bad inputs before they fetch any weight."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from family import save_tokenizer, shapes
from hub_family import RECIPE, header_sizes, mergegate, rest_of_class, write_profile
from hub_look_alike import READER, LookAlike

NO_DERIVATIVES = "---\nlicense: cc-by-nd-4.0\n---\n"


def checked(file: Path) -> tuple[int, list[dict[str, Any]]]:
    result = mergegate("check", str(file), "--json")
    return result.exit_code, json.loads(result.stdout)["remarks"]


def blocking(remarks: list[dict[str, Any]]) -> list[str]:
    return [remark["where"] for remark in remarks if remark["severity"] == "block"]


def failed_run(profile: Path) -> str:
    """Run a profile that a check refuses, and return the message."""
    result = mergegate("run", str(profile), "--json")
    assert result.exit_code == 3
    return json.loads(result.stdout)["message"]


def forbid(online: LookAlike, models: Path) -> None:
    (models / "math" / "README.md").write_text(NO_DERIVATIVES)
    online.add_model("acme/math", models / "math")


def test_a_family_on_the_hub_passes_the_check_by_its_headers(online: LookAlike, models: Path, tmp_path: Path) -> None:
    code, remarks = checked(write_profile(tmp_path))
    assert (code, blocking(remarks)) == (0, [])
    assert online.sent == header_sizes(models)


@pytest.mark.story
def test_a_forbidden_license_ends_the_run_before_even_a_header_is_asked_for(
    online: LookAlike, models: Path, tmp_path: Path, prefect_api: None
) -> None:
    forbid(online, models)
    assert "cc-by-nd-4.0" in failed_run(write_profile(tmp_path))
    assert not online.sent


@pytest.mark.proof
def test_a_wrong_tokenizer_ends_the_run_before_any_weight_is_read(
    online: LookAlike, models: Path, tmp_path: Path, prefect_api: None
) -> None:
    save_tokenizer(models / "math", [f"t{number}" for number in reversed(range(24))])
    online.add_model("acme/math", models / "math")
    assert "tokenizer.json" in failed_run(write_profile(tmp_path))
    assert online.sent == header_sizes(models)


@pytest.mark.story
def test_an_ancestor_is_requested_once_for_all_remedies(online: LookAlike, models: Path, tmp_path: Path) -> None:
    online.add_model("acme/elder", models / "base")
    (models / "math" / "README.md").write_text("---\nlicense: apache-2.0\nbase_model: acme/elder\n---\n")
    online.add_model("acme/math", models / "math")
    code, remarks = checked(write_profile(tmp_path, remedies=[{"density": 0.4}, {"density": 0.3}]))
    assert (code, blocking(remarks)) == (0, [])
    address = "/api/models/acme/elder"
    assert [entry.path for entry in online.log if entry.path.startswith(address)] == [address]


def test_all_problems_are_reported_together(
    online: LookAlike, models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    online.repositories["acme/code"].gated = "manual"
    forbid(online, models)
    monkeypatch.setenv("HF_TOKEN", "hf_somebody_else")
    recipe = RECIPE.replace("acme/base", "acme/bass")
    target = {"to": "hub", "repo": "acme/demo", "visibility": "public"}
    code, remarks = checked(write_profile(tmp_path, recipe=recipe, publish=target))
    assert code == 3
    places = blocking(remarks)
    assert {"acme/bass", "acme/code", "publish.repo: acme/demo"} <= set(places)
    assert any(place.startswith("licenses") for place in places)
    assert all(remark["remedy"] for remark in remarks if remark["severity"] == "block")


def test_when_no_parent_can_be_had_each_is_a_finding(online: LookAlike, tmp_path: Path) -> None:
    online.repositories.clear()
    code, remarks = checked(write_profile(tmp_path))
    assert (code, blocking(remarks)) == (2, ["acme/math", "acme/code", "acme/base"])


@pytest.mark.story
def test_a_target_that_may_not_be_written_ends_the_run_before_anything_is_looked_at(
    online: LookAlike, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, prefect_api: None
) -> None:
    monkeypatch.setenv("HF_TOKEN", READER)
    profile = write_profile(tmp_path, publish={"to": "hub", "repo": "acme/demo"})
    assert "the token has read access only" in failed_run(profile)
    assert not any("resolve" in entry.path for entry in online.log)


def test_a_recipe_alone_is_checked_too(online: LookAlike, tmp_path: Path) -> None:
    online.repositories["acme/code"].private = True
    (tmp_path / "recipe.yaml").write_text(RECIPE)
    code, remarks = checked(tmp_path / "recipe.yaml")
    assert (code, blocking(remarks)) == (2, ["acme/code"])


@pytest.mark.story
def test_pickled_weights_are_a_finding(online: LookAlike, models: Path, tmp_path: Path) -> None:
    (models / "code" / "model.safetensors").rename(models / "code" / "pytorch_model.bin")
    online.add_model("acme/code", models / "code")
    code, remarks = checked(write_profile(tmp_path))
    assert (code, blocking(remarks)) == (3, ["acme/code: pytorch_model.bin"])


@pytest.mark.story
def test_a_disk_that_cannot_hold_what_has_to_come_blocks(
    online: LookAlike, models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import shutil

    real = shutil.disk_usage("/")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: type(real)(total=1000, used=0, free=1000))
    code, remarks = checked(write_profile(tmp_path))
    assert code == 3
    (finding,) = [remark for remark in remarks if remark["severity"] == "block"]
    assert "weights from the Hub" in finding["expected"]
    assert "the merged checkpoint" in finding["expected"]


@pytest.mark.story
def test_undeclared_ancestors_on_the_hub_are_found_by_samples(
    online: LookAlike, models: Path, tmp_path: Path, home: Path
) -> None:
    """The check reads 128 elements of each matrix in addition to the headers, and downloads no weights."""
    declared = ("--name", "corp/secret", "--license", "cc-by-nc-4.0")
    assert mergegate("fingerprint", str(models / "base"), *declared).exit_code == 0
    recipe = "merge_method: linear\nmodels: [{model: acme/math}, {model: acme/code}]\nparameters: {weight: 0.5}\n"
    code, remarks = checked(write_profile(tmp_path, recipe=recipe))
    assert code == 3
    assert any("cc-by-nc-4.0 (of corp/secret) forbids commercial use" in remark["found"] for remark in remarks)
    # The refusal names both relations, and no warning repeats them.
    assert sum(remark["found"].count("which its card does not name") for remark in remarks) == 2
    every_shape = (*shapes().values(), *(tensor.shape for tensor in rest_of_class().values()))
    matrices = sum(len(shape) > 1 and math.prod(shape) >= 128 for shape in every_shape)
    header = header_sizes(models)
    extra = {sha256: count - header[sha256] for sha256, count in online.sent.items()}
    assert set(extra.values()) == {matrices * 128 * 4}
