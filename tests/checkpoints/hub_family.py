"""A model family on a stand-in Hub: fixtures, a recipe, a profile, the command line, and the size of headers."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from family import HIDDEN, LAYERS, WIDE, random_tensors, save_checkpoint
from hub_look_alike import LookAlike, hub
from typer.testing import CliRunner, Result

CARD = "---\nlicense: apache-2.0\n---\n# a model\n"
RECIPE = """\
merge_method: ties
base_model: acme/base
models:
  - {model: acme/math, parameters: {weight: 0.5, density: 0.5}}
  - {model: acme/code, parameters: {weight: 0.5, density: 0.5}}
"""


SIZES = {"hidden_size": HIDDEN, "intermediate_size": WIDE, "num_attention_heads": 1, "num_key_value_heads": 1}


def rest_of_class() -> dict[str, torch.Tensor]:
    """Return the tensors of a Llama that ``random_tensors`` leaves out."""
    square, wide = ("self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj"), torch.zeros(WIDE, HIDDEN)
    rest = {
        "mlp.gate_proj": wide,
        "mlp.down_proj": torch.zeros(HIDDEN, WIDE),
        "post_attention_layernorm": torch.ones(HIDDEN),
    }
    rest |= dict.fromkeys(square, torch.zeros(HIDDEN, HIDDEN))
    return {f"model.layers.{at}.{name}.weight": one.clone() for at in range(LAYERS) for name, one in rest.items()}


def go_offline(monkeypatch: pytest.MonkeyPatch) -> None:
    """Set HF_HUB_OFFLINE for the rest of the test."""
    from huggingface_hub import constants

    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)


def header_sizes(models: Path) -> dict[str, int]:
    """Return the number of bytes before the first weight, by the SHA-256 of each model's safetensors files."""
    from mergegate.merge_core.files.hashing import sha256_file

    files = list(models.glob("*/*model*.safetensors"))
    return {sha256_file(file): 8 + int.from_bytes(file.read_bytes()[:8], "little") for file in files}


def mergegate(*arguments: str) -> Result:
    """Run the command in this process. An unexpected exception fails the test."""
    from mergegate.flows.cli.app import app

    result = CliRunner().invoke(app, list(arguments))
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


def write_profile(directory: Path, *, name: str = "demo", recipe: str = RECIPE, **more: object) -> Path:
    """Write a profile, with evidence that is never reached, and return its path."""
    (directory / "held-out.jsonl").write_text('{"text": "t1 t2 t3"}\n')
    (directory / "recipe.yaml").write_text(recipe)
    profile = {"name": name, "recipe": "recipe.yaml", "perplexity": {"documents": "held-out.jsonl"}, **more}
    file = directory / f"{name}.yaml"
    file.write_text(json.dumps(profile))
    return file


@pytest.fixture
def models(tmp_path: Path) -> Path:
    """Save ``base``, ``math`` and ``code`` as directories. The base is sharded and has files that no merge needs."""
    directory, base = tmp_path / "models", random_tensors(0)
    save_checkpoint(directory / "base", base | rest_of_class(), shards=2, config=SIZES)
    for seed, name in enumerate(("math", "code"), start=1):
        save_checkpoint(directory / name, random_tensors(seed, base) | rest_of_class(), config=SIZES)
    for model in directory.iterdir():
        (model / "README.md").write_text(CARD)
    for name in ("pytorch_model.bin", "consolidated.safetensors", "onnx/model.bin"):
        (directory / "base" / name).parent.mkdir(exist_ok=True)
        (directory / "base" / name).write_bytes(b"\0" * 5000)
    return directory


@pytest.fixture
def server(tmp_path: Path, models: Path) -> Iterator[LookAlike]:
    """Yield a Hub that serves the family as ``acme/base``, ``acme/math`` and ``acme/code``."""
    with hub(tmp_path / "hub") as stand_in:
        for model in models.iterdir():
            stand_in.add_model(f"acme/{model.name}", model)
        yield stand_in


@pytest.fixture
def online(server: LookAlike, tmp_path: Path, home: Path, monkeypatch: pytest.MonkeyPatch) -> LookAlike:
    """Point this process to the stand-in Hub, with an empty cache and no token."""
    from huggingface_hub import constants

    for name in ("HF_HUB_OFFLINE", "HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HF_ENDPOINT", server.url)
    # The library read these from the environment when it was imported.
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "no-token"))
    monkeypatch.setattr("time.sleep", lambda seconds: None)  # The client waits between attempts.
    return server
