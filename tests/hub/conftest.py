"""A Hub on loopback that serves a model family, and access to it through the real client."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path += [str(Path(__file__).resolve().parents[1] / place) for place in ("publish", "merge_core")]

from family import random_tensors, save_checkpoint
from hub_family import CARD
from hub_look_alike import LookAlike, hub


@pytest.fixture
def models(tmp_path: Path) -> Path:
    """Save ``base``, ``math`` and ``code`` as directories. The base is sharded and has files that no merge needs."""
    place, base = tmp_path / "models", random_tensors(0)
    save_checkpoint(place / "base", base, shards=2)
    for seed, name in enumerate(("math", "code"), start=1):
        save_checkpoint(place / name, random_tensors(seed, base))
    for model in place.iterdir():
        (model / "README.md").write_text(CARD)
    for name in ("pytorch_model.bin", "consolidated.safetensors", "onnx/model.bin"):
        (place / "base" / name).parent.mkdir(exist_ok=True)
        (place / "base" / name).write_bytes(b"\0" * 5000)
    return place


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
