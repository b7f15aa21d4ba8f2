"""Describe the schemes of the compressed-tensors layout, and check a quantized checkpoint against the merge.

A scheme says how the matrix of a linear layer, ``NAME.weight`` [rows, columns], is stored. All other tensors keep the
bytes of the merge. The quantized weight is ``number · scale``, with one scale for each group of columns:

* ``weight`` (I8 or F8_E4M3) [rows, columns], or ``weight_packed`` (I32) [rows, columns · bits / 32] with unsigned
  numbers, the lowest bits first, and ``weight_shape`` (I64) [2]
* ``weight_scale`` (the float format of the merge) [rows, groups]. A block scheme has one scale per block of rows and
  columns, and a tensor scheme a single one.
* ``input_scale`` [1], if a calibration text determined the scale of the layer's inputs

The checks use numpy only, and no code of llm-compressor or compressed-tensors.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mergegate.merge_core.architecture import is_projection
from mergegate.merge_core.checkpoint import (
    E4M3_VALUES,
    Checkpoint,
    StoredTensor,
    companion_kind,
    numbers,
    open_checkpoint,
    patterns,
)
from mergegate.merge_core.errors import InvalidInput
from mergegate.merge_core.parsing import MAX_DATA_BYTES, read_json, read_plain
from mergegate.tasks.models.checkpoints import deciding_files
from mergegate.tasks.models.checkpoints.hub import element_reader
from mergegate.tasks.quality.serve import Check

Floats = NDArray[np.float32]

_read_elements = element_reader(None)
_BLOCK = 1 << 22  # number of elements that are compared in one step
_AGAIN = "quantize the merge again; if it happens twice, report it to llm-compressor"
# Tolerance of a weight that is rounded to the nearest number, in steps between two numbers. Half a step would be exact.
# llm-compressor divides in the float format of the merge, so bfloat16 adds up to half a step for integers.
_STEPS = 1.25
# Largest error of a row whose weights were chosen with a calibration text, as a share of the row's norm. GPTQ lets
# weights compensate each other's errors, so a weight may be further away than the nearest number.
_SHARE = 0.6


@dataclass(frozen=True)
class Scheme:
    """How a scheme stores matrices, and how the runtime treats the inputs of a layer."""

    name: str  # Name in llm-compressor.
    kind: str = "int"  # Number format of a weight.
    bits: int = 8  # Bits per weight.
    columns: int = 0  # Number of columns that share a scale. 0: all columns of a row.
    rows: int = 1  # Number of rows that share a scale. 0: all rows.
    packed: bool = False  # Whether several numbers are packed into one 32-bit integer.
    # Number format, bits and granularity of the inputs. None: the runtime does not quantize them.
    inputs: tuple[str, int, str] | None = None
    measures_inputs: bool = False  # Whether the scale of the inputs comes from a calibration text.

    @property
    def strategy(self) -> str:
        """Name of the granularity of the scales in ``quantization_config``."""
        if self.rows > 1:
            return "block"
        if self.rows == 0:
            return "tensor"
        return "group" if self.columns else "channel"

    @property
    def can_calibrate(self) -> bool:
        """Whether a calibration text changes the result: GPTQ for integers, or the scales of the inputs."""
        return self.kind == "int" or self.measures_inputs

    def layout_of(self, shape: tuple[int, ...]) -> dict[str, tuple[frozenset[str], tuple[int, ...]]]:
        """Return dtypes and shape of each tensor that stores a matrix of ``shape``, by the last part of its name."""
        rows, columns = shape
        tensors: dict[str, tuple[frozenset[str], tuple[int, ...]]] = {}
        if self.packed:
            tensors["weight_packed"] = frozenset({"I32"}), (rows, math.ceil(columns * self.bits / 32))
            tensors["weight_shape"] = frozenset({"I64"}), (2,)
        else:
            tensors["weight"] = frozenset({"I8" if self.kind == "int" else "F8_E4M3"}), shape
        tensors["weight_scale"] = _FLOATS, self.scale_shape(rows, columns)
        if self.measures_inputs:
            tensors["input_scale"] = _FLOATS, (1,)
        return tensors

    def scale_shape(self, rows: int, columns: int) -> tuple[int, ...]:
        """Return the shape of the scales of a matrix."""
        if self.rows == 0:
            return (1,)
        return math.ceil(rows / self.rows), math.ceil(columns / self.columns) if self.columns else 1


_FLOATS = frozenset({"F32", "F16", "BF16"})
_TOKEN_INT, _TOKEN_FLOAT = ("int", 8, "token"), ("float", 8, "token")
# Schemes that llm-compressor builds on a CPU, that transformers loads, and that vLLM serves.
SCHEMES: Mapping[str, Scheme] = {
    scheme.name: scheme
    for scheme in (
        Scheme("FP8_DYNAMIC", "float", inputs=_TOKEN_FLOAT),
        Scheme("FP8_BLOCK", "float", columns=128, rows=128, inputs=("float", 8, "group")),
        Scheme("FP8", "float", rows=0, inputs=("float", 8, "tensor"), measures_inputs=True),
        Scheme("W8A8", inputs=_TOKEN_INT),
        Scheme("W8A16", columns=128, packed=True),
        Scheme("W4A16", bits=4, columns=128, packed=True),
        Scheme("W4A8", bits=4, columns=128, inputs=_TOKEN_INT),
        Scheme("W4AFP8", bits=4, columns=128, inputs=_TOKEN_FLOAT),
    )
}


@dataclass(frozen=True)
class QuantizedLayers:
    """Matrices that a scheme quantizes, and the modules that it must ignore."""

    matrices: Mapping[str, tuple[int, ...]]  # shape by the name of the tensor, which ends with '.weight'
    ignored: tuple[str, ...]  # modules to name, whose weights keep their format: head, embeddings, routers, ...


def quantized_layers(shapes: Mapping[str, tuple[int, ...]]) -> QuantizedLayers:
    """Select the matrices of attention and feed-forward networks among tensors, by name and shape."""
    matrices = {
        name: shape
        for name, shape in shapes.items()
        if name.endswith(".weight") and len(shape) == 2 and is_projection(name)
    }
    # llm-compressor ignores modules called '…norm' itself.
    modules = (name.removesuffix(".weight") for name in shapes if name.endswith(".weight") and name not in matrices)
    others = sorted(module for module in modules if not module.endswith("norm"))
    # A model with a tied head has no tensor for it, but the module exists.
    return QuantizedLayers(matrices, tuple(dict.fromkeys((*others, "lm_head"))))


def shape_problem(shapes: Mapping[str, tuple[int, ...]], scheme: Scheme, *, calibrated: bool) -> InvalidInput | None:
    """Return why tensors with these shapes cannot be quantized, with the name of one of them, or None if they can."""
    matrices = quantized_layers(shapes).matrices
    if fused := next((name for name, shape in shapes.items() if ".experts." in name and len(shape) == 3), None):
        return InvalidInput(
            fused,
            found="all experts of a layer in one tensor",
            expected="one matrix per expert",
            remedy="publish another format, such as GGUF",
        )
    if calibrated and (expert := next((name for name in matrices if ".experts." in name), None)):
        return InvalidInput(
            expert,
            found="an expert of a mixture, and a calibration text reaches only some experts",
            expected="a model without experts",
            remedy="remove calibration, or select a scheme that needs no text, such as FP8_DYNAMIC",
        )
    if not matrices:
        return InvalidInput(
            next(iter(shapes), ""),
            found="no tensor is the matrix of a linear layer",
            expected="a transformer with layers.N.….weight",
            remedy="publish another format",
        )
    for name, (rows, columns) in matrices.items():
        sizes = [(columns, scheme.columns, "columns")]
        if scheme.rows > 1:  # vLLM requires whole blocks of rows
            sizes.append((rows, scheme.rows, "rows"))
        for size, step, word in sizes:
            if step and size % step:
                per_row = (each for each in SCHEMES.values() if not each.columns and not each.measures_inputs)
                whole = " or ".join(each.name for each in per_row if each.bits == 8)
                return InvalidInput(
                    name,
                    found=f"{size:,} {word}, which {scheme.name} cannot divide into groups of {step}",
                    expected=f"a multiple of {step}",
                    remedy=f"select a scheme with one scale per row: {whole}",
                )
    return None


def shapes_of(checkpoint: Checkpoint) -> dict[str, tuple[int, ...]]:
    """Return the shape of each tensor, by name."""
    return {name: tensor.shape for name, tensor in checkpoint.tensors.items()}


def check_files(directory: Path, merge_directory: Path, scheme: Scheme, *, calibrated: bool) -> tuple[Check, ...]:
    """Check the files of a quantized checkpoint, and compare each dequantized weight with that of the merge.

    ``calibrated`` means that the weights were chosen with a calibration text instead of rounded to the nearest number.
    """
    merge = open_checkpoint(merge_directory)
    checks = [check_configuration(directory, merge_directory, scheme), *check_companions(directory, merge_directory)]
    try:
        variant = open_checkpoint(directory)
    except InvalidInput as error:
        expected = error.expected or "a complete checkpoint"
        return (*checks, Check.failed_check("tensors", error.found, expected, _AGAIN, error.where))
    layout = check_layout(variant, merge, scheme)
    checks.append(layout)
    if layout.outcome == "pass":
        checks += check_values(variant, merge, scheme, calibrated=calibrated)
    return tuple(checks)


def check_configuration(directory: Path, merge_directory: Path, scheme: Scheme) -> Check:
    """Check that ``config.json`` is that of the merge, and that its ``quantization_config`` describes ``scheme``."""
    name, remedy = "configuration", _AGAIN
    try:
        config, original = read_json(directory / "config.json"), read_json(merge_directory / "config.json")
    except InvalidInput as error:
        return Check.failed_check(name, error.found, error.expected or "a JSON object", remedy, error.where)
    settings = config.pop("quantization_config", None)
    if settings is None:
        return Check.failed_check(name, "no quantization_config", scheme.name, remedy, "config.json")
    if config != original:
        field = next(key for key in sorted({*config, *original}) if config.get(key) != original.get(key))
        seen = f"{config.get(field)!r:.80}"
        return Check.failed_check(name, seen, f"{original.get(field)!r:.80}, as in the merge", remedy, field)
    differences = dict(_differences(settings, expected_configuration(scheme)))
    if differences:
        field, (seen, expected) = next(iter(differences.items()))
        return Check.failed_check(name, seen, expected, remedy, f"quantization_config.{field}")
    return Check.passed_check(name, scheme.name, "quantization_config of the scheme, all else as in the merge")


def expected_configuration(scheme: Scheme) -> dict[str, Any]:
    """Return the fields of ``quantization_config`` that determine how a runtime computes with the weights.

    The result calls the only group ``group``. Its name in the file has no meaning.
    """
    weights: dict[str, Any] = {"num_bits": scheme.bits, "type": scheme.kind, "strategy": scheme.strategy}
    weights |= {"symmetric": True, "dynamic": False}
    if scheme.strategy == "group":
        weights["group_size"] = scheme.columns
    if scheme.strategy == "block":
        weights["block_structure"] = [scheme.rows, scheme.columns]
    inputs: dict[str, Any] | None = None
    if scheme.inputs:
        kind, bits, strategy = scheme.inputs
        inputs = {"num_bits": bits, "type": kind, "strategy": strategy, "dynamic": not scheme.measures_inputs}
        inputs["symmetric"] = True
    return {
        "quant_method": "compressed-tensors",
        "quantization_status": "compressed",
        "kv_cache_scheme": None,
        "config_groups": {
            "group": {
                "targets": ["Linear"],
                "weights": weights,
                "input_activations": inputs,
                "output_activations": None,
            }
        },
    }


def _differences(settings: Any, expected: Any, field: str = "") -> Iterator[tuple[str, tuple[str, str]]]:
    """Yield every field of ``expected`` with another value in ``settings``, with both values as text."""
    if not isinstance(expected, Mapping):
        if settings != expected:
            yield field, (f"{settings!r:.80}", repr(expected))
        return
    if not isinstance(settings, Mapping):
        yield field, (f"{settings!r:.80}", "an object")
        return
    if field == "config_groups":
        if len(settings) != 1:
            yield field, (f"{len(settings)} groups", "one group")
            return
        settings = {"group": next(iter(settings.values()))}
    for key, value in expected.items():
        yield from _differences(settings.get(key), value, f"{field}.{key}" if field else key)


def check_companions(directory: Path, merge_directory: Path) -> list[Check]:
    """Check that tokenizer, chat template, generation settings and similar files are those of the merge."""
    kinds: dict[str, list[str]] = {}
    wrong: dict[str, tuple[str, str]] = {}
    for name in sorted({*deciding_files(merge_directory), *deciding_files(directory)}):
        if (kind := companion_kind(name)) is None:
            continue
        kinds.setdefault(kind, []).append(name)
        found, original = directory / name, merge_directory / name
        if not found.is_file():
            wrong.setdefault(kind, (name, "the file is missing"))
        elif not original.is_file():
            wrong.setdefault(kind, (name, "the merge has no such file"))
        elif read_plain(found, MAX_DATA_BYTES) != read_plain(original, MAX_DATA_BYTES):
            wrong.setdefault(kind, (name, "the file differs from that of the merge"))
    return [
        _check(label, f"the {'file' if label in wrong else 'files'} of the merge", wrong.get(label), ", ".join(names))
        for label, names in kinds.items()
    ]


def check_layout(variant: Checkpoint, merge: Checkpoint, scheme: Scheme) -> Check:
    """Check that the quantized checkpoint has exactly the tensors that the scheme makes of those of the merge."""
    name = "tensors"
    matrices = quantized_layers(shapes_of(merge)).matrices
    expected: dict[str, tuple[frozenset[str], tuple[int, ...]]] = {}
    for tensor_name, tensor in merge.tensors.items():
        if tensor_name in matrices:
            module = tensor_name.removesuffix("weight")
            expected |= {module + part: layout for part, layout in scheme.layout_of(tensor.shape).items()}
        else:
            expected[tensor_name] = frozenset({tensor.dtype.code}), tensor.shape
    for tensor_name, (codes, shape) in expected.items():
        stored = variant.tensors.get(tensor_name)
        wanted = f"{' or '.join(sorted(codes))} {list(shape)}"
        if stored is None:
            return Check.failed_check(name, "the tensor is missing", wanted, _AGAIN, tensor_name)
        if stored.dtype.code not in codes or stored.shape != shape:
            seen = f"{stored.dtype.code} {list(stored.shape)}"
            return Check.failed_check(name, seen, wanted, _AGAIN, tensor_name)
    extra = next((tensor_name for tensor_name in variant.tensors if tensor_name not in expected), None)
    if extra is not None:
        seen = "a tensor that neither the scheme nor the merge has"
        return Check.failed_check(name, seen, "only the tensors of the scheme", _AGAIN, extra)
    seen = f"{len(matrices):,} matrices in {scheme.name}, {len(merge.tensors) - len(matrices):,} other tensors"
    return Check.passed_check(name, seen, "the tensors of the scheme and the merge")


def check_values(variant: Checkpoint, merge: Checkpoint, scheme: Scheme, *, calibrated: bool) -> list[Check]:
    """Check that scales are positive, quantized weights close to those of the merge, and all other tensors equal."""
    matrices = quantized_layers(shapes_of(merge)).matrices
    scale_problem: tuple[str, str] | None = None
    weight_problem: tuple[str, str] | None = None
    other_problem: tuple[str, str] | None = None
    scales, error, energy = 0, 0.0, 0.0
    for name, original in merge.tensors.items():
        assert isinstance(original, StoredTensor)
        if name not in matrices:
            stored = _stored(variant, name)
            if not other_problem and not _equal_bytes(original, stored):
                other_problem = name, "the tensor differs from that of the merge"
            continue
        module = name.removesuffix("weight")
        factors = {
            part: _numbers(_stored(variant, module + part))
            for part in scheme.layout_of(original.shape)
            if part.endswith("_scale")
        }
        scales += sum(values.size for values in factors.values())
        for part, values in factors.items():
            if scale_problem is None and (broken := int(np.count_nonzero(~(np.isfinite(values) & (values > 0))))):
                scale_problem = module + part, f"{broken:,} of {values.size:,} scales are zero, negative or NaN"
        if scale_problem:
            continue
        payload = _stored(variant, module + ("weight_packed" if scheme.packed else "weight"))
        for first, weights, values, step in _rows(original, payload, factors["weight_scale"], scheme):
            difference = np.abs(weights - values)
            error += float(np.square(difference, dtype=np.float64).sum())
            energy += float(np.square(weights, dtype=np.float64).sum())
            if weight_problem is None and (seen := _row_problem(weights, values, step, calibrated=calibrated)):
                row, text = seen
                weight_problem = f"{name}, row {first + row}", text
    checks = [_check("scales", "positive numbers", scale_problem, f"{scales:,} scales")]
    if not scale_problem:
        limit = f"at most {_SHARE:.0%} of the norm of a row" if calibrated else "the nearest number of the scheme"
        share = math.sqrt(error / energy) if energy else 0.0
        checks.append(
            _check("weights", limit, weight_problem, f"the difference from the merge is {share:.2%} of its norm")
        )
    others = f"{len(merge.tensors) - len(matrices):,} tensors"
    return [*checks, _check("other tensors", "the bytes of the merge", other_problem, others)]


def _check(name: str, expected: str, problem: tuple[str, str] | None, observation: str) -> Check:
    """Return the failed check of ``problem``, a location and the observation there, or the passed check."""
    if problem is None:
        return Check.passed_check(name, observation, expected)
    location, observation = problem
    return Check.failed_check(name, observation, expected, _AGAIN, location)


def _row_problem(weights: Floats, values: Floats, step: Floats, *, calibrated: bool) -> tuple[int, str] | None:
    """Return the first row that is too far away from the merge, and by how much.

    ``weights`` of the merge, dequantized ``values`` and ``step``, the distance between two neighboring numbers at each
    weight, are [rows, columns].
    """
    difference = np.abs(weights - values)
    if calibrated:
        lengths, errors = np.linalg.norm(weights, axis=1), np.linalg.norm(difference, axis=1)
        far = errors > _SHARE * lengths
        # A row of zeros has no norm. Its weights are zero, or at most one step away.
        far &= (difference > step).any(axis=1)
    else:
        far = ~(difference <= _STEPS * step).all(axis=1)
    if not far.any():
        return None
    row = int(np.argmax(far))
    if calibrated:
        return row, f"the row differs from the merge by {errors[row] / (lengths[row] or 1):.0%} of its norm"
    column = int(np.argmax(~(difference[row] <= _STEPS * step[row])))
    return row, f"the weight {values[row, column]:.6g} instead of {weights[row, column]:.6g} in column {column}"


def _rows(
    original: StoredTensor, payload: StoredTensor, scales: Floats, scheme: Scheme
) -> Iterator[tuple[int, Floats, Floats, Floats]]:
    """Yield blocks of rows: the first row, the merge's weights, the dequantized weights, and the steps between numbers.

    All three arrays have the shape [rows of the block, columns].
    """
    rows, columns = original.shape
    for first in range(0, rows, count := max(1, _BLOCK // columns)):
        last = min(first + count, rows)
        weights = _numbers(original, first, last)
        stored = _read_rows(payload, first, last)
        quantized, gaps = _quantized_numbers(stored.reshape(last - first, -1), columns, scheme)
        if scheme.rows == 0:
            factors = np.broadcast_to(scales.reshape(1, 1), (last - first, columns))
        else:
            of_rows = scales[np.arange(first, last) // scheme.rows]
            factors = np.repeat(of_rows, scheme.columns or columns, axis=1)[:, :columns]
        yield first, weights, quantized * factors, gaps * factors


def _quantized_numbers(row_bytes: NDArray[np.uint8], columns: int, scheme: Scheme) -> tuple[Floats, Floats]:
    """Return the numbers in ``row_bytes`` [rows, bytes], and the distance to their neighbors."""
    if scheme.kind == "float":
        values = E4M3_VALUES[row_bytes]
        # E4M3 has 3 bits of mantissa: between 2^e and 2^(e + 1), numbers are 2^(e - 3) apart, and at least 2^-9.
        _, exponents = np.frexp(values)
        return values, np.ldexp(np.float32(1), np.maximum(exponents - 4, -9)).astype(np.float32)
    integers: NDArray[np.int16]
    if not scheme.packed:
        integers = row_bytes.view(np.int8).astype(np.int16)
    elif scheme.bits == 8:
        integers = (row_bytes.astype(np.int16) - 128)[:, :columns]
    else:
        halves = np.stack((row_bytes & 15, row_bytes >> 4), axis=-1).reshape(len(row_bytes), -1)
        integers = (halves.astype(np.int16) - 8)[:, :columns]
    numbers_ = integers.astype(np.float32)
    return numbers_, np.ones_like(numbers_)


def _stored(checkpoint: Checkpoint, name: str) -> StoredTensor:
    tensor = checkpoint.tensors[name]
    assert isinstance(tensor, StoredTensor)  # a merge and its variant have no computed tensors
    return tensor


def _equal_bytes(first: StoredTensor, second: StoredTensor) -> bool:
    """Compare the bytes of two tensors of one format and shape."""
    for start in range(0, first.numel, _BLOCK):
        count = min(_BLOCK, first.numel - start)
        if not np.array_equal(_elements(first, start, count), _elements(second, start, count)):
            return False
    return True


def _elements(tensor: StoredTensor, first: int, count: int) -> NDArray[np.uint8]:
    """Return the bytes of ``count`` elements, from element ``first``."""
    block = np.empty(count * tensor.dtype.size, np.uint8)
    if count:
        _read_elements(tensor, first, block)
    return block


def _read_rows(tensor: StoredTensor, first: int, last: int) -> NDArray[np.uint8]:
    """Return the bytes of some rows of a matrix."""
    width = tensor.numel // tensor.shape[0] if tensor.shape[0] else 0
    return _elements(tensor, first * width, (last - first) * width)


def _numbers(tensor: StoredTensor, first: int = 0, last: int | None = None) -> Floats:
    """Return the elements of a float tensor, or some of its rows, as float32."""
    last = tensor.shape[0] if last is None else last
    stored = numbers(patterns(_read_rows(tensor, first, last), tensor.dtype), tensor.dtype)
    floats: Floats = stored.astype(np.float32).reshape(last - first, *tensor.shape[1:])
    return floats


def tensor_types(directory: Path) -> dict[str, int]:
    """Return the number of tensors of a checkpoint by their dtype."""
    counts: dict[str, int] = {}
    for tensor in open_checkpoint(directory).stored_tensors():
        counts[tensor.dtype.code] = counts.get(tensor.dtype.code, 0) + 1
    return counts
