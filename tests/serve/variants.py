"""Checkpoints and adapters of the demo family, functions that break a merge of it, and marks for the real vLLM."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from mergegate.merge_core.adapters import ExtractionSettings, extract_adapter, write_adapter
from mergegate.merge_core.checkpoint import open_checkpoint
from mergegate.tasks.base.store.manifest import digest
from mergegate.tasks.models.checkpoints import Model, PinnedAdapter, PinnedCheckpoint
from mergegate.tasks.quality.serve.launch import PYTHON

PROJECT = Path(__file__).resolve().parents[2]
DEMO = PROJECT / "profiles" / "demo"
Q_PROJ = "model.layers.1.self_attn.q_proj.weight"
NORM = "model.norm.weight"
EMBEDDING = "model.embed_tokens.weight"

Tensors = dict[str, torch.Tensor]


def model_in(directory: Path) -> Model:
    return Model(name=directory.name, digest=digest(str(directory)), directory=directory)


def copied(source: Path, directory: Path) -> Path:
    """Copy the checkpoint to `directory`, where the test may change it."""
    return shutil.copytree(source, directory)


def with_config(directory: Path, file: str = "config.json", **changes: Any) -> None:
    path = directory / file
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def with_tensors(directory: Path, change: Callable[[Tensors], object]) -> None:
    file = directory / "model.safetensors"
    tensors = load_file(file)
    change(tensors)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, file, {"format": "pt"})


def without_tensor(directory: Path, ending: str) -> None:
    with_tensors(directory, lambda tensors: [tensors.pop(name) for name in list(tensors) if name.endswith(ending)])


def nan_weight(directory: Path) -> None:
    with_tensors(directory, lambda tensors: tensors[Q_PROJ][3].__setitem__(5, torch.nan))


def missing_tensor(directory: Path) -> None:
    without_tensor(directory, Q_PROJ)


def narrowed_heads(directory: Path) -> None:
    with_config(directory, num_key_value_heads=1)


def more_layers(directory: Path) -> None:
    with_config(directory, num_hidden_layers=4)


def fewer_layers(directory: Path) -> None:
    with_config(directory, num_hidden_layers=2)


def small_embeddings(directory: Path) -> None:
    with_config(directory, vocab_size=30)
    with_tensors(directory, lambda tensors: tensors.update({EMBEDDING: tensors[EMBEDDING][:30]}))


def no_chat_template(directory: Path) -> None:
    (directory / "chat_template.jinja").unlink()


def zeroed_norm(directory: Path) -> None:
    with_tensors(directory, lambda tensors: tensors.update({NORM: torch.zeros_like(tensors[NORM])}))


# Detected before a server starts: (function that breaks the checkpoint, name of the check, part of its message).
STATIC: dict[str, tuple[Callable[[Path], None], str, str]] = {
    "NaN weight": (nan_weight, "finite weights", "1 of 9,216 elements are NaN"),
    "missing tensor": (missing_tensor, "tensors", "missing; the configuration requires it"),
    "narrowed heads": (narrowed_heads, "tensors", "shape [96, 96] (and 5 more)"),
    "more layers": (more_layers, "tensors", "missing (and 8 more)"),
    "fewer layers": (fewer_layers, "tensors", "not part of the model that config.json describes (and 8 more)"),
    "small embeddings": (small_embeddings, "vocabulary", "has id 33, the embedding 30 rows (4 ids without a row)"),
    "no chat template": (no_chat_template, "chat template", "no chat template"),
}

real_server = [
    pytest.mark.serve,
    # Building vLLM's environment takes minutes. If the variable requires vLLM, a missing environment fails the test.
    pytest.mark.skipif(
        not (PROJECT / PYTHON).exists() and "MERGEGATE_REQUIRE_VLLM" not in os.environ, reason="make serve-env first"
    ),
]

BASE = DEMO / "models" / "base"
_BESIDE = ("norm", "embed_tokens")


def linear_adapter(place: Path, tuned: str = "reverser", rank: int = 16) -> Path:
    """Extract what `tuned` changes in the linear layers of the base.

    All other tensors of `tuned` are first replaced by those of the base.
    """
    copy = shutil.copytree(DEMO / "models" / tuned, place.with_name(f"{place.name}-tuned"))
    own = load_file(BASE / "model.safetensors")
    with_tensors(copy, lambda tensors: tensors.update({k: v for k, v in own.items() if any(p in k for p in _BESIDE)}))
    made = extract_adapter(open_checkpoint(copy), open_checkpoint(BASE), "base", ExtractionSettings(rank=rank))
    write_adapter(made.adapter, place)
    return place


def pinned(adapter: Path, base: Path = BASE) -> PinnedCheckpoint:
    """Return base and adapter as a run represents a merge whose output is an adapter."""
    model = model_in(base)
    part = PinnedAdapter(ref=adapter.name, directory=adapter, revision=None, files=())
    both = digest([model.digest, str(adapter)])
    return PinnedCheckpoint(name="merge", ref="merge", digest=both, directory=model.directory, adapter=part)


def applied(adapter: Path, place: Path, base: Path = BASE) -> Model:
    """Merge the adapter into its base with PEFT and return the result as one model."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    shutil.copytree(base, place)
    network = AutoModelForCausalLM.from_pretrained(base, dtype="auto")
    PeftModel.from_pretrained(network, adapter).merge_and_unload().save_pretrained(place)
    return model_in(place)


def negated(adapter: Path, place: Path) -> Path:
    """Write the adapter with the sign of every change flipped."""
    shutil.copytree(adapter, place)
    file = place / "adapter_model.safetensors"
    tensors = {name: -one if "lora_B" in name else one for name, one in load_file(file).items()}
    save_file(tensors, file, {"format": "pt"})
    return place
