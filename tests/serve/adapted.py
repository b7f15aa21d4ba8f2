"""Adapters on the base of the demo family, of linear layers alone, and what vLLM does not take as LoRA."""

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
    """What ``tuned`` changes in the linear layers of the base: extracted from a copy whose other tensors are the
    base's."""
    copy = shutil.copytree(DEMO / "models" / tuned, place.with_name(f"{place.name}-tuned"))
    own = load_file(BASE / "model.safetensors")
    with_tensors(copy, lambda tensors: tensors.update({k: v for k, v in own.items() if any(p in k for p in _BESIDE)}))
    made = extract_adapter(open_checkpoint(copy), open_checkpoint(BASE), "base", ExtractionSettings(rank=rank))
    write_adapter(made.adapter, place)
    return place


def pinned(adapter: Path, base: Path = BASE) -> PinnedCheckpoint:
    """Base and adapter, as a merge that is an adapter stands in a run."""
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
    """Base and adapter as one model, by PEFT."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    shutil.copytree(base, place)
    network = AutoModelForCausalLM.from_pretrained(base, dtype="auto")
    PeftModel.from_pretrained(network, adapter).merge_and_unload().save_pretrained(place)
    return model_in(place)


def negated(adapter: Path, place: Path) -> Path:
    """The opposite of an adapter: every change with the other sign."""
    shutil.copytree(adapter, place)
    file = place / "adapter_model.safetensors"
    tensors = {name: -one if "lora_B" in name else one for name, one in load_file(file).items()}
    save_file(tensors, file, {"format": "pt"})
    return place
