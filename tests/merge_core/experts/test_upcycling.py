"""A mixture of dense models: its names, refused recipes, and equal experts that compute what the dense model does."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import mixtures
import numpy as np
import pytest
import torch
import transformers
from family import check_recipe, open_models, plan_recipe
from mixtures import logits, related
from safetensors.torch import load_file
from samples import sampled, sampled_rows

from mergegate.merge_core import load_recipe, merge_weights, plan_merge
from mergegate.merge_core.engine import EngineSettings
from mergegate.merge_core.errors import InvalidInput
from mergegate.merge_core.plan.mixture import OUTPUT_FAMILIES, OutputFamily, choose_output

SIZES: dict[str, Any] = {
    "vocab_size": 48, "hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64, "initializer_range": 0.3, "pad_token_id": 0,
    "bos_token_id": 1, "eos_token_id": 2, "tie_word_embeddings": False,
}  # fmt: skip


def dense(kind: str, seed: int = 0, **changes: Any) -> Any:
    torch.manual_seed(seed)
    config = getattr(transformers, f"{kind}Config")(**{**SIZES, **changes})
    model = getattr(transformers, f"{kind}ForCausalLM")(config).eval()
    with torch.no_grad():
        for name, tensor in model.state_dict().items():
            if name.endswith("bias"):
                tensor.copy_(0.2 * torch.randn_like(tensor))
    return model


# The dense model and the mixtures that it can become.
DENSE: dict[str, tuple[Any, tuple[str, ...]]] = {
    "llama": (lambda: dense("Llama"), ("Mixtral", "GLM-4 MoE", "Qwen MoE")),
    "tied": (lambda: dense("Llama", tie_word_embeddings=True), ("Mixtral", "GLM-4 MoE", "Qwen MoE")),
    "wide-heads": (lambda: dense("Llama", head_dim=16), ("Mixtral", "GLM-4 MoE")),
    "far": (
        lambda: dense(
            "Llama", rms_norm_eps=1e-3, hidden_act="gelu",
            rope_parameters={"rope_type": "linear", "factor": 4.0, "rope_theta": 500.0},
        ),
        ("Mixtral", "GLM-4 MoE", "Qwen MoE"),
    ),
    "mistral": (lambda: dense("Mistral", sliding_window=None), ("Mixtral", "GLM-4 MoE", "Qwen MoE")),
    "window": (lambda: dense("Mistral", sliding_window=4), ("Mixtral",)),
    "qwen3": (lambda: dense("Qwen3", head_dim=16), ("Qwen3 MoE",)),
    "qwen3-biased": (lambda: dense("Qwen3", head_dim=16, attention_bias=True), ("Qwen3 MoE",)),
    "qwen2": (lambda: dense("Qwen2"), ("Qwen MoE",)),
}  # fmt: skip
PAIRS = [(name, output) for name, (_, outputs) in DENSE.items() for output in outputs]
FEW = (("far", "Mixtral"), ("tied", "GLM-4 MoE"), ("qwen2", "Qwen MoE"), ("qwen3", "Qwen3 MoE"))
EQUAL = [
    pytest.param(*pair, (1, 4, 2)[number % 3], marks=[] if pair in FEW else pytest.mark.story)
    for number, pair in enumerate(PAIRS)
]
SHARED = ("GLM-4 MoE", "Qwen MoE")


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("dense")
    for name, (make, _) in DENSE.items():
        base = make()
        base.save_pretrained(root / name)
        related(base, 1).save_pretrained(root / f"{name}-b")
    return root


def document(base: str, experts: list[Any], **more: Any) -> dict[str, Any]:
    return {
        "base_model": base,
        "gate_mode": "random",
        "experts": [{"source_model": one} if isinstance(one, str) else one for one in experts],
        **more,
    }


def of(base: str, output: str, *, count: int = 4, **more: Any) -> dict[str, Any]:
    shared = {"shared_experts": [{"source_model": base}]} if output in SHARED else {}
    return document(base, [base] * count, architecture=output, **shared, **more)


def made(root: Path, content: dict[str, Any], out: Path, *, seed: int = 0, **settings: Any) -> Path:
    record = merge_weights(plan_recipe(content, root), out, seed=seed, settings=EngineSettings(**settings))
    assert record.findings == ()
    return out


def require_equal_outputs(mixture_directory: Path, model: Path) -> None:
    """Require that a mixture computes what the dense model computes."""
    found, expected = (logits(mixtures.load(directory)) for directory in (mixture_directory, model))
    assert float((found - expected).abs().max()) <= 1e-6 * max(1.0, float(expected.abs().max()))


def with_config(model: Path, directory: Path, content: dict[str, Any]) -> Path:
    """Write the weights of a model with another configuration, and return the directory that contains the model."""
    directory.mkdir(parents=True)
    (directory / "model.safetensors").write_bytes((model / "model.safetensors").read_bytes())
    (directory / "config.json").write_text(json.dumps(content))
    return directory.parent


@pytest.mark.parametrize(("name", "output", "per_token"), EQUAL)
def test_equal_experts_compute_what_the_dense_model_computes(
    models: Path, tmp_path: Path, name: str, output: str, per_token: int
) -> None:
    require_equal_outputs(made(models, of(name, output, experts_per_token=per_token), tmp_path / "out"), models / name)


@pytest.mark.parametrize(
    ("name", "output"), sampled_rows(PAIRS, [*FEW[1:3], ("mistral", "Mixtral")], pytest.mark.proof)
)
def test_missing_config_keys_keep_the_defaults_of_the_dense_family(
    models: Path, tmp_path: Path, name: str, output: str
) -> None:
    """A configuration may list only deviations from its family's defaults; a mixture family has other defaults."""
    said = json.loads((models / name / "config.json").read_text())
    usual = getattr(transformers, said["architectures"][0].replace("ForCausalLM", "Config"))().to_dict()
    short = {key: value for key, value in said.items() if key == "model_type" or usual.get(key, "-") != value}
    root = with_config(models / name, tmp_path / "models" / name, short)
    require_equal_outputs(made(root, of(name, output), tmp_path / "out"), models / name)


@pytest.mark.parametrize("output", sampled(("Mixtral", "GLM-4 MoE", "Qwen MoE"), ("Mixtral",)))
def test_older_rotary_settings_are_converted(models: Path, tmp_path: Path, output: str) -> None:
    """Checkpoints from before transformers 5 have separate ``rope_theta`` and ``rope_scaling`` keys."""
    said = json.loads((models / "far/config.json").read_text())
    rope = said.pop("rope_parameters")
    said |= {"rope_theta": rope["rope_theta"], "rope_scaling": {"type": "linear", "factor": rope["factor"]}}
    root = with_config(models / "far", tmp_path / "models/far", said)
    require_equal_outputs(made(root, of("far", output), tmp_path / "out"), models / "far")


@pytest.mark.parametrize(("name", "output"), [("llama", "Mixtral"), ("qwen3", "Qwen3 MoE")])
def test_each_expert_has_the_weights_of_its_model(models: Path, tmp_path: Path, name: str, output: str) -> None:
    """A token routed to one expert sees that model's feed-forward layers and the rest of the base."""
    out = made(models, document(name, [name, f"{name}-b"], architecture=output, experts_per_token=1), tmp_path / "out")
    mixture = mixtures.load(out)
    other = load_file(models / f"{name}-b/model.safetensors")
    own = load_file(models / name / "model.safetensors")
    for chosen in (0, 1):
        # Copy the chosen expert over the other one, so that the routing does not matter.
        expert = {key: (other if chosen and ".mlp." in key else own)[key] for key in own}
        stitched = mixtures.load(models / name)
        stitched.load_state_dict(expert)
        with torch.no_grad():
            for layer in mixture.model.layers:
                layer.mlp.experts.gate_up_proj[1 - chosen] = layer.mlp.experts.gate_up_proj[chosen]
                layer.mlp.experts.down_proj[1 - chosen] = layer.mlp.experts.down_proj[chosen]
        torch.testing.assert_close(logits(mixture), logits(stitched), atol=2e-6, rtol=1e-6)
        mixture = mixtures.load(out)


def test_the_written_layout_matches_what_servers_load(models: Path, tmp_path: Path) -> None:
    names = set(load_file(made(models, of("llama", "Mixtral", count=2), tmp_path / "a") / "model.safetensors"))
    assert {name for name in names if ".layers.1." in name and "attn" not in name and "norm" not in name} == {
        "model.layers.1.block_sparse_moe.gate.weight",
        *(f"model.layers.1.block_sparse_moe.experts.{e}.{w}.weight" for e in (0, 1) for w in ("w1", "w2", "w3")),
    }


def test_each_copy_of_an_expert_has_its_own_noise(models: Path, tmp_path: Path) -> None:
    content = document("llama", [{"source_model": "llama", "noise_scale": 0.05, "copies": 3}])
    tensors = load_file(made(models, content, tmp_path / "out") / "model.safetensors")
    dense_weight = load_file(models / "llama/model.safetensors")["model.layers.0.mlp.up_proj.weight"]
    noise = [tensors[f"model.layers.0.block_sparse_moe.experts.{e}.w3.weight"] - dense_weight for e in range(3)]
    for one in noise:
        assert abs(float(one.mean())) < 4 * 0.05 / one.numel() ** 0.5
        assert float(one.std()) == pytest.approx(0.05, rel=0.1)
    correlation = np.corrcoef([one.flatten().numpy() for one in noise])
    assert np.abs(correlation - np.eye(3)).max() < 0.15


def test_noise_only_depends_on_the_seed(models: Path, tmp_path: Path) -> None:
    content = document("llama", [{"source_model": "llama", "noise_scale": 0.05, "residual_scale": 0.5, "copies": 3}])
    usual = (made(models, content, tmp_path / "a") / "model.safetensors").read_bytes()
    small = made(models, content, tmp_path / "b", block_elements=64, threads=3) / "model.safetensors"
    assert small.read_bytes() == usual
    assert (made(models, content, tmp_path / "c", seed=1) / "model.safetensors").read_bytes() != usual


@pytest.mark.parametrize(("mode", "spread"), [("random", 1.0), ("uniform_random", 3**-0.5 * 32**-0.5)])
def test_random_routers_have_the_expected_spread(models: Path, tmp_path: Path, mode: str, spread: float) -> None:
    content = {**document("llama", ["llama"] * 8), "gate_mode": mode}
    tensors = load_file(made(models, content, tmp_path / "out") / "model.safetensors")
    first, second = (tensors[f"model.layers.{layer}.block_sparse_moe.gate.weight"] for layer in (0, 1))
    assert first.shape == (8, 32)
    assert float(first.std()) == pytest.approx(spread, rel=0.15)
    assert not torch.equal(first, second)
    if mode == "uniform_random":
        assert float(first.abs().max()) <= 32**-0.5


def test_scales_follow_the_recipe(models: Path, tmp_path: Path) -> None:
    """An explicit residual_scale replaces the family's default."""
    shared = [{"source_model": "llama", "residual_scale": 0.25}]
    content = document("llama", [{"source_model": "llama", "residual_scale": 0.75}, "llama"], shared_experts=shared)
    tensors = load_file(made(models, content, tmp_path / "out") / "model.safetensors")
    dense_weight = load_file(models / "llama/model.safetensors")["model.layers.0.mlp.down_proj.weight"]
    module = "model.layers.0.mlp"
    assert torch.equal(tensors[f"{module}.experts.0.down_proj.weight"], 0.75 * dense_weight)
    assert torch.equal(tensors[f"{module}.experts.1.down_proj.weight"], 0.5 * dense_weight)
    assert torch.equal(tensors[f"{module}.shared_experts.down_proj.weight"], 0.25 * dense_weight)


def test_the_number_format_follows_the_recipe(models: Path, tmp_path: Path) -> None:
    out = made(models, of("llama", "GLM-4 MoE", dtype="bfloat16"), tmp_path / "out")
    kinds = {tensor.dtype for name, tensor in load_file(out / "model.safetensors").items() if "correction" not in name}
    assert kinds == {torch.bfloat16}
    assert mixtures.load(out).dtype == torch.bfloat16


def test_a_mixture_can_be_a_step_and_use_steps(models: Path, tmp_path: Path) -> None:
    text = (
        "name: both\nmerge_method: linear\nmodels: [{model: llama}, {model: llama-b}]\nparameters: {weight: 1}\n---\n"
        "base_model: llama\ngate_mode: random\nexperts: [{source_model: both}, {source_model: llama-b}]\n"
    )
    recipe = load_recipe(text)
    assert [str(ref) for ref in recipe.references()] == ["llama", "llama-b"]
    plan = plan_merge(recipe, open_models(recipe, models))
    merge_weights(plan, tmp_path / "out")
    name = "block_sparse_moe.experts.0.w1.weight"
    first, second = (load_file(models / one / "model.safetensors") for one in ("llama", "llama-b"))
    wanted = "model.layers.0.mlp.gate_proj.weight"
    mixed = load_file(tmp_path / "out/model.safetensors")[f"model.layers.0.{name}"]
    torch.testing.assert_close(mixed, (first[wanted] + second[wanted]) / 2)


@pytest.mark.parametrize(
    ("content", "found"),
    [
        (document("qwen2", ["qwen2"] * 2), "without a shared expert"),
        (document("llama", ["llama"] * 2, architecture="DeepSeek MoE"), "DeepSeek"),
        (document("llama", ["llama"] * 2, architecture="Qwen3"), "Qwen3 MoE for a base of type llama"),
        (document("llama", ["qwen3"] * 2), "qwen3"),
        (document("window", ["window"] * 2, shared_experts=[{"source_model": "window"}]), "4"),
        (document("wide-heads", ["wide-heads"], experts_per_token=1, architecture="Qwen",
                  shared_experts=[{"source_model": "wide-heads"}]), "16"),
        (document("qwen3-biased", ["qwen3"] * 2, architecture="Mixtral"), "Mixtral for a base of type qwen3"),
    ],
)  # fmt: skip
def test_models_that_no_family_can_represent_are_refused(models: Path, content: dict[str, Any], found: str) -> None:
    with pytest.raises(InvalidInput) as refusal:
        plan_recipe(content, models)
    assert found in refusal.value.found
    assert check_recipe(content, models).blocking


@pytest.mark.parametrize("suffix", ["", "ForCausalLM"])
@pytest.mark.parametrize("architecture", ["", " ", "--", "_", "...", "\n"])
def test_an_architecture_without_a_letter_is_refused(architecture: str, suffix: str) -> None:
    with pytest.raises(InvalidInput, match=r"architecture(.|\n)*a prefix of Mixtral"):
        choose_output(f"{architecture}{suffix}", "llama", shared=False, prompts=False, location="recipe.yaml")


@pytest.mark.parametrize("family", OUTPUT_FAMILIES, ids=lambda family: family.name)
def test_every_spelling_of_a_family_is_accepted(family: OutputFamily) -> None:
    spellings = (family.name, family.model_type, family.architecture, family.name.upper(), family.name.replace(" ", ""))
    for spelling in (*spellings, f"{family.name}ForCausalLM"):
        for source in family.sources:
            shared = bool(family.shared)
            assert choose_output(spelling, source, shared=shared, prompts=False, location="r") is family


def test_a_bias_without_a_counterpart_is_refused(models: Path, tmp_path: Path) -> None:
    for name in ("attention_bias", "mlp_bias"):
        dense("Llama", **{name: True}).save_pretrained(tmp_path / name)
        with pytest.raises(InvalidInput, match=r"bias.*Mixtral has no such tensor"):
            plan_recipe(document(name, [name] * 2), tmp_path)


def test_models_of_different_sizes_are_refused(models: Path, tmp_path: Path) -> None:
    dense("Llama", intermediate_size=48).save_pretrained(tmp_path / "wider")
    dense("Llama").save_pretrained(tmp_path / "base")
    dense("Llama", num_hidden_layers=3).save_pretrained(tmp_path / "deeper")
    with pytest.raises(InvalidInput, match=r"shape \[48, 32\]"):
        plan_recipe(document("base", ["base", "wider"]), tmp_path)
    with pytest.raises(InvalidInput, match="num_hidden_layers"):
        plan_recipe(document("base", ["base", "deeper"]), tmp_path)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        *(("num_hidden_layers", 10**9), ("num_hidden_layers", "2"), ("hidden_size", 10**12), ("head_dim", "8")),
        *(("max_position_embeddings", "many"), ("num_attention_heads", 0), ("intermediate_size", 41)),
        *(("auto_map", {"AutoModel": "x.Y"}), ("rope_parameters", [1]), ("model_type", ["llama"])),
    ],
)
def test_an_untrusted_config_is_refused_without_a_traceback(
    models: Path, tmp_path: Path, key: str, value: object
) -> None:
    """The configuration is refused immediately, unless the plan does not need the value."""
    said = json.loads((models / "llama/config.json").read_text())
    with_config(models / "llama", tmp_path / "odd", {**said, key: value})
    for output in ("Mixtral", "GLM-4 MoE"):
        try:
            plan = plan_recipe(of("odd", output), tmp_path)
        except InvalidInput:
            continue
        assert key == "rope_parameters"
        assert plan.bytes_written < 1 << 20


@pytest.mark.parametrize(
    ("change", "where"),
    [
        ({"gate_mode": "hiden"}, "gate_mode"), ({"experts_per_token": 3}, "experts_per_token"),
        ({"experts": []}, "experts"), ({"experts": [{"model": "llama"}]}, r"experts\[0\].model"),
        ({"experts": [{"source_model": "llama", "noise_scale": -1}]}, "noise_scale"),
        ({"gate_mode": "hidden"}, r"experts\[0\].positive_prompts"), ({"base_model": None}, "recipe"),
        ({"base_model": "llama+adapter", "gate_mode": "hidden", "experts_per_token": 1,
          "experts": [{"source_model": "llama", "positive_prompts": "x"}]}, "has an adapter"),
        ({"shared_experts": [{"source_model": "a"}, {"source_model": "b"}]}, "shared_experts"),
    ],
)  # fmt: skip
def test_an_invalid_mixture_recipe_is_refused(change: dict[str, Any], where: str) -> None:
    with pytest.raises(InvalidInput, match=where):
        load_recipe({**document("llama", ["llama"] * 2), **change})


def test_keys_that_mergekit_moe_ignores_are_warnings() -> None:
    recipe = load_recipe({**document("llama", ["llama"] * 2), "merge_method": "moe", "expert": 1, "models": None})
    assert recipe.mixture is not None
    assert [(one.where, one.remedy) for one in recipe.findings] == [
        ("recipe: merge_method", "remove it"),
        ("recipe: expert", "did you mean 'experts'?"),
    ]


def test_equal_prompts_are_a_warning(models: Path) -> None:
    experts = [{"source_model": name, "positive_prompts": ["add"]} for name in ("llama", "llama-b")]
    content = {**document("llama", experts), "gate_mode": "hidden"}
    planned_merge = check_recipe(content, models)
    assert not planned_merge.blocking
    assert any("two rows of the router are equal" in finding.found for finding in planned_merge.findings)


def test_a_mixture_without_router_rows_can_be_planned_but_not_merged(models: Path, tmp_path: Path) -> None:
    experts = [{"source_model": name, "positive_prompts": [name]} for name in ("llama", "llama-b")]
    plan = plan_recipe({**document("llama", experts), "gate_mode": "hidden"}, models)
    assert plan.bytes_written > 0
    with pytest.raises(InvalidInput, match="router rows from the prompts are missing"):
        merge_weights(plan, tmp_path / "out")
