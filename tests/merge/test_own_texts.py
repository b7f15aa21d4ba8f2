"""Moments of a model's inputs on calibration texts, compared with hooks on plain transformers.

The tests also cover recipes that use these moments.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import mixtures
import numpy as np
import pytest
import torch
import transformers
from calibration_jobs import run_reader

from mergegate.merge_core import load_recipe, open_checkpoint, plan_merge
from mergegate.merge_core.checkpoint import INPUTS, open_moments
from mergegate.merge_core.engine.execution import require_prepared
from mergegate.merge_core.errors import InvalidInput
from mergegate.merge_core.files import HashMemo
from mergegate.tasks.checkpoints import PinnedCheckpoint, pin_checkpoints, resolve_parents
from mergegate.tasks.merge import calibration
from mergegate.tasks.merge.input_statistics import InputStatistics, read_inputs
from mergegate.tasks.merge.preparation import prepare_recipe
from mergegate.tasks.merge.statistics import pin_calibration_texts
from mergegate.tasks.perplexity import HeldOutText, TextSetting, pin_text

DEMO = Path(__file__).resolve().parents[2] / "profiles/demo"
SENTENCES = ("rev: abcd>dcba", "the red cat sees the old hen.", "rev: kjih>hijk", "copy: aabb>aabb")


def pinned(place: Path, *documents: str) -> HeldOutText:
    path = place / "text.jsonl"
    path.write_text("".join(json.dumps({"text": one}) + "\n" for one in documents))
    return pin_text(path, "text", HashMemo(place / "hashes.db"), TextSetting("the text"))


def read(directory: Path, text: HeldOutText, out: Path, *on_progress: Any, **reading: Any) -> InputStatistics:
    return run_reader(read_inputs, directory, text, out, *on_progress, **reading)


def by_hooks(network: Any, tokens: list[list[int]], modules: list[str]) -> tuple[dict[str, np.ndarray], int]:
    """Return the mean of x x' over all inputs of each module, one document at a time."""
    seen: dict[str, list[np.ndarray]] = {name: [] for name in modules}
    hooks = [
        network.get_submodule(name).register_forward_pre_hook(
            lambda _, given, name=name: seen[name].append(
                given[0].detach().double().reshape(-1, given[0].shape[-1]).numpy()
            )
        )
        for name in modules
    ]
    with torch.no_grad():
        for ids in tokens:
            network(torch.tensor([ids]))
    for hook in hooks:
        hook.remove()
    positions = sum(map(len, tokens))
    return {name: np.concatenate(rows).T @ np.concatenate(rows) / positions for name, rows in seen.items()}, positions


@pytest.fixture(scope="module")
def loaded() -> tuple[Any, Any]:
    directory = DEMO / "models/reverser"
    network = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    return network, transformers.AutoTokenizer.from_pretrained(directory)


def expected(loaded: tuple[Any, Any], documents: tuple[str, ...] = SENTENCES) -> tuple[dict[str, np.ndarray], int]:
    network, tokenizer = loaded
    modules = [name for name, one in network.named_modules() if isinstance(one, torch.nn.Linear) and "layers" in name]
    tokens = [tokenizer(one).input_ids for one in documents]
    return by_hooks(network, tokens, modules)


def agrees(out: Path, wanted: dict[str, np.ndarray]) -> None:
    found = open_moments(out)
    assert {name.removesuffix(".weight") for name in found} == wanted.keys()
    for name, moments in found.items():
        own = wanted[name.removesuffix(".weight")]
        own = own.diagonal() if moments.is_diagonal else own
        np.testing.assert_allclose(moments.read(), own, atol=2e-6 * own.max(), err_msg=name)


def test_moments_match_an_independent_measurement_with_hooks(loaded: tuple[Any, Any], tmp_path: Path) -> None:
    wanted, positions = expected(loaded)
    found = read(DEMO / "models/reverser", pinned(tmp_path, *SENTENCES), tmp_path / "out")
    assert (found.documents, found.positions, found.matrices) == (len(SENTENCES), positions, len(wanted))
    assert found.inputs == found.matrices * 4 // 7  # Query, key and value share one input, and so do gate and up.
    agrees(tmp_path / "out", wanted)


def test_windows_count_every_position_exactly_once(loaded: tuple[Any, Any], tmp_path: Path) -> None:
    """A last window that is filled with earlier tokens reads them again, but only as context."""
    _, positions = expected(loaded)
    for length in (2, 3, 7, 11):
        found = read(DEMO / "models/reverser", pinned(tmp_path, *SENTENCES), tmp_path / f"{length}", max_length=length)
        assert found.positions == positions


def test_wide_inputs_are_stored_as_a_diagonal(loaded: tuple[Any, Any], tmp_path: Path) -> None:
    wanted, _ = expected(loaded)
    width = min(one.shape[0] for one in wanted.values())
    found = read(DEMO / "models/reverser", pinned(tmp_path, *SENTENCES), tmp_path / "out", diagonal_above=width)
    kinds = {name: moments.is_diagonal for name, moments in open_moments(tmp_path / "out").items()}
    assert kinds == {name: one.width > width for name, one in open_moments(tmp_path / "out").items()}
    assert 0 < found.squares < found.inputs
    agrees(tmp_path / "out", wanted)


def test_measuring_layer_by_layer_gives_the_same_moments(
    loaded: tuple[Any, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(calibration, "_SHARE", 0)
    monkeypatch.setattr(calibration, "_LEAST", 1)
    progress: list[tuple[int, int]] = []
    read(
        DEMO / "models/reverser",
        pinned(tmp_path, *SENTENCES),
        tmp_path / "out",
        lambda *counts: progress.append(counts),
    )
    layers = loaded[0].config.num_hidden_layers
    assert len(list((tmp_path / "out").glob("*.safetensors"))) == layers > 1
    assert progress == [(done, layers * len(SENTENCES)) for done in range(1, layers * len(SENTENCES) + 1)]
    agrees(tmp_path / "out", expected(loaded)[0])


class Killed(BaseException):
    pass


@pytest.mark.parametrize("damage", ["", "cut", "gone", "other"])
def test_a_killed_measurement_resumes(
    loaded: tuple[Any, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, damage: str
) -> None:
    monkeypatch.setattr(calibration, "_SHARE", 0)
    monkeypatch.setattr(calibration, "_LEAST", 1)
    text, out = pinned(tmp_path, *SENTENCES), tmp_path / "out"

    def kill(done: int, total: int) -> None:
        if done > len(SENTENCES):
            raise Killed

    with pytest.raises(Killed):
        read(DEMO / "models/reverser", text, out, kill)
    (first,) = out.glob("*.safetensors")
    if damage == "cut":
        first.write_bytes(first.read_bytes()[:-1])
    elif damage == "gone":
        first.unlink()
    elif damage == "other":
        (out / "inputs-00007.safetensors").write_bytes(b"rubbish")
    steps: list[int] = []
    read(DEMO / "models/reverser", text, out, lambda done, total: steps.append(total))
    layers = loaded[0].config.num_hidden_layers
    assert steps[-1] == (layers if damage in ("cut", "gone") else layers - 1) * len(SENTENCES)
    assert sorted(path.name for path in out.iterdir()) == [f"inputs-{n:05d}.safetensors" for n in range(layers)] + [
        INPUTS
    ]
    agrees(out, expected(loaded)[0])


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe"])
def test_every_matrix_of_a_mixture_except_the_router_is_measured(tmp_path: Path, family: str) -> None:
    """The inputs of experts are covered by test_expert_inputs.py."""
    model = mixtures.build(family)
    mixtures.save(model, tmp_path / "model")
    for file in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / "model" / file).write_bytes((DEMO / "models/base" / file).read_bytes())
    read(tmp_path / "model", pinned(tmp_path, *SENTENCES), tmp_path / "out")
    tensors = open_checkpoint(tmp_path / "model").tensors
    layers = {name for name, one in tensors.items() if ".layers." in name and len(one.shape) == 2}
    assert set(open_moments(tmp_path / "out")) == {name for name in layers if not name.endswith("gate.weight")}


def test_a_model_without_known_layers_is_refused(tmp_path: Path) -> None:
    config = transformers.GPT2Config(n_layer=1, n_head=2, n_embd=8, vocab_size=64, n_positions=64)
    transformers.GPT2LMHeadModel(config).save_pretrained(tmp_path / "model")
    for file in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / "model" / file).write_bytes((DEMO / "models/base" / file).read_bytes())
    with pytest.raises(InvalidInput, match="no tensor that contributes"):
        read(tmp_path / "model", pinned(tmp_path, *SENTENCES), tmp_path / "out")


def test_a_model_that_computes_nan_is_refused(tmp_path: Path) -> None:
    network = transformers.AutoModelForCausalLM.from_pretrained(DEMO / "models/base", dtype=torch.float32)
    with torch.no_grad():
        network.model.layers[0].input_layernorm.weight[0] = float("inf")
    network.save_pretrained(tmp_path / "model")
    for file in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / "model" / file).write_bytes((DEMO / "models/base" / file).read_bytes())
    with pytest.raises(InvalidInput, match="NaN or infinity"):
        read(tmp_path / "model", pinned(tmp_path, *SENTENCES), tmp_path / "out")


# --- recipes ---


def recipe(directory: Path, **more: Any) -> Any:
    models = [{"model": str(DEMO / "models" / name), "text": f"{name}.jsonl"} for name in ("reverser", "shifter")]
    return replace(load_recipe({"merge_method": "regmean", "models": models, **more}), directory=directory)


@pytest.mark.story
def test_a_recipe_gets_the_measurements_of_its_models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MERGEGATE_HOME", str(tmp_path / "home"))
    wanted = recipe(DEMO / "data/texts")
    asked: list[str] = []

    hashes = HashMemo(tmp_path / "hashes.db")
    by_ref = {one.ref: one for one in pin_checkpoints(resolve_parents(wanted), hashes)}

    def find(ref: str) -> PinnedCheckpoint:
        asked.append(ref)
        return by_ref[ref]

    done = prepare_recipe(wanted, find)
    assert len(asked) == 2
    plan = plan_merge(done, {str(ref): open_checkpoint(Path(ref.path)) for ref in done.references()})
    require_prepared(plan)
    measured = [job for job in plan.jobs if all(item.moments for item in job.inputs)]
    assert len(measured) == 7 * 3  # Three layers with seven matrices each.
    assert prepare_recipe(done, find) is done
    # Renamed copies of the same texts give the same merge; a different text gives another.
    moved = tmp_path / "moved"
    moved.mkdir()
    for name in ("reverser", "shifter"):
        (moved / f"{name}.jsonl").write_bytes((DEMO / "data/texts" / f"{name}.jsonl").read_bytes())
    assert prepare_recipe(recipe(moved), find).canonical() == done.canonical()
    (moved / "shifter.jsonl").write_text('{"text": "shift: abc>bcd"}\n')
    assert prepare_recipe(recipe(moved), find).canonical() != done.canonical()


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (None, "no such file"),
        ("", "an empty file"),
        ('{"prompt": "a"}\n', "statistics.field"),
        ('{"text": [{"role": "user"}]}\n', "text or messages"),
        ('{"text": [{"role": "user", "content": ["parts"]}]}\n', "text or messages"),
        ('{"text": 3}\n', "text or messages"),
        ("no json\n", "text.jsonl"),
    ],
)
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
        ({"models": [{"model": "a"}]}, "no 'text'"),
        ({"models": [{"model": "a", "text": 3}]}, "the path of a text"),
        ({"models": [{"model": "a", "text": " "}]}, "the path of a text"),
        ({"merge_method": "linear", "parameters": {"weight": 1}}, "does not read texts"),
        (
            {"merge_method": "linear", "models": [{"model": "a"}], "parameters": {"weight": 1}, "statistics": {}},
            "does not read",
        ),
        ({"base_model": "a", "models": [{"model": "a", "text": "t"}, {"model": "b", "text": "t"}]}, "is not merged"),
        ({"statistics": {"document": 3}}, "documents"),
        ({"statistics": {"documents": 0}}, "at least 1"),
        ({"statistics": {"documents": True}}, "whole number"),
        ({"statistics": {"max_length": 1.5}}, "whole number"),
        ({"statistics": {"field": ""}}, "name of a field"),
        ({"statistics": []}, "a mapping"),
    ],
)
def test_invalid_text_settings_are_refused(change: dict[str, Any], said: str) -> None:
    document = {"merge_method": "regmean", "models": [{"model": "a", "text": "a.jsonl"}], **change}
    with pytest.raises(InvalidInput) as problem:
        load_recipe(document)
    assert said in str(problem.value)


def test_two_texts_of_one_model_are_refused() -> None:
    cut = {"layer_range": [0, 1]}
    slices = [{"sources": [{"model": "a", "text": text, **cut}]} for text in ("one", "two")]
    with pytest.raises(InvalidInput, match="one text for each model"):
        load_recipe({"merge_method": "regmean", "slices": slices})


def test_the_result_of_a_step_cannot_have_a_text() -> None:
    step = "merge_method: linear\nname: made\nmodels: [{model: a, parameters: {weight: 1}}]"
    last = "merge_method: regmean\nmodels: [{model: made, text: t}, {model: b, text: t}]"
    with pytest.raises(InvalidInput, match="exists before the merge"):
        load_recipe(f"{step}\n---\n{last}")
