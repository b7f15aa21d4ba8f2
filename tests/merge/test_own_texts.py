"""Moments of a model's inputs, compared with hooks on plain transformers, and recipes that use them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import mixtures
import numpy as np
import pytest
import torch
import transformers
from calibration_jobs import DEMO, REVERSER, SENTENCES, Killed, add_tokenizer, measure_inputs, saved, text_of, tokens_of
from samples import sampled

from mergegate.merge_core import load_recipe, open_checkpoint
from mergegate.merge_core.checkpoint import INPUTS, open_moments
from mergegate.merge_core.errors import InvalidInput
from mergegate.merge_core.files import HashMemo
from mergegate.tasks.merge.calibration import pin_calibration_texts

LAYERS = 3
POSITIONS = sum(map(len, tokens_of(REVERSER)))


@pytest.fixture(scope="module")
def expected() -> dict[str, np.ndarray]:
    """Return the mean of x x' over all inputs of each module, by its name."""
    network = transformers.AutoModelForCausalLM.from_pretrained(REVERSER, dtype=torch.float32).eval()
    assert network.config.num_hidden_layers == LAYERS
    seen: dict[str, list[np.ndarray]] = {}

    def look(name: str, states: torch.Tensor) -> None:
        seen.setdefault(name, []).append(states.double().reshape(-1, states.shape[-1]).numpy())

    for name, module in network.named_modules():
        if isinstance(module, torch.nn.Linear) and "layers" in name:
            module.register_forward_pre_hook(lambda _, given, name=name: look(name, given[0]))
    with torch.no_grad():
        for ids in tokens_of(REVERSER):
            network(torch.tensor([ids]))
    return {name: np.concatenate(rows).T @ np.concatenate(rows) / POSITIONS for name, rows in seen.items()}


def agrees(out: Path, wanted: dict[str, np.ndarray]) -> None:
    found = open_moments(out)
    assert {name.removesuffix(".weight") for name in found} == wanted.keys()
    for name, moments in found.items():
        own = wanted[name.removesuffix(".weight")]
        own = own.diagonal() if moments.is_diagonal else own
        np.testing.assert_allclose(moments.read(), own, atol=2e-6 * own.max(), err_msg=name)


def test_moments_match_an_independent_measurement_with_hooks(expected: dict[str, np.ndarray], tmp_path: Path) -> None:
    found = measure_inputs(REVERSER, text_of(tmp_path), tmp_path / "out")
    assert (found.documents, found.positions, found.matrices) == (len(SENTENCES), POSITIONS, len(expected))
    assert found.inputs == found.matrices * 4 // 7  # Query, key and value share one input, and so do gate and up.
    agrees(tmp_path / "out", expected)


def test_windows_count_every_position_exactly_once(tmp_path: Path) -> None:
    """A last window that is filled with earlier tokens reads them again, but only as context."""
    for length in (3, 11):
        found = measure_inputs(REVERSER, text_of(tmp_path), tmp_path / f"{length}", max_length=length)
        assert found.positions == POSITIONS


def test_wide_inputs_are_stored_as_a_diagonal(expected: dict[str, np.ndarray], tmp_path: Path) -> None:
    width = min(one.shape[0] for one in expected.values())
    found = measure_inputs(REVERSER, text_of(tmp_path), tmp_path / "out", diagonal_above=width)
    for one in open_moments(tmp_path / "out").values():
        assert one.is_diagonal == (one.width > width)
    assert 0 < found.squares < found.inputs
    agrees(tmp_path / "out", expected)


@pytest.mark.usefixtures("little_memory")
def test_measuring_layer_by_layer_gives_the_same_moments(expected: dict[str, np.ndarray], tmp_path: Path) -> None:
    progress: list[tuple[int, int]] = []
    measure_inputs(REVERSER, text_of(tmp_path), tmp_path / "out", lambda *counts: progress.append(counts))
    assert len(list((tmp_path / "out").glob("*.safetensors"))) == LAYERS
    assert progress == [(done, LAYERS * len(SENTENCES)) for done in range(1, LAYERS * len(SENTENCES) + 1)]
    agrees(tmp_path / "out", expected)


@pytest.mark.usefixtures("little_memory")
@pytest.mark.parametrize("damage", sampled(("", "cut", "gone", "other"), ("cut", "other")))
def test_a_killed_measurement_resumes(expected: dict[str, np.ndarray], tmp_path: Path, damage: str) -> None:
    text, out = text_of(tmp_path), tmp_path / "out"

    def kill(done: int, total: int) -> None:
        if done > len(SENTENCES):
            raise Killed

    with pytest.raises(Killed):
        measure_inputs(REVERSER, text, out, kill)
    (first,) = out.glob("*.safetensors")
    if damage == "cut":
        first.write_bytes(first.read_bytes()[:-1])
    elif damage == "gone":
        first.unlink()
    elif damage == "other":
        (out / "inputs-00007.safetensors").write_bytes(b"rubbish")
    steps: list[int] = []
    measure_inputs(REVERSER, text, out, lambda done, total: steps.append(total))
    assert steps[-1] == (LAYERS if damage in ("cut", "gone") else LAYERS - 1) * len(SENTENCES)
    files = [f"inputs-{number:05d}.safetensors" for number in range(LAYERS)]
    assert sorted(path.name for path in out.iterdir()) == [*files, INPUTS]
    agrees(out, expected)


@pytest.mark.parametrize("family", sampled(("mixtral", "qwen3_moe"), ("mixtral",)))
def test_every_matrix_of_a_mixture_except_the_router_is_measured(tmp_path: Path, family: str) -> None:
    """The inputs of experts are covered by test_expert_inputs.py."""
    place = saved(mixtures.build(family), tmp_path / "model")
    measure_inputs(place, text_of(tmp_path), tmp_path / "out")
    tensors = open_checkpoint(place).tensors
    layers = {name for name, one in tensors.items() if ".layers." in name and len(one.shape) == 2}
    assert set(open_moments(tmp_path / "out")) == {name for name in layers if not name.endswith("gate.weight")}


def unknown_network() -> Any:
    config = transformers.GPT2Config(n_layer=1, n_head=2, n_embd=8, vocab_size=64, n_positions=64)
    return transformers.GPT2LMHeadModel(config)


def infinite_network() -> Any:
    network = transformers.AutoModelForCausalLM.from_pretrained(DEMO / "models/base", dtype=torch.float32)
    with torch.no_grad():
        network.model.layers[0].input_layernorm.weight[0] = float("inf")
    return network


@pytest.mark.parametrize(
    ("network", "message"), [(unknown_network, "no tensor that contributes"), (infinite_network, "NaN or infinity")]
)
def test_a_model_that_cannot_be_measured_is_refused(tmp_path: Path, network: Any, message: str) -> None:
    network().save_pretrained(tmp_path / "model")
    with pytest.raises(InvalidInput, match=message):
        measure_inputs(add_tokenizer(tmp_path / "model"), text_of(tmp_path), tmp_path / "out")


# --- recipes ---


def recipe(directory: Path, **more: Any) -> Any:
    models = [{"model": str(DEMO / "models" / name), "text": f"{name}.jsonl"} for name in ("reverser", "shifter")]
    return replace(load_recipe({"merge_method": "regmean", "models": models, **more}), directory=directory)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (None, "no such file"), ("", "an empty file"), ('{"prompt": "a"}\n', "statistics.field"),
        ('{"text": [{"role": "user"}]}\n', "text or messages"),
        ('{"text": [{"role": "user", "content": ["parts"]}]}\n', "text or messages"),
        ('{"text": 3}\n', "text or messages"), ("no json\n", "text.jsonl"),
    ],
)  # fmt: skip
def test_unreadable_texts_are_named(tmp_path: Path, content: str | None, said: str) -> None:
    if content is not None:
        (tmp_path / "text.jsonl").write_text(content)
    wanted = replace(
        load_recipe({"merge_method": "regmean", "models": [{"model": "a", "text": "text.jsonl"}]}), directory=tmp_path
    )
    with pytest.raises(InvalidInput) as problem:
        list(pin_calibration_texts(wanted, HashMemo(tmp_path / "hashes.db")))
    assert said in str(problem.value)
    assert "perplexity" not in str(problem.value)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"models": [{"model": "a"}]}, "no 'text'"), ({"models": [{"model": "a", "text": 3}]}, "the path of a text"),
        ({"models": [{"model": "a", "text": " "}]}, "the path of a text"),
        ({"merge_method": "linear", "parameters": {"weight": 1}}, "does not read texts"),
        (
            {"merge_method": "linear", "models": [{"model": "a"}], "parameters": {"weight": 1}, "statistics": {}},
            "does not read",
        ),
        ({"base_model": "a", "models": [{"model": "a", "text": "t"}, {"model": "b", "text": "t"}]}, "is not merged"),
        ({"statistics": {"document": 3}}, "documents"), ({"statistics": {"documents": 0}}, "at least 1"),
        ({"statistics": {"documents": True}}, "whole number"), ({"statistics": {"max_length": 1.5}}, "whole number"),
        ({"statistics": {"field": ""}}, "name of a field"), ({"statistics": []}, "a mapping"),
    ],
)  # fmt: skip
def test_invalid_text_settings_are_refused(change: dict[str, Any], said: str) -> None:
    document = {"merge_method": "regmean", "models": [{"model": "a", "text": "a.jsonl"}], **change}
    with pytest.raises(InvalidInput) as problem:
        load_recipe(document)
    assert said in str(problem.value)


CUT = [{"sources": [{"model": "a", "text": text, "layer_range": [0, 1]}]} for text in ("one", "two")]
STEPS = """
{name: made, merge_method: linear, models: [{model: a, parameters: {weight: 1}}]}
---
{merge_method: regmean, models: [{model: made, text: t}, {model: b, text: t}]}
"""


@pytest.mark.parametrize(
    ("recipe", "message"),
    [({"merge_method": "regmean", "slices": CUT}, "one text for each model"), (STEPS, "exists before the merge")],
)
def test_a_text_without_one_existing_model_is_refused(recipe: Any, message: str) -> None:
    with pytest.raises(InvalidInput, match=message):
        load_recipe(recipe)
