"""What besides settings decides the last digits of a score: the kind of device and the libraries that do the sums."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from importlib.metadata import version
from typing import Literal

from pydantic import BaseModel, ConfigDict

from merge_core.engine import has_cuda_driver


class Runtime(BaseModel):
    """Where forward passes run, and with which libraries. Part of the key of every stage that runs a model, and equal
    on both sides of every comparison."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    device: Literal["cpu", "cuda"]
    libraries: Mapping[str, str]  # name -> version


def runtime() -> Runtime:
    """This machine's: the GPU where there is one."""
    return Runtime(device=device_kind(), libraries=versions("torch", "transformers"))


def device_kind() -> Literal["cpu", "cuda"]:
    """``cuda`` where torch can use one. A machine without the driver's library is known without importing torch, which
    would be the longest part of a run that finds nothing new."""
    if not has_cuda_driver():
        return "cpu"
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def versions(*distributions: str) -> dict[str, str]:
    """``{'torch': '2.13.0'}``, without importing any of them. A local build tag (``+cpu``) is part of the version."""
    return {name: _installed(name) for name in distributions}


# Part of every key, and looked up in files: what is installed stays so while a process runs.
_installed = cache(version)
