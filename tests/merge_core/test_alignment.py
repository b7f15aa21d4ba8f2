"""With ``tokenizer_source``, rows follow their tokens, even if the ids differ between models."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from family import load, merge_text, random_tensors, save_checkpoint, save_tokenizer
from safetensors.torch import load_file, save_file

from mergegate.merge_core import load_recipe, open_checkpoint, plan_with_findings, preflight
from mergegate.merge_core.errors import InvalidInput

EMBED, HEAD = "model.embed_tokens.weight", "lm_head.weight"
LINEAR = "merge_method: linear\nmodels: [{model: a}, {model: b}]\nparameters: {weight: 1}\n"


@pytest.fixture
def shuffled(tmp_path: Path) -> Path:
    """Model ``a`` with tokens t0 to t23, and ``b`` with the same tokens reversed, after two others."""
    save_checkpoint(tmp_path / "a", random_tensors(0))
    save_checkpoint(tmp_path / "b", random_tensors(1, tokens=26), config={"eos_token_id": 1})
    save_tokenizer(tmp_path / "b", ["new", "<eos>", *[f"t{n}" for n in reversed(range(24))]])
    return tmp_path


@pytest.mark.parametrize("way", [{}, {"kernels": "fused"}, {"block_elements": 16384}])
def test_the_vocabulary_of_the_first_model_is_kept(shuffled: Path, way: dict[str, str]) -> None:
    merge_text(LINEAR + "tokenizer_source: a", shuffled, **way)
    a, b, out = (load(shuffled / name) for name in ("a", "b", "out"))
    for name in (EMBED, HEAD):
        expected = (a[name] + b[name][[25 - row for row in range(24)]]) / 2
        np.testing.assert_allclose(out[name], expected, rtol=1e-6)
    assert json.loads((shuffled / "out/config.json").read_text())["vocab_size"] == 24


def test_a_token_that_only_one_model_has_gets_its_row(shuffled: Path) -> None:
    merge_text(LINEAR + "tokenizer_source: b", shuffled)
    a, b, out = (load(shuffled / name) for name in ("a", "b", "out"))
    np.testing.assert_allclose(out[EMBED][:2], b[EMBED][:2], rtol=1e-6)
    np.testing.assert_allclose(out[EMBED][2:], (a[EMBED][::-1] + b[EMBED][2:]) / 2, rtol=1e-6)
    config = json.loads((shuffled / "out/config.json").read_text())
    assert (config["vocab_size"], config["eos_token_id"]) == (26, 1)
    assert (shuffled / "out/tokenizer.json").read_bytes() == (shuffled / "b/tokenizer.json").read_bytes()


def test_a_token_that_the_base_lacks_gets_the_mean_of_its_owners(shuffled: Path) -> None:
    save_checkpoint(shuffled / "c", random_tensors(2, tokens=26))
    save_tokenizer(shuffled / "c", ["<eos>", "new", *[f"t{n}" for n in range(24)]])
    merge_text(
        "merge_method: task_arithmetic\nbase_model: a\nmodels: [{model: b}, {model: c}]\nparameters: {weight: 1}\n"
        "tokenizer_source: b\n",
        shuffled,
    )
    b, c, out = (load(shuffled / name)[EMBED] for name in ("b", "c", "out"))
    base = (b[0] + c[1]) / 2
    np.testing.assert_allclose(out[0], base + (b[0] - base) + (c[1] - base), rtol=1e-5, atol=1e-6)


def test_with_a_tokenizer_source_different_ids_do_not_block(shuffled: Path) -> None:
    recipe = load_recipe(LINEAR + "tokenizer_source: a")
    assert preflight(recipe, {name: open_checkpoint(shuffled / name) for name in "ab"}) == ()


@pytest.mark.parametrize("name", [EMBED, HEAD])
@pytest.mark.parametrize("shape", [(26, 2), (26, 32), (26, 1), (26,), (26, 16, 1), (26, 4, 4)])
def test_rows_of_another_shape_are_refused_even_if_they_follow_their_tokens(
    shuffled: Path, name: str, shape: tuple[int, ...]
) -> None:
    file = shuffled / "b/model.safetensors"
    save_file({**load_file(file), name: torch.ones(shape)}, file, {"format": "pt"})
    checkpoints = {model: open_checkpoint(shuffled / model) for model in "ab"}
    reported = plan_with_findings(load_recipe(LINEAR + "tokenizer_source: a"), checkpoints).findings
    assert [(finding.where, finding.found) for finding in reported if finding.severity == "block"] == [
        (f"b: {name}", f"shape {list(shape)}")
    ]


def test_a_union_of_different_vocabularies_is_refused(shuffled: Path) -> None:
    with pytest.raises(InvalidInput, match="union"):
        merge_text(LINEAR + "tokenizer_source: union", shuffled)


def test_a_union_of_equal_vocabularies_changes_nothing(family: Path) -> None:
    assert merge_text(LINEAR + "tokenizer_source: union", family, "1").files == merge_text(LINEAR, family, "2").files


def test_tokens_that_no_merged_model_has_are_refused(shuffled: Path) -> None:
    save_checkpoint(shuffled / "c", random_tensors(2))
    save_tokenizer(shuffled / "c", [f"u{n}" for n in range(24)])
    with pytest.raises(InvalidInput, match="24 tokens of c"):
        merge_text(LINEAR + "tokenizer_source: c", shuffled)
