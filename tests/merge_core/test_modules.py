"""``modules`` merges parts of a network that have their own layers, each in its own way."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from family import load, merge_text, save_checkpoint

from mergegate.merge_core.errors import InvalidInput

MODULES = """
merge_method: linear
base_model: a
modules:
  text_decoder:
    models: [{model: a, parameters: {weight: [1, 0]}}, {model: b, parameters: {weight: [0, 1]}}]
  vision_tower:
    models: [{model: a}, {model: b}]
    parameters: {weight: 1}
"""


@pytest.fixture
def seeing(tmp_path: Path) -> Path:
    """Checkpoints with text and vision layers."""
    for seed, model in enumerate("ab"):
        generator = torch.Generator().manual_seed(seed)
        names = ["model.language_model.embed_tokens.weight", "lm_head.weight", "model.visual.merger.weight"]
        names += [f"model.language_model.layers.{n}.mlp.weight" for n in range(3)]
        names += [f"model.visual.blocks.{n}.mlp.weight" for n in range(2)]
        tensors = {name: torch.randn(4, 4, generator=generator) for name in names}
        tensors["model.embed_tokens.weight"] = torch.zeros(4, 4)
        save_checkpoint(tmp_path / model, tensors, config={"num_hidden_layers": 3, "tie_word_embeddings": False})
    return tmp_path


def test_each_part_has_its_own_models_and_gradients(seeing: Path) -> None:
    merge_text(MODULES, seeing)
    a, b, out = (load(seeing / name) for name in ("a", "b", "out"))
    text, vision = "model.language_model.layers.{}.mlp.weight", "model.visual.blocks.{}.mlp.weight"
    assert np.array_equal(out[text.format(2)], b[text.format(2)])
    assert np.array_equal(out["lm_head.weight"], a["lm_head.weight"])
    for name in (vision.format(0), vision.format(1), "model.visual.merger.weight"):
        np.testing.assert_allclose(out[name], (a[name] + b[name]) / 2, rtol=1e-6, atol=1e-7)


def test_a_part_that_does_not_exist_is_refused(seeing: Path) -> None:
    with pytest.raises(InvalidInput, match="did you mean 'visual'"):
        merge_text(MODULES.replace("vision_tower", "visuall"), seeing)


def test_a_part_that_no_module_covers_is_refused(seeing: Path) -> None:
    with pytest.raises(InvalidInput, match=r"no module contains model\.visual\.blocks"):
        merge_text(MODULES.split("  vision_tower")[0], seeing)


@pytest.mark.parametrize("first_is_alias", [True, False])
@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("text_decoder", "text"),
        ("text_decoder", "language_model"),
        ("vision_tower", "visual"),
        ("vision", "vision_tower"),
    ],
)
def test_a_part_that_two_modules_select_is_refused(seeing: Path, first: str, second: str, first_is_alias: bool) -> None:
    names = [first, second] if first_is_alias else [second, first]
    names.append("visual" if first.startswith("text") else "text_decoder")
    modules = "".join(f"  {name}:\n    models: [{{model: a}}, {{model: b}}]\n" for name in names)
    text = f"merge_method: linear\nbase_model: a\nmodules:\n{modules}parameters: {{weight: 1}}\n"
    with pytest.raises(InvalidInput, match=f"which the module {names[0]} already selects") as caught:
        merge_text(text, seeing)
    assert caught.value.where.endswith(f"modules.{names[1]}")
    assert caught.value.expected
    assert caught.value.remedy


def test_the_only_part_of_a_plain_language_model_is_called_default(tmp_path: Path) -> None:
    for seed, model in enumerate("ab"):
        generator = torch.Generator().manual_seed(seed)
        names = ["model.embed_tokens.weight", "lm_head.weight", *(f"model.layers.{n}.mlp.weight" for n in range(2))]
        tensors = {name: torch.randn(4, 4, generator=generator) for name in names}
        save_checkpoint(tmp_path / model, tensors, config={"num_hidden_layers": 2, "tie_word_embeddings": False})
    models = "models: [{model: a, parameters: {weight: 0.3}}, {model: b, parameters: {weight: 0.7}}]"
    merge_text(f"merge_method: linear\n{models}", tmp_path, "plain")
    merge_text(f"merge_method: linear\nmodules:\n  default:\n    {models}", tmp_path, "module")
    plain, module = load(tmp_path / "plain"), load(tmp_path / "module")
    assert plain.keys() == module.keys()
    assert all(np.array_equal(plain[name], module[name]) for name in plain)
