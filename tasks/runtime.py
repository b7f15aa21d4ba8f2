"""What besides settings decides the last digits of a score: the kind of device and the libraries that do the sums."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from pydantic import BaseModel, ConfigDict

from tasks.versions import versions


class Runtime(BaseModel):
    """Where forward passes run, and with which libraries. Part of the key of every stage that runs a model, and equal
    on both sides of every comparison."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    device: Literal["cpu", "cuda"]
    libraries: Mapping[str, str]  # name -> version


def runtime() -> Runtime:
    """This machine's: the GPU where there is one."""
    import torch

    device: Literal["cpu", "cuda"] = "cuda" if torch.cuda.is_available() else "cpu"
    return Runtime(device=device, libraries=versions("torch", "transformers"))
