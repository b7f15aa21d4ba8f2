"""Take a small fingerprint of a model's weights, and find out whether two models are related.

A fingerprint contains the first 128 elements of up to 1,024 matrices. It does not depend on file names and shards, and
hardly on the number format. Matrices of independently trained models are uncorrelated. A copy, a fine-tune or a model
with some layers of another one has matrices that correlate with matrices of the other model. mergegate therefore
matches matrices by content instead of by name::

    fingerprint = take_fingerprint(checkpoint.tensors, read)
    (relation,) = compare_fingerprints(fingerprint, [known])     # None if the models are unrelated

The fingerprint has no norms and biases, because unrelated models have similar ones. Unrelated models can also share
tensors with a fixed initialization, such as sinusoidal positions or the decay rates of a Mamba model. Such a tensor
occurs once or is similar in all layers, and similar matrices of one model count as one matrix.
"""

from __future__ import annotations

import base64
import hashlib
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from mergegate.merge_core.checkpoint import AnyTensor, DerivedTensor, ReadStored, numbers, patterns

if TYPE_CHECKING:
    from numpy.typing import NDArray

ELEMENTS = 128
"""Number of elements of a sample."""
MOST_TENSORS = 1024
"""Largest number of samples in a fingerprint."""
_CONCURRENT_READS = 8

# Layers of dense models have at most this many matrices.
_MOST_PER_LAYER = 16
# Smallest correlation of two samples of related matrices. See dev/measurements/ancestry.md. For independent values, 128
# elements have a standard deviation of 0.09, and the largest of a million correlations is about 0.45.
_RELATED = 0.5
# Correlation from which two matrices of one model count as one. It is below the threshold above. So a tensor that is
# similar in all models, and therefore in all layers of each model, counts only once.
_SIMILAR = 0.4
LEAST_SHARE = 0.1
"""Smallest share of related matrices that makes two models related."""
_COUNT = 3  # Smallest number of them, unless they are half of all.
# Share of matrices from which the whole model is related to another one.
_WHOLE = 0.9
# Largest relative distance that rounding to 16 bits can cause.
_ROUNDING = 2.0**-8
# Median absolute deviations in a standard deviation, and the largest value in standard deviations.
_DEVIATION, _CLIP = 1.4826, 1.5
_MOST_EXPONENT = 160  # The exponents of float32 are smaller.
_NUMBER = re.compile(r"(?:^|(?<=[^a-zA-Z0-9]))\d{1,9}(?=[^a-zA-Z0-9]|$)")

RelationKind = Literal["copy", "fine-tune", "prefix", "stack", "part"]
"""``copy``: equal up to rounding. ``fine-tune``: the same layers with other values. ``prefix``: the first layers of a
model with more layers. ``stack``: its layers in another order or number. ``part``: only some matrices are related."""


@dataclass(frozen=True)
class Fingerprint:
    """Samples of the matrices of a model."""

    names: tuple[str, ...]  # names of the tensors, which only determine the layers
    columns: tuple[int, ...]  # size of the last dimension of each tensor
    # Samples in float32, ``[tensors, ELEMENTS]``. Each row is float16 times a power of two.
    values: NDArray[np.float32]
    # Number of layers of the model, also of those without samples. 0 if the names do not tell.
    layers: int

    @property
    def digest(self) -> str:
        """sha256 of the samples in hexadecimal, independent of names and order."""
        rows = sorted(
            column.to_bytes(8, "little") + row.tobytes()
            for column, row in zip(self.columns, self.values.astype("<f4"), strict=True)
        )
        return hashlib.sha256(b"".join(rows)).hexdigest()

    def to_json(self) -> dict[str, Any]:
        """Return the fingerprint as JSON types, without loss."""
        exponents = _exponents(self.values)
        stored = np.ldexp(self.values, -exponents[:, None]).astype("<f2")
        return {
            "layers": self.layers,
            "tensors": [
                [name, columns, int(exponent)]
                for name, columns, exponent in zip(self.names, self.columns, exponents, strict=True)
            ],
            "values": base64.b64encode(stored.tobytes()).decode(),
        }

    @staticmethod
    def from_json(content: Mapping[str, Any]) -> Fingerprint:
        """Return the fingerprint that :meth:`to_json` has written.

        Raises:
            ValueError: The content is not a fingerprint.
        """
        rows = content["tensors"]
        if len(rows) > MOST_TENSORS or not all(
            isinstance(name, str) and type(columns) is int and type(exponent) is int and abs(exponent) < _MOST_EXPONENT
            for name, columns, exponent in rows
        ):
            raise ValueError(f"expected at most {MOST_TENSORS} tensors, each with name, columns and exponent")
        stored = np.frombuffer(base64.b64decode(content["values"], validate=True), "<f2").reshape(len(rows), ELEMENTS)
        exponents = np.array([exponent for _, _, exponent in rows], int).reshape(-1, 1)
        with np.errstate(over="ignore"):
            values = np.ldexp(stored.astype(np.float32), exponents)
        # As in take_fingerprint, no sample is constant, so each has a norm above 0.
        if not np.isfinite(values).all() or not (values != values[:, :1]).any(1).all():
            raise ValueError("expected finite samples, each with different values")
        if type(content["layers"]) is not int:
            raise ValueError("expected a number of layers")
        return Fingerprint(tuple(row[0] for row in rows), tuple(row[1] for row in rows), values, content["layers"])

    @cached_property
    def directions(self) -> NDArray[np.float32]:
        """Samples with mean 0 and length 1, whose inner products are correlations.

        Values are clipped first, because a few columns of large values must not decide the correlation.
        """
        centered = self.values - np.median(self.values, axis=1, keepdims=True)
        scales = _DEVIATION * np.median(np.abs(centered), axis=1, keepdims=True)
        # Most values may be equal, as in a ternary matrix.
        scales = np.where(scales > 0, scales, centered.std(1, keepdims=True))
        clipped = np.clip(centered / np.maximum(scales, np.finfo(np.float32).tiny), -_CLIP, _CLIP)
        clipped -= clipped.mean(1, keepdims=True)
        lengths = np.sqrt((clipped.astype(float) ** 2).sum(1, keepdims=True))
        return np.asarray(clipped / np.maximum(lengths, np.finfo(np.float32).tiny), np.float32)

    @cached_property
    def layer_numbers(self) -> tuple[int | None, ...]:
        return tuple(int(match[0]) if (match := _NUMBER.search(name)) else None for name in self.names)


@dataclass(frozen=True)
class Relation:
    """Relation of a model to another one, measured on the samples."""

    kind: RelationKind  # class of the relation
    share: float  # share of the model's matrices that are related to a matrix of the other model, from 0 to 1
    nearest: float  # share of the model's matrices that are nearer to the other model than to all further models
    # Relative distance ``‖a - b‖ / ‖b‖`` of a related matrix from that of the other model, as the root mean square over
    # all related matrices.
    distance: float
    equal: float  # share of the related matrices that are equal up to rounding, from 0 to 1


def select_tensors(tensors: Iterable[AnyTensor], most: int = MOST_TENSORS) -> tuple[AnyTensor, ...]:
    """Return the tensors to sample: matrices of floats, from each layer the same number at most.

    If a layer has too many, experts of a mixture are left out. With fewer than ``MOST_TENSORS``, the selection depends
    only on the names, so two models with the same layers get the same selection.
    """
    groups: dict[str, list[AnyTensor]] = defaultdict(list)
    for tensor in tensors:
        if tensor.dtype.kind == "float" and len(tensor.shape) > 1 and tensor.numel >= ELEMENTS:
            match = _NUMBER.search(tensor.name)
            groups[tensor.name[: match.end()] if match else ""].append(tensor)
    selected = [
        tensor
        for layer, group in groups.items()
        for tensor in sorted(group, key=lambda item: (len(_NUMBER.findall(item.name)), _natural(item.name)))[
            : _MOST_PER_LAYER if layer else MOST_TENSORS
        ]
    ]
    selected.sort(key=lambda tensor: hashlib.sha256(tensor.name.encode(errors="surrogatepass")).digest())
    return tuple(sorted(selected[:most], key=lambda tensor: _natural(tensor.name)))


def take_fingerprint(tensors: Mapping[str, AnyTensor], read: ReadStored, most: int = MOST_TENSORS) -> Fingerprint:
    """Return the fingerprint of a checkpoint, reading 128 elements of each selected tensor.

    Args:
        tensors: Tensors of the checkpoint by name.
        read: Function that reads elements of a stored tensor, locally or over the network.
        most: Largest number of tensors to sample.

    Raises:
        InvalidInput: A tensor cannot be read.
    """

    def sample(tensor: AnyTensor) -> NDArray[np.float32]:
        stored = np.empty(ELEMENTS * tensor.dtype.size, np.uint8)
        if isinstance(tensor, DerivedTensor):
            tensor.open(read)(0, stored)
        else:
            read(tensor, 0, stored)
        values = numbers(patterns(stored, tensor.dtype), tensor.dtype).astype(np.float32)
        if not np.isfinite(values).all():
            return np.zeros(ELEMENTS, np.float32)
        # Round as an index does, so that it makes no difference where a fingerprint comes from.
        exponent = _exponents(values[None])[0]
        rounded = np.ldexp(values, -exponent).astype(np.float16)
        return np.asarray(np.ldexp(rounded.astype(np.float32), exponent), np.float32)

    selected = select_tensors(tensors.values(), most)
    with ThreadPoolExecutor(_CONCURRENT_READS) as pool:
        samples = list(pool.map(sample, selected))
    # A constant sample says nothing about its model.
    varied = [row for row, values in enumerate(samples) if np.ptp(values) > 0]
    numbered = Counter(match[0] for name in tensors if (match := _NUMBER.search(name)))
    return Fingerprint(
        tuple(selected[row].name for row in varied),
        tuple(selected[row].shape[-1] for row in varied),
        np.array([samples[row] for row in varied], np.float32).reshape(len(varied), ELEMENTS),
        sum(count > 1 for count in numbered.values()),
    )


def compare_fingerprints(
    model: Fingerprint, known_models: Sequence[Fingerprint], rivals: NDArray[np.bool_] | None = None
) -> tuple[Relation | None, ...]:
    """Return the relation of ``model`` to each known model, or None if the two are unrelated.

    For each matrix of the model, the matrix with the highest correlation is found in each known model, among those with
    the same number of columns. A matrix that is equally near to several known models is near to the first.
    ``rivals[i, j]`` tells whether a matrix that is nearer to known model ``j`` is not near to ``i``. Default: always.
    """
    first_similar = _first_similar(model)
    distinct = [row for row, first in enumerate(first_similar) if first == row]
    if not distinct:
        return (None,) * len(known_models)
    matches = [_match(model, other, distinct) for other in known_models]
    # Relative squared distance of each matrix to its match in each known model; infinite without a match.
    distances = np.array([distance for _, distance in matches]).reshape(len(known_models), len(distinct))
    rounded = np.maximum(distances, _ROUNDING**2)
    relations: list[Relation | None] = []
    for index, (other, (partners, squares)) in enumerate(zip(known_models, matches, strict=True)):
        related = np.isfinite(squares)
        count, share = int(related.sum()), float(related.mean())
        if share < LEAST_SHARE or (count < _COUNT and share < 0.5):
            relations.append(None)
            continue
        rows = np.array(distinct)[related]
        distance = float(np.sqrt(squares[related].mean()))
        equal = float((squares[related] <= _ROUNDING**2).mean())
        has_layers = model.layers > 0 and other.layers > 0
        offsets = {
            two - one
            for row, partner in zip(rows, partners[related], strict=True)
            if has_layers and first_similar.count(row) == 1
            if (one := model.layer_numbers[row]) is not None and (two := other.layer_numbers[partner]) is not None
        }
        kind: RelationKind = "fine-tune" if equal < 1 else "copy"
        if share < _WHOLE:
            kind = "part"
        elif offsets and model.layers < other.layers:
            kind = "prefix" if offsets == {0} else "stack"
        elif len(offsets) > 1 or (offsets and model.layers > other.layers):
            kind = "stack"  # A constant offset between models of equal size only numbers the layers from 1.
        compared = rounded if rivals is None else np.where(rivals[index, :, None], rounded, np.inf)
        nearest_share = float((related & (compared.argmin(0) == index)).mean())
        relations.append(Relation(kind, share, nearest_share, distance, equal))
    return tuple(relations)


def _match(
    model: Fingerprint, known_model: Fingerprint, rows: list[int]
) -> tuple[NDArray[np.intp], NDArray[np.float64]]:
    """Return the partner of each of ``rows`` in another model, and the relative squared distance from it."""
    if not known_model.names:
        return np.zeros(len(rows), np.intp), np.full(len(rows), np.inf)
    correlations = _correlations(model, rows, known_model)
    partners = correlations.argmax(1)
    best = correlations[np.arange(len(rows)), partners]
    first, second = model.values[rows].astype(float), known_model.values[partners].astype(float)
    distances = ((first - second) ** 2).sum(1) / (second**2).sum(1)
    return partners, np.where(best >= _RELATED, distances, np.inf)


def _first_similar(model: Fingerprint) -> list[int]:
    """Return for each matrix the first matrix of the model that is similar to it, often the matrix itself."""
    if not model.names:
        return []
    correlations = _correlations(model, list(range(len(model.names))), model)
    np.fill_diagonal(correlations, 1)
    return [int(row) for row in (correlations >= _SIMILAR).argmax(1)]


def _correlations(model: Fingerprint, rows: list[int], target: Fingerprint) -> NDArray[np.float32]:
    """Return the correlation of each row with each matrix of another model; 0 for another number of columns."""
    correlations = model.directions[rows] @ target.directions.T
    correlations[np.not_equal.outer(np.array(model.columns)[rows], np.array(target.columns))] = 0
    return correlations


def _exponents(values: NDArray[np.float32]) -> NDArray[np.intc]:
    """Return for each row the power of two that is just above its largest magnitude."""
    return np.asarray(np.frexp(np.abs(values).max(1, initial=0))[1], np.intc)


def _natural(name: str) -> tuple[tuple[int, str], ...]:
    return tuple((int(part), "") if part.isdecimal() else (-1, part) for part in re.split(r"(\d{1,9})", name))
