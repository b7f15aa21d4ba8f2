"""Decode quantized weights to bfloat16 while they are read, block by block, so that they can be merged.

The module supports two formats, because some models are published only in these. ``plan.consistency`` refuses all other
quantized checkpoints and names their format.

``fp8`` in blocks (DeepSeek V3): ``X.weight`` [rows, columns] in F8_E4M3 and ``X.weight_scale_inv`` with one factor per
block of ``weight_block_size`` rows and columns. The last blocks are smaller if the sizes do not divide evenly.

``mxfp4`` (GPT-OSS; OCP Microscaling Formats 1.0): ``X_blocks`` [experts, outputs, groups, 16] stores two 4-bit numbers
per byte, the lower half first. ``X_scales`` [experts, outputs, groups] stores the exponent of the power of two of each
group of 32 numbers, plus 127. The decoded weight is ``X`` [experts, inputs, outputs].
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from mergegate.merge_core.checkpoint.tensors import (
    BY_CODE,
    AnyTensor,
    DerivedTensor,
    ReadElements,
    ReadStored,
    StoredTensor,
    numbers,
    patterns,
)
from mergegate.merge_core.errors import Finding, InvalidInput

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Floats = NDArray[np.float32]
    Bytes = NDArray[np.uint8]

BF16 = BY_CODE["BF16"]
_SCALE = "_scale_inv"
_BLOCKS, _SCALES = "_blocks", "_scales"
_GROUP = 32  # Number of MXFP4 numbers that share a scale.
# Values of E2M1: one sign bit, two exponent bits, one mantissa bit.
_FP4 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)


def _e4m3_values() -> Floats:
    """Return the value of each F8_E4M3 byte. The format has no infinity, and NaN has all bits except the sign set."""
    codes = np.arange(256)
    exponents, mantissas = (codes >> 3) & 15, codes & 7
    sizes = np.where(exponents == 0, mantissas / 8 * 2.0**-6, (1 + mantissas / 8) * 2.0 ** (exponents - 7.0))
    sizes[(codes & 127) == 127] = np.nan
    return np.where(codes & 128, -sizes, sizes).astype(np.float32)


E4M3_VALUES = _e4m3_values()

Table: TypeAlias = Mapping[str, AnyTensor]


def decode_quantized(tensors: Table, config: Mapping[str, Any]) -> tuple[Table, Mapping[str, Any], tuple[Finding, ...]]:
    """Replace quantized weights by bfloat16 weights that are decoded while they are read.

    Returns:
        The tensors, a config without ``quantization_config``, and a finding that names the format. If there is nothing
        to decode, the arguments and no finding.
    """
    settings: Any = config.get("quantization_config")
    if not isinstance(settings, Mapping):
        return tensors, config, ()
    method = str(settings.get("quant_method"))
    size: Any = settings.get("weight_block_size")
    has_blocks = isinstance(size, list) and len(size) == 2 and all(type(item) is int and item > 0 for item in size)
    if method == "mxfp4":
        plain = _decode_mxfp4(tensors)
    elif method == "fp8" and settings.get("activation_scheme", "dynamic") == "dynamic" and has_blocks:
        plain = _decode_fp8(tensors, (size[0], size[1]))
    else:
        return tensors, config, ()
    if not any(isinstance(tensor, DerivedTensor) for tensor in plain.values()):
        return tensors, config, ()
    finding = Finding(
        "warn",
        "config.json: quantization_config",
        found=f"the model is quantized ({method}), so mergegate decodes it to bfloat16",
        expected="the weights before quantization",
        remedy="if the unquantized weights are published too, name them instead",
    )
    return plain, {key: value for key, value in config.items() if key != "quantization_config"}, (finding,)


@dataclass(frozen=True)
class _Scaled(DerivedTensor):
    """A tensor whose stored numbers ``payload`` are multiplied by ``scales``."""

    payload: StoredTensor
    scales: StoredTensor

    @property
    def parts(self) -> tuple[StoredTensor, ...]:
        return self.payload, self.scales


@dataclass(frozen=True)
class BlockScaled(_Scaled):
    """A matrix of 8-bit numbers with one factor per block.

    The payload is [rows, columns] in F8_E4M3. The scales are in F32 or BF16, one for each block of ``block`` rows and
    columns, [ceil(rows / block), ceil(columns / block)].
    """

    block: tuple[int, int]

    def identity(self) -> Any:
        return ["fp8", *self.block]

    def open(self, read: ReadStored) -> ReadElements:
        (_, width), (high, wide) = self.shape, self.block
        stored = np.empty(self.scales.nbytes, np.uint8)
        read(self.scales, 0, stored)
        factors = numbers(patterns(stored, self.scales.dtype), self.scales.dtype).reshape(self.scales.shape)

        def elements(first: int, into: Bytes) -> None:
            count = len(into) // 2
            top, bottom = first // width, -(-(first + count) // width)
            payload = np.empty((bottom - top, width), np.uint8)
            read(self.payload, top * width, payload.reshape(-1))
            values = E4M3_VALUES[payload]
            for row in range(top // high, -(-bottom // high)):
                part = values[max(row * high - top, 0) : (row + 1) * high - top]
                part *= np.repeat(factors[row], min(wide, width))[:width]
            _store(values.reshape(-1)[first - top * width :][:count], into)

        return elements


@dataclass(frozen=True)
class Microscaled(_Scaled):
    """Matrices of experts in 4-bit numbers, with one power of two per group of 32 inputs.

    The payload has two numbers per byte, [experts, outputs, groups, 16] in U8. The scales are the exponents of the
    powers of two plus 127, [experts, outputs, groups] in U8.
    """

    def identity(self) -> Any:
        return ["mxfp4"]

    def open(self, read: ReadStored) -> ReadElements:
        _, inputs, outputs = self.shape
        groups = inputs // _GROUP
        cached, lock = _Expert(-1, np.empty(0), np.empty(0)), threading.Lock()

        def expert(number: int) -> _Expert:
            """Return an expert. The last one is cached, because consecutive blocks are columns of the same expert."""
            nonlocal cached
            with lock:
                if cached.number != number:
                    payload, scales = np.empty(outputs * inputs // 2, np.uint8), np.empty(outputs * groups, np.uint8)
                    read(self.payload, number * payload.size, payload)
                    read(self.scales, number * scales.size, scales)
                    cached = _Expert(number, payload.reshape(outputs, groups, 16), scales.reshape(outputs, groups))
                return cached

        def elements(first: int, into: Bytes) -> None:
            filled, count = 0, len(into) // 2
            while filled < count:
                number, inside = divmod(first + filled, inputs * outputs)
                start, end = inside, min(inside + count - filled, inputs * outputs)
                low, high = start // outputs // _GROUP, -(-end // (outputs * _GROUP))
                values = expert(number).rows(low, high).reshape(-1)[start - low * _GROUP * outputs :][: end - start]
                _store(values, into[2 * filled : 2 * (filled + end - start)])
                filled += end - start

        return elements


@dataclass(frozen=True)
class _Expert:
    """Payload of one expert: ``packed`` [outputs, groups, 16] and ``exponents`` [outputs, groups]."""

    number: int
    packed: NDArray[Any]
    exponents: NDArray[Any]

    def rows(self, low: int, high: int) -> Floats:
        """Return the weights [inputs, outputs] for the inputs of the groups ``low`` to ``high`` (exclusive)."""
        packed = self.packed[:, low:high]
        values = np.empty((*packed.shape[:2], 16, 2), np.float32)
        values[..., 0], values[..., 1] = _FP4[packed & 15], _FP4[packed >> 4]
        exponents = self.exponents[:, low:high].astype(np.int32) - 127
        scaled = np.ldexp(values.reshape(*packed.shape[:2], _GROUP), exponents[..., None])
        return np.ascontiguousarray(scaled.reshape(len(packed), -1).T)


def _decode_fp8(tensors: Table, block: tuple[int, int]) -> dict[str, AnyTensor]:
    decoded: dict[str, AnyTensor] = {}
    for name, payload in tensors.items():
        scales = tensors.get(f"{name}{_SCALE}")
        if name.endswith(_SCALE) and name.removesuffix(_SCALE) in tensors:
            continue
        if scales is None or payload.dtype.code != "F8_E4M3":
            decoded[name] = payload
            continue
        assert isinstance(payload, StoredTensor)
        assert isinstance(scales, StoredTensor)
        grid = tuple(-(-size // step) for size, step in zip(payload.shape, block, strict=False))
        if len(payload.shape) != 2 or scales.shape != grid or scales.dtype.code not in ("F32", "BF16"):
            raise _mismatch(scales, f"{list(grid)} in F32 or BF16, for blocks of {block[0]} x {block[1]}", payload)
        decoded[name] = BlockScaled(name, BF16, payload.shape, payload, scales, block)
    return decoded


def _decode_mxfp4(tensors: Table) -> dict[str, AnyTensor]:
    decoded: dict[str, AnyTensor] = {}
    for name, payload in tensors.items():
        plain = name.removesuffix(_BLOCKS)
        scales = tensors.get(f"{plain}{_SCALES}")
        if name.endswith(_SCALES) and f"{name.removesuffix(_SCALES)}{_BLOCKS}" in tensors:
            continue
        if plain == name or scales is None:
            decoded[name] = payload
            continue
        assert isinstance(payload, StoredTensor)
        assert isinstance(scales, StoredTensor)
        fits = len(payload.shape) == 4 and payload.shape[3] == _GROUP // 2 and scales.shape == payload.shape[:3]
        if not fits or {payload.dtype.code, scales.dtype.code} != {"U8"}:
            raise _mismatch(scales, "[experts, outputs, groups] in U8, and 16 bytes per group", payload)
        experts, outputs, groups, _ = payload.shape
        decoded[plain] = Microscaled(plain, BF16, (experts, groups * _GROUP, outputs), payload, scales)
    return decoded


def _mismatch(scales: StoredTensor, expected: str, payload: StoredTensor) -> InvalidInput:
    return InvalidInput(
        scales.full_name,
        found=f"{list(scales.shape)} in {scales.dtype.code}, for {list(payload.shape)} in {payload.dtype.code}",
        expected=expected,
        remedy="download the checkpoint again",
    )


def _store(values: Floats, into: Bytes) -> None:
    """Round to the nearest bfloat16, ties to even."""
    bits = values.view(np.uint32)
    into.view(np.uint16)[:] = (bits + (np.uint32(0x7FFF) + ((bits >> 16) & np.uint32(1)))) >> np.uint32(16)
