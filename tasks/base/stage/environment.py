"""Describe what a machine runs models with: device kind, library versions, and formats that it computes natively."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from importlib.metadata import version
from typing import Literal

from pydantic import BaseModel, ConfigDict

from mergegate.merge_core.engine import has_cuda_driver
from mergegate.merge_core.system import kernel_lines

# Linux's names of x86 and Arm CPU features with which a matrix product in a 16-bit format is about as fast as in
# float32, or faster. With AVX-512, oneDNN widens bfloat16 on the fly (see dev/measurements/evaluation-speed.md).
_UNITS = {
    "bfloat16": {"avx512_bf16", "amx_bf16", "avx512bw", "bf16"},
    "float16": {"avx512_fp16", "amx_fp16", "asimdhp"},
}


class Runtime(BaseModel):
    """Device kind and library versions that run a model. They affect the last digits of its scores.

    They are part of the key of every stage that runs a model, so compared models have the same runtime.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    device: Literal["cpu", "cuda"]
    libraries: Mapping[str, str]  # Version by library name.


def runtime() -> Runtime:
    """Return the runtime of this machine."""
    return Runtime(device=device_kind(), libraries=versions("torch", "transformers"))


def device_kind() -> Literal["cpu", "cuda"]:
    """Return ``cuda`` if torch can use a CUDA device, otherwise ``cpu``.

    Without the CUDA driver library it does not import torch, which would take most of the time of a run without work.
    """
    if not has_cuda_driver():
        return "cpu"
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def formats_without_units(device: str, processor: str | None = None) -> frozenset[str]:
    """Return the 16-bit formats (bfloat16, float16) in which a CPU without compute units for them is slow.

    In these formats a matrix product takes three to four times as long as in float32
    (dev/measurements/evaluation-speed.md). The result is empty for any ``device`` but ``cpu``. ``processor`` is the
    content of Linux's ``/proc/cpuinfo``; if it names no features, the result is empty. Default: that of this machine.
    """
    if device != "cpu":
        return frozenset()
    lines = kernel_lines("cpuinfo") if processor is None else processor.splitlines()
    features = next((line for line in lines if line.startswith(("flags", "Features"))), "")
    units = set(features.partition(":")[2].split())
    return frozenset(name for name, any_of in _UNITS.items() if units and not units & any_of)


def versions(*distributions: str) -> dict[str, str]:
    """Return the version of each installed package, such as ``{'torch': '2.13.0'}``, without importing it.

    A local build tag (``+cpu``) is part of the version.
    """
    return {name: _installed(name) for name in distributions}


# Cached because every key contains versions and each lookup reads files. Installed packages do not change during a run.
_installed = cache(version)
