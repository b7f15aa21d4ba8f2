"""A tokenizer and templates next to an adapter's weights belong to the model with the adapter applied."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from family import random_tensors, save_checkpoint
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from tokenizer_samples import byte_level, with_added, write_tokenizer
from transformers import AutoTokenizer

from mergegate.merge_core import Finding, load_recipe, merge_weights, open_checkpoint, plan_merge, plan_with_findings
from mergegate.merge_core.adapters import apply_adapter, open_adapter
from mergegate.merge_core.checkpoint import Checkpoint
from mergegate.merge_core.errors import InvalidInput
from mergegate.tasks.merge import combine_parents
from mergegate.tasks.models.checkpoints import ResolvedAdapter

CHATML = "{% for m in messages %}<|im_start|>{{ m['content'] }}<|im_end|>{% endfor %}"
CHAT_TOKENS = ("<|im_start|>", "<|im_end|>")
ONE = "merge_method: linear\nmodels: [{model: base+adapter, parameters: {weight: 1}}]\n"
PAIR = "models: [{model: base+adapter}, {model: base+second}]\nparameters: {weight: 0.5}\n"
COMBINED = f"merge_method: linear\n{PAIR}output: adapter\n"
MODULE = "base_model.model.model.layers.0.mlp.up_proj"


def save_adapter(directory: Path) -> Path:
    """Write a LoRA adapter of one module, in PEFT's format."""
    directory.mkdir()
    config = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "base_model_name_or_path": "base", "target_modules": ["up"]}
    (directory / "adapter_config.json").write_text(json.dumps(config))
    factors = {f"{MODULE}.lora_A.weight": torch.ones(2, 12), f"{MODULE}.lora_B.weight": torch.ones(40, 2)}
    save_file(factors, directory / "adapter_model.safetensors")
    return directory


def save_text(directory: Path, tokens: tuple[str, ...] | None, template: str | None) -> None:
    """Write the tokenizer and the chat template that are not None."""
    if tokens is not None:
        write_tokenizer(directory, with_added(byte_level(), *tokens))
    if template is not None:
        (directory / "chat_template.jinja").write_text(template)


def opened(root: Path, *adapters: str) -> Mapping[str, Checkpoint]:
    base = open_checkpoint(root / "base")
    return {f"base+{name}": apply_adapter(base, open_adapter(root / name)) for name in adapters} | {"base": base}


def library(directory: Path) -> tuple[int, object]:
    """Return the number of tokens and the chat template of the tokenizer that transformers loads."""
    loaded = AutoTokenizer.from_pretrained(directory)
    return len(loaded), loaded.chat_template


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return save_models(tmp_path)


def save_models(root: Path) -> Path:
    save_checkpoint(root / "base", random_tensors(0, tokens=512))
    save_adapter(root / "adapter")
    save_adapter(root / "second")
    return root


@pytest.mark.story
@settings(max_examples=12, deadline=None)
@given(
    st.sampled_from([(), CHAT_TOKENS[:1]]),
    st.none() | st.just("of the base {{ x }}"),
    st.none() | st.sampled_from([(), CHAT_TOKENS]),
    st.none() | st.just(CHATML),
)
def test_the_merge_loads_as_the_adapter_does_and_else_as_the_base(
    tmp_path_factory: pytest.TempPathFactory,
    base_tokens: tuple[str, ...],
    base_template: str | None,
    tokens: tuple[str, ...] | None,
    template: str | None,
) -> None:
    root = save_models(tmp_path_factory.mktemp("adapted"))
    save_text(root / "base", base_tokens, base_template)
    save_text(root / "adapter", tokens, template)
    merge_checkpoints(root, ONE)
    count, _ = library(root / ("base" if tokens is None else "adapter"))
    assert library(root / "out") == (count, template or base_template)


def merge_checkpoints(root: Path, text: str) -> None:
    recipe = load_recipe(text)
    merge_weights(plan_merge(recipe, opened(root, "adapter")), root / "out")


def test_files_without_a_vocabulary_add_to_those_of_the_base(root: Path) -> None:
    save_text(root / "base", (), None)
    (root / "adapter" / "special_tokens_map.json").write_text('{"eos_token": "</s>"}')
    merge_checkpoints(root, ONE)
    assert (root / "out" / "special_tokens_map.json").read_text() == '{"eos_token": "</s>"}'
    assert (root / "out" / "tokenizer.json").read_bytes() == (root / "base" / "tokenizer.json").read_bytes()


@pytest.mark.parametrize("missing", [1, 0, -5])
def test_rows_beyond_those_of_an_adapter_stay_if_they_belong_to_no_token(root: Path, missing: int) -> None:
    """A trainer may shrink a padded table to the tokenizer. ``missing`` counts the tokens without a row."""
    save_text(root / "base", (), None)
    table = "model.embed_tokens.weight"
    rows, before = library(root / "base")[0] - missing, load_file(root / "base" / "model.safetensors")[table]
    file = root / "adapter" / "adapter_model.safetensors"
    own = {f"base_model.model.{table}": torch.full((rows, before.shape[1]), 2.0)}
    save_file(load_file(file) | own, file)
    if missing > 0:
        with pytest.raises(InvalidInput, match=rf"{rows} rows[\s\S]*resize_token_embeddings\({rows}\)[\s\S]*name the"):
            opened(root, "adapter")
        return
    adapter = ResolvedAdapter(ref="adapter", directory=root / "adapter")
    (found,) = adapter.findings("base+adapter", opened(root, "adapter")["base+adapter"])
    assert (found.severity, found.where) == ("info", f"base+adapter: {table}")
    assert f"{rows} of 512 rows" in found.found
    merge_checkpoints(root, ONE)
    after = load_file(root / "out" / "model.safetensors")[table]
    assert torch.equal(after, torch.cat([*own.values(), before[rows:]]))


def test_what_else_lies_next_to_an_adapter_is_named(root: Path) -> None:
    save_text(root / "base", (), None)
    for name in ("lookup.npz", "README.md", "trainer_state.json"):
        (root / "adapter" / name).write_text("x")
    (found,) = findings(root, ONE)
    assert found.found == "not in the result: lookup.npz"


def findings(root: Path, text: str, *more: str) -> tuple[Finding, ...]:
    return plan_with_findings(load_recipe(text), opened(root, "adapter", *more)).findings


def test_an_adapter_with_other_tokens_than_the_base_follows_the_rule_of_models(root: Path) -> None:
    save_text(root / "base", (), None)
    save_text(root / "adapter", CHAT_TOKENS, None)
    text = "merge_method: task_arithmetic\nbase_model: base\nmodels: [{model: base+adapter, parameters: {weight: 1}}]\n"
    (found,) = [one for one in findings(root, text) if one.severity == "block"]
    assert "2 tokens are not in base" in found.found
    assert not [one for one in findings(root, f"{text}tokenizer_source: union\n") if one.severity == "block"]


@pytest.mark.parametrize("owner", ["adapter", "second", "both"])
def test_an_adapter_made_of_adapters_has_their_tokenizer(root: Path, owner: str) -> None:
    save_text(root / "base", (), None)
    for name in ("adapter", "second"):
        if owner in (name, "both"):
            save_text(root / name, CHAT_TOKENS, CHATML)
    found = findings(root, COMBINED, "second")
    assert [one.severity for one in found if one.severity == "block"] == []
    parents = [(f"base+{name}", root / "base", root / name) for name in ("adapter", "second")]
    combine_parents(load_recipe(COMBINED), parents, root / "out", seed=0, on_progress=lambda done, total: None)
    assert library(root / "out")[1] == CHATML
    assert CHAT_TOKENS[0] in (root / "out" / "tokenizer.json").read_text()


def test_adapters_of_other_tokens_block_each_other(root: Path) -> None:
    save_text(root / "base", (), None)
    save_text(root / "adapter", CHAT_TOKENS, CHATML)
    save_text(root / "second", CHAT_TOKENS[::-1], CHATML)
    assert [one.where for one in findings(root, COMBINED, "second") if one.severity == "block"] == [
        "base+second: tokenizer.json"
    ]
