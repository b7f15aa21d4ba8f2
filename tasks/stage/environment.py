"""What besides settings decides the last digits of a score: the kind of device and the libraries that do the sums."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from importlib.metadata import version
from typing import Literal

from pydantic import BaseModel, ConfigDict

from mergegate.merge_core.engine import has_cuda_driver
from mergegate.merge_core.system import kernel_lines

# The units of x86 and of Arm with which a product in a half format is quicker than in float32, or nearly as quick, as
# Linux names them. In AVX-512 oneDNN widens bfloat16 on the way (measured: docs/performance.md).
_UNITS = {
    "bfloat16": {"avx512_bf16", "amx_bf16", "avx512bw", "bf16"},
    "float16": {"avx512_fp16", "amx_fp16", "asimdhp"},
}


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


def formats_without_units(device: str, processor: str | None = None) -> frozenset[str]:
    """Half formats (bfloat16, float16) that ``device`` can only convert, not compute in: a matrix product takes three
    to four times as long in them as in float32 (docs/performance.md).

    Args:
        processor: As Linux describes it; None: this one. Of a processor that nobody describes nothing is said.
    """
    if device != "cpu":
        return frozenset()
    lines = kernel_lines("cpuinfo") if processor is None else processor.splitlines()
    described = next((line for line in lines if line.startswith(("flags", "Features"))), "")
    units = set(described.partition(":")[2].split())
    return frozenset(name for name, any_of in _UNITS.items() if units and not units & any_of)


def versions(*distributions: str) -> dict[str, str]:
    """``{'torch': '2.13.0'}``, without importing any of them. A local build tag (``+cpu``) is part of the version."""
    return {name: _installed(name) for name in distributions}


# Part of every key, and looked up in files: what is installed stays so while a process runs.
_installed = cache(version)
