"""Quantised weights that can be merged: decoded to bfloat16 while they are read, block by block.

Two kinds are published for models of which no other weights are. Everything else that is quantised is refused by name
(see ``plan.consistency``).

``fp8`` in blocks (DeepSeek V3): ``X.weight`` [rows, columns] in F8_E4M3 and ``X.weight_scale_inv``, one factor for each
block of ``weight_block_size`` rows and columns, the last ones cut off where the sizes do not divide.

``mxfp4`` (GPT-OSS; OCP Microscaling Formats 1.0): ``X_blocks`` [experts, outputs, groups, 16] holds two numbers of
4 bits in a byte, the lower half first, and ``X_scales`` [experts, outputs, groups] the power of two of each group of
32, plus 127. The weight that is meant is ``X`` [experts, inputs, outputs].
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from mergegate.merge_core.checkpoint.derived_tensors import AnyTensor, DerivedTensor, ReadElements, ReadStored
from mergegate.merge_core.checkpoint.dtypes import BY_CODE, numbers, patterns
from mergegate.merge_core.checkpoint.safetensors_file import StoredTensor
from mergegate.merge_core.errors import Finding, InvalidInput

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Floats = NDArray[np.float32]
    Bytes = NDArray[np.uint8]

BF16 = BY_CODE["BF16"]
_SCALE = "_scale_inv"
_BLOCKS, _SCALES = "_blocks", "_scales"
_GROUP = 32  # numbers of MXFP4 that share a scale
# E2M1: sign, two bits of exponent, one of mantissa.
_FP4 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)


Table: TypeAlias = Mapping[str, AnyTensor]


def decode_quantised(tensors: Table, config: Mapping[str, Any]) -> tuple[Table, Mapping[str, Any], tuple[Finding, ...]]:
    """Replace payloads that can be decoded by bfloat16 weights.

    Returns:
        Tensors, the config that fits them, and a finding that names the format; the arguments and no finding if there
        is nothing to decode.

    Raises:
        InvalidInput: A payload and its scales that do not fit each other.
    """
    said: Any = config.get("quantization_config")
    if not isinstance(said, Mapping):
        return tensors, config, ()
    method, size = str(said.get("quant_method")), said.get("weight_block_size")
    if method == "mxfp4":
        plain = _mxfp4(tensors)
    elif method == "fp8" and said.get("activation_scheme", "dynamic") == "dynamic" and (block := _block(size)):
        plain = _fp8(tensors, block)
    else:
        return tensors, config, ()
    if not any(isinstance(tensor, DerivedTensor) for tensor in plain.values()):
        return tensors, config, ()
    finding = Finding(
        "warn",
        "config.json: quantization_config",
        found=f"a quantised model ({method}), decoded to bfloat16 while it is read",
        expected="the weights that were trained",
        remedy="nothing to do, unless they are published too: then name those",
    )
    return plain, {key: value for key, value in config.items() if key != "quantization_config"}, (finding,)


@dataclass(frozen=True)
class BlockScaled(DerivedTensor):
    """A matrix of 8-bit numbers with a factor for each block.

    Args:
        payload: [rows, columns], F8_E4M3.
        scales: [rows / block, columns / block], rounded up; F32 or BF16.
        block: Rows and columns that share a factor.
    """

    payload: StoredTensor
    scales: StoredTensor
    block: tuple[int, int]

    @property
    def parts(self) -> tuple[StoredTensor, ...]:
        return self.payload, self.scales

    def identity(self) -> Any:
        return ["fp8", *self.block]

    def open(self, read: ReadStored) -> ReadElements:
        table, (_, width), (high, wide) = _e4m3(), self.shape, self.block
        stored = np.empty(self.scales.nbytes, np.uint8)
        read(self.scales, 0, stored)
        factors = numbers(patterns(stored, self.scales.dtype), self.scales.dtype).reshape(self.scales.shape)

        def elements(first: int, into: Bytes) -> None:
            count = len(into) // 2
            top, bottom = first // width, -(-(first + count) // width)
            payload = np.empty((bottom - top, width), np.uint8)
            read(self.payload, top * width, payload.reshape(-1))
            values = table[payload]
            for row in range(top // high, -(-bottom // high)):
                part = values[max(row * high - top, 0) : (row + 1) * high - top]
                part *= np.repeat(factors[row], wide)[:width]
            _store(values.reshape(-1)[first - top * width :][:count], into)

        return elements


@dataclass(frozen=True)
class Microscaled(DerivedTensor):
    """The matrices of experts in 4-bit numbers with a power of two for each group of 32 inputs.

    Args:
        payload: [experts, outputs, groups, 16], U8.
        scales: [experts, outputs, groups], U8.
    """

    payload: StoredTensor
    scales: StoredTensor

    @property
    def parts(self) -> tuple[StoredTensor, ...]:
        return self.payload, self.scales

    def identity(self) -> Any:
        return ["mxfp4"]

    def open(self, read: ReadStored) -> ReadElements:
        _, inputs, outputs = self.shape
        groups = inputs // _GROUP
        held, lock = _Expert(-1, np.empty(0), np.empty(0)), threading.Lock()

        def expert(number: int) -> _Expert:
            """Its payload: blocks beside each other are of one expert, and each needs a column of every row."""
            nonlocal held
            with lock:
                if held.number != number:
                    payload, scales = np.empty(outputs * inputs // 2, np.uint8), np.empty(outputs * groups, np.uint8)
                    read(self.payload, number * payload.size, payload)
                    read(self.scales, number * scales.size, scales)
                    held = _Expert(number, payload.reshape(outputs, groups, 16), scales.reshape(outputs, groups))
                return held

        def elements(first: int, into: Bytes) -> None:
            done, count = 0, len(into) // 2
            while done < count:
                number, inside = divmod(first + done, inputs * outputs)
                start, end = inside, min(inside + count - done, inputs * outputs)
                low, high = start // outputs // _GROUP, -(-end // (outputs * _GROUP))
                values = expert(number).rows(low, high).reshape(-1)[start - low * _GROUP * outputs :][: end - start]
                _store(values, into[2 * done : 2 * (done + end - start)])
                done += end - start

        return elements


@dataclass(frozen=True)
class _Expert:
    """The payload of one expert: ``packed`` [outputs, groups, 16] and ``exponents`` [outputs, groups]."""

    number: int
    packed: NDArray[Any]
    exponents: NDArray[Any]

    def rows(self, low: int, high: int) -> Floats:
        """The weights [inputs of the groups from ``low`` to ``high``, outputs]."""
        packed = self.packed[:, low:high]
        values = np.empty((*packed.shape[:2], 16, 2), np.float32)
        values[..., 0], values[..., 1] = _FP4[packed & 15], _FP4[packed >> 4]
        exponents = self.exponents[:, low:high].astype(np.int32) - 127
        scaled = np.ldexp(values.reshape(*packed.shape[:2], _GROUP), exponents[..., None])
        return np.ascontiguousarray(scaled.reshape(len(packed), -1).T)


def _block(size: Any) -> tuple[int, int] | None:
    fits = isinstance(size, list) and len(size) == 2 and all(type(one) is int and one > 0 for one in size)
    return (size[0], size[1]) if fits else None


def _fp8(tensors: Table, block: tuple[int, int]) -> dict[str, AnyTensor]:
    found: dict[str, AnyTensor] = {}
    for name, payload in tensors.items():
        scales = tensors.get(f"{name}{_SCALE}")
        if name.endswith(_SCALE) and name.removesuffix(_SCALE) in tensors:
            continue
        if scales is None or payload.dtype.code != "F8_E4M3":
            found[name] = payload
            continue
        assert isinstance(payload, StoredTensor)
        assert isinstance(scales, StoredTensor)
        wanted = tuple(-(-size // step) for size, step in zip(payload.shape, block, strict=False))
        if len(payload.shape) != 2 or scales.shape != wanted or scales.dtype.code not in ("F32", "BF16"):
            raise _misfit(scales, f"{list(wanted)} in F32 or BF16, for blocks of {block[0]} x {block[1]}", payload)
        found[name] = BlockScaled(name, BF16, payload.shape, payload, scales, block)
    return found


def _mxfp4(tensors: Table) -> dict[str, AnyTensor]:
    found: dict[str, AnyTensor] = {}
    for name, payload in tensors.items():
        plain = name.removesuffix(_BLOCKS)
        scales = tensors.get(f"{plain}{_SCALES}")
        if name.endswith(_SCALES) and f"{name.removesuffix(_SCALES)}{_BLOCKS}" in tensors:
            continue
        if plain == name or scales is None:
            found[name] = payload
            continue
        assert isinstance(payload, StoredTensor)
        assert isinstance(scales, StoredTensor)
        fits = len(payload.shape) == 4 and payload.shape[3] == _GROUP // 2 and scales.shape == payload.shape[:3]
        if not fits or {payload.dtype.code, scales.dtype.code} != {"U8"}:
            raise _misfit(scales, "[experts, outputs, groups] in U8, and 16 bytes a group", payload)
        experts, outputs, groups, _ = payload.shape
        found[plain] = Microscaled(plain, BF16, (experts, groups * _GROUP, outputs), payload, scales)
    return found


def _misfit(scales: StoredTensor, expected: str, payload: StoredTensor) -> InvalidInput:
    return InvalidInput(
        f"{scales.file}: {scales.name}",
        found=f"{list(scales.shape)} in {scales.dtype.code}, of {list(payload.shape)} in {payload.dtype.code}",
        expected=expected,
        remedy="download the checkpoint again",
    )


def _e4m3() -> Floats:
    """What each byte of F8_E4M3 means: no infinity, NaN where all bits but the sign are set."""
    codes = np.arange(256)
    exponents, mantissas = (codes >> 3) & 15, codes & 7
    sizes = np.where(exponents == 0, mantissas / 8 * 2.0**-6, (1 + mantissas / 8) * 2.0 ** (exponents - 7.0))
    sizes[(codes & 127) == 127] = np.nan
    return np.where(codes & 128, -sizes, sizes).astype(np.float32)


def _store(values: Floats, into: Bytes) -> None:
    """Round to the nearest bfloat16, to the even one of two."""
    bits = values.view(np.uint32)
    into.view(np.uint16)[:] = (bits + (np.uint32(0x7FFF) + ((bits >> 16) & np.uint32(1)))) >> np.uint32(16)
