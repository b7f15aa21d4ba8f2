"""The commit, configuration and header of an adapter on the Hub are known before any weight is fetched."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from hub_family import CARD, header_sizes, mergegate
from hub_look_alike import LookAlike
from safetensors.torch import load_file, save_file

from mergegate.merge_core import load_recipe
from mergegate.merge_core.errors import InvalidInput
from mergegate.merge_core.files.hashing import HashMemo
from mergegate.tasks.models.checkpoints import pin

RECIPE = """\
merge_method: linear
models:
  - {model: acme/base+acme/lora, parameters: {weight: 1}}
  - {model: acme/math, parameters: {weight: 1}}
"""
MODULE = "base_model.model.model.layers.0.mlp.up_proj"


@pytest.fixture
def adapter(online: LookAlike, models: Path, tmp_path: Path) -> Path:
    """Add ``acme/lora``, an adapter for the base, to the Hub; return its directory."""
    place = tmp_path / "lora"
    place.mkdir()
    (place / "README.md").write_text(CARD)
    config = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "base_model_name_or_path": "acme/base"}
    (place / "adapter_config.json").write_text(json.dumps(config))
    factors = {f"{MODULE}.lora_A.weight": torch.ones(2, 12), f"{MODULE}.lora_B.weight": torch.ones(40, 2)}
    save_file(factors, place / "adapter_model.safetensors")
    online.add_model("acme/lora", place)
    return place


def adapted() -> pin.ResolvedCheckpoint:
    return next(parent for parent in pin.resolve_parents(load_recipe(RECIPE)) if parent.adapter)


def test_only_headers_of_base_and_adapter_are_requested(online: LookAlike, models: Path, adapter: Path) -> None:
    for parent in pin.resolve_parents(load_recipe(RECIPE)):
        pin.open_parent(parent)
    sizes = header_sizes(models) | header_sizes(adapter.parent)
    assert all(size <= sizes[sha256] for sha256, size in online.sent.items())
    assert not (adapted().adapter.directory / "adapter_model.safetensors").exists()


def test_an_adapter_is_pinned_to_the_commit_of_its_branch(online: LookAlike, adapter: Path) -> None:
    found = adapted()
    assert found.adapter.revision == online.repositories["acme/lora"].branches["main"]
    assert found.revision == online.repositories["acme/base"].branches["main"]
    assert found.name == "base+lora"


@pytest.mark.story
def test_a_merge_fetches_and_applies_an_adapter(
    online: LookAlike, models: Path, adapter: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "recipe.yaml").write_text(RECIPE)
    done = mergegate("merge", "recipe.yaml", "out")
    assert done.exit_code == 0, done.output
    base, math = (
        {name: tensor for file in (models / one).glob("model*.safetensors") for name, tensor in load_file(file).items()}
        for one in ("base", "math")
    )
    out = {name: one for file in (tmp_path / "out").glob("*.safetensors") for name, one in load_file(file).items()}
    name = "model.layers.0.mlp.up_proj.weight"
    assert torch.equal(out[name], ((base[name] + 4) + math[name]) / 2)


def test_the_digest_covers_model_and_adapter(models: Path, adapter: Path, tmp_path: Path) -> None:
    local = RECIPE.replace("acme/base+acme/lora", f"{models}/base+{adapter}").replace("acme/", f"{models}/")
    recipe = load_recipe(local)
    hashes = HashMemo(tmp_path / "hashes.sqlite")

    def digest() -> str:
        return next(one.digest for one in pin.pin_checkpoints(pin.resolve_parents(recipe), hashes) if one.adapter)

    seen = [digest()]
    for file in (adapter / "adapter_config.json", models / "base" / "config.json"):
        file.write_text(file.read_text() + " ")
        seen.append(digest())
    tensors = load_file(adapter / "adapter_model.safetensors")
    save_file({name: tensor * 2 for name, tensor in tensors.items()}, adapter / "adapter_model.safetensors")
    seen.append(digest())
    (adapter / "README.md").write_text("another card")
    assert digest() == seen[-1]
    assert len(set(seen)) == 4


@pytest.mark.parametrize(
    ("instead", "found"),
    [(("acme/lora", "acme/math"), "no adapter_config.json"), (("acme/math", "acme/lora"), "no config.json")],
)
def test_a_model_and_an_adapter_in_place_of_each_other_are_refused_by_name(
    online: LookAlike, adapter: Path, instead: tuple[str, str], found: str
) -> None:
    (problem,) = pin.search_parents([load_recipe(RECIPE.replace(*instead))]).problems
    assert isinstance(problem, InvalidInput)
    assert found in str(problem)


def test_the_tokenizer_of_an_adapter_is_known_before_its_weights(
    online: LookAlike, models: Path, adapter: Path, tmp_path: Path
) -> None:
    place = tmp_path / "chatty"
    shutil.copytree(adapter, place)
    shutil.copy(models / "base" / "tokenizer.json", place)
    for name, content in {"chat_template.jinja": "of {{ x }}", "lookup.npz": "x", "notes.md": "x"}.items():
        (place / name).write_text(content)
    (place / "additional_chat_templates").mkdir()
    (place / "additional_chat_templates" / "tool_use.jinja").write_text("tools {{ x }}")
    online.add_model("acme/chatty", place)
    recipe = load_recipe(RECIPE.replace("acme/lora", "acme/chatty"))
    found = next(parent for parent in pin.resolve_parents(recipe) if parent.adapter)
    checkpoint = pin.open_parent(found)
    assert not (found.adapter.directory / "adapter_model.safetensors").exists()
    assert checkpoint.chat_templates == {"default": "of {{ x }}", "tool_use": "tools {{ x }}"}
    assert checkpoint.companions.sources["tokenizer.json"] == found.adapter.directory
    assert checkpoint.uncopied == ("lookup.npz",)
    assert "chat_template.jinja" in found.adapter.deciding
