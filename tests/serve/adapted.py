"""Build adapters on the demo family's base that change only linear layers, and related models."""

from __future__ import annotations

import shutil
from pathlib import Path

from safetensors.torch import load_file, save_file
from variants import DEMO, model_in, with_tensors

from mergegate.merge_core.adapters import ExtractionSettings, extract_adapter, write_adapter
from mergegate.merge_core.checkpoint import open_checkpoint
from mergegate.tasks.checkpoints import Model, PinnedAdapter, PinnedCheckpoint
from mergegate.tasks.store.keys import digest

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
    return PinnedCheckpoint(
        name="merge",
        ref="merge",
        digest=digest([model.digest, str(adapter)]),
        directory=model.directory,
        adapter=part,
    )


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
