"""Fingerprints: related models are found whatever was done to their files, and unrelated ones are not."""

from __future__ import annotations

import base64
import itertools
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from safetensors.numpy import save_file
from safetensors.torch import save_file as save_torch_file

from mergegate.merge_core.analysis import Fingerprint, Relation, compare_fingerprints, take_fingerprint
from mergegate.merge_core.checkpoint import StoredTensor, open_checkpoint, read_header, read_into

Weights = Mapping[str, NDArray[np.float32]]
LAYERS, WIDTH, INNER, TOKENS = 6, 48, 80, 64
MATRICES = {"q": (WIDTH, WIDTH), "o": (WIDTH, WIDTH), "up": (INNER, WIDTH), "down": (WIDTH, INNER)}


def random_model(seed: int, layers: int = LAYERS) -> dict[str, NDArray[np.float32]]:
    """Return weights as training leaves them: norms near 1, and a few large columns that all matrices share."""
    rng = np.random.default_rng(seed)
    columns = np.where(np.arange(INNER) % 17 == 3, 6.0, 1.0).astype(np.float32)
    weights = {"embed": rng.standard_normal((TOKENS, WIDTH))}
    for layer in range(layers):
        for name, shape in MATRICES.items():
            weights[f"layers.{layer}.{name}"] = 0.02 * rng.standard_normal(shape) * columns[: shape[1]]
        weights[f"layers.{layer}.norm"] = 1 + 0.05 * rng.standard_normal(WIDTH)
        # Alike in unrelated models, as the decay rates of Mamba.
        weights[f"layers.{layer}.decay"] = np.log(np.tile(np.arange(1.0, 17), (WIDTH, 1)))
    return {name: array.astype(np.float32) for name, array in weights.items()}


def read(tensor: StoredTensor, first: int, into: NDArray[np.uint8]) -> None:
    with tensor.file.open("rb") as file:
        read_into(file.fileno(), into.data, tensor.offset + first * tensor.dtype.size, tensor.file)


Take = Callable[..., Fingerprint]


@pytest.fixture
def take(tmp_path: Path) -> Take:
    numbers = itertools.count()

    def take_from(weights: Weights, shards: int = 1, most: int = 1024) -> Fingerprint:
        tensors: dict[str, StoredTensor] = {}
        for shard in range(shards):
            path = tmp_path / f"{next(numbers)}.safetensors"
            save_file({name: weights[name] for name in list(weights)[shard::shards]}, path)
            tensors |= {tensor.name: tensor for tensor in read_header(path)}
        return take_fingerprint(tensors, read, most)

    return take_from


def related(model: Fingerprint, known_model: Fingerprint) -> Relation:
    (relation,) = compare_fingerprints(model, [known_model])
    assert relation is not None
    return relation


def as_bfloat16(weights: Weights) -> dict[str, NDArray[np.float32]]:
    """Round to 8 bits, as bfloat16 does for normal numbers."""
    parts = {name: np.frexp(array) for name, array in weights.items()}
    return {name: np.ldexp(np.round(m * 256) / 256, power).astype(np.float32) for name, (m, power) in parts.items()}


def with_layers(weights: Weights, sources: list[int]) -> dict[str, NDArray[np.float32]]:
    """Return a model whose layer ``i`` is layer ``sources[i]`` of ``weights``."""
    layers = {
        name.replace(f".{source}.", f".{layer}."): array
        for layer, source in enumerate(sources)
        for name, array in weights.items()
        if name.startswith(f"layers.{source}.")
    }
    return {"embed": weights["embed"], **layers}


def with_noise(weights: Weights, size: float, seed: int = 99) -> dict[str, NDArray[np.float32]]:
    rng = np.random.default_rng(seed)
    return {
        name: array + (size * array.std() * rng.standard_normal(array.shape)).astype(np.float32)
        for name, array in weights.items()
    }


def test_names_shards_and_rounding_do_not_hide_a_copy(take: Take) -> None:
    weights = random_model(1)
    known_model = take(weights)
    renamed = {f"transformer/{hash_name(name)}": array for name, array in weights.items()}
    for copy in (renamed, as_bfloat16(weights), {name: array.astype(np.float16) for name, array in weights.items()}):
        relation = related(take(copy, shards=3), known_model)
        assert (relation.kind, relation.share, relation.equal) == ("copy", 1, 1)
        assert relation.distance < 2**-8


def hash_name(name: str) -> str:
    """Return a name without a number, and in another order."""
    return "".join(chr(ord("a") + int(digit)) if digit.isdigit() else digit for digit in name[::-1])


def test_the_digest_depends_on_the_values_alone(take: Take) -> None:
    weights = random_model(1)
    renamed = {hash_name(name): array for name, array in weights.items()}
    assert take(weights).digest == take(weights, shards=4).digest == take(renamed).digest
    assert take(weights).digest != take(with_noise(weights, 0.01)).digest


@pytest.mark.parametrize("size", [0.01, 0.1, 0.5, 1.0])
def test_the_distance_of_a_fine_tune_is_the_size_of_its_change(take: Take, size: float) -> None:
    """Compare with the root mean square over all elements of all matrices, in float64."""
    weights = random_model(1)
    changed = with_noise(weights, size)
    relation = related(take(changed), take(weights))
    matrices = [name for name in weights if not name.endswith(("norm", "decay"))]
    squares = [((changed[name].astype(float) - weights[name]) ** 2).sum() for name in matrices]
    relative = [
        square / (weights[name].astype(float) ** 2).sum() for square, name in zip(squares, matrices, strict=True)
    ]
    expected = float(np.mean(relative)) ** 0.5
    # A change as large as the weights leaves a correlation of 0.7, so a few matrices are missed.
    assert relation.share == 1 if size < 1 else relation.share > 0.6
    assert relation.kind == "fine-tune" if size < 1 else "part"
    assert relation.distance == pytest.approx(expected, rel=0.15)


def test_an_adapter_leaves_most_matrices_equal(take: Take) -> None:
    weights, rng = random_model(1), np.random.default_rng(5)
    merged = dict(weights)
    for layer in range(LAYERS):
        factors = rng.standard_normal((WIDTH, 4)) @ rng.standard_normal((4, WIDTH))
        merged[f"layers.{layer}.q"] = weights[f"layers.{layer}.q"] + 0.004 * factors.astype(np.float32)
    relation = related(take(merged), take(weights))
    assert (relation.kind, relation.share) == ("fine-tune", 1)
    assert relation.equal == pytest.approx(1 - LAYERS / (4 * LAYERS + 1), abs=0.05)


@pytest.mark.parametrize(
    ("sources", "kind"),
    [
        ([0, 1, 2, 3], "prefix"), ([0, 1, 2], "prefix"), ([2, 3, 4, 5], "stack"), ([0, 1, 2, 3, 2, 3, 4, 5], "stack"),
        ([5, 4, 3, 2, 1, 0], "stack"), ([0, 2, 4], "stack"),
    ],
)  # fmt: skip
def test_models_with_some_layers_are_found(take: Take, sources: list[int], kind: str) -> None:
    weights = random_model(1)
    relation = related(take(with_noise(with_layers(weights, sources), 0.02)), take(weights))
    assert (relation.kind, relation.share) == (kind, 1)


def test_a_model_stacked_from_two_others_is_related_to_both(take: Take) -> None:
    first, second = random_model(1), random_model(2)
    stacked = with_layers(first, [0, 1, 2]) | {
        name.replace(".4.", ".3.").replace(".5.", ".4."): array
        for name, array in second.items()
        if name.startswith(("layers.4", "layers.5"))
    }
    one, two, three = compare_fingerprints(take(stacked), [take(first), take(second), take(random_model(3))])
    assert one is not None
    assert two is not None
    assert (one.kind, two.kind, three) == ("part", "part", None)
    assert one.nearest + two.nearest == pytest.approx(1)


def test_fused_matrices_are_matched_by_their_first_rows(take: Take) -> None:
    weights = random_model(1)
    fused = {name: array for name, array in weights.items() if not name.endswith((".q", ".o"))}
    for layer in range(LAYERS):
        both = [weights[f"layers.{layer}.q"], weights[f"layers.{layer}.o"]]
        fused[f"layers.{layer}.qo"] = np.concatenate(both)
    assert related(take(fused), take(weights)).share == 1
    assert related(take(weights), take(fused)).share == pytest.approx(3 / 4, abs=0.06)


@pytest.mark.story
def test_unrelated_models_of_the_same_shape_are_not_related(take: Take) -> None:
    """No false alarm among 40 models, which all have the same norms, decay rates and outlier columns."""
    fingerprints = [take(random_model(seed)) for seed in range(40)]
    for index, fingerprint in enumerate(fingerprints):
        others = [other for position, other in enumerate(fingerprints) if position != index]
        assert set(compare_fingerprints(fingerprint, others)) == {None}


@pytest.mark.parametrize("size", [0.2, 1.2])
def test_matrices_that_are_alike_in_all_models_do_not_relate_them(take: Take, size: float) -> None:
    """Decay rates that training has moved away from their common initialization."""
    fingerprints = [take(with_noise(random_model(seed), size, seed)) for seed in range(5)]
    for one, two in itertools.permutations(fingerprints, 2):
        assert compare_fingerprints(one, [two]) == (None,)


def test_a_few_samples_suffice(take: Take) -> None:
    weights = random_model(1, layers=30)
    few = take(with_noise(weights, 0.05), most=16)
    assert len(few.names) <= 16
    assert related(few, take(weights)).share == 1
    assert set(few.names) <= set(take(with_noise(weights, 0.05), most=32).names)


def test_json_keeps_every_bit(take: Take) -> None:
    fingerprint = take(
        random_model(1) | {"tiny": np.full((16, 16), 1e-38, np.float32) * np.arange(16, dtype=np.float32)}
    )
    again = Fingerprint.from_json(json.loads(json.dumps(fingerprint.to_json())))
    assert again.digest == fingerprint.digest
    np.testing.assert_array_equal(again.values, fingerprint.values)
    assert (again.names, again.columns, again.layers) == (fingerprint.names, fingerprint.columns, fingerprint.layers)


@pytest.mark.parametrize(("row", "value"), [(0, [0.0] * 128), (1, [np.nan] * 128), (2, [np.inf] + [1.0] * 127)])
def test_samples_that_no_model_has_are_refused(take: Take, row: int, value: list[float]) -> None:
    fingerprint = take(random_model(1))
    content = fingerprint.to_json()
    stored = np.frombuffer(base64.b64decode(content["values"]), "<f2").reshape(-1, 128).copy()
    stored[row] = value
    with pytest.raises(ValueError, match="finite samples"):
        Fingerprint.from_json(content | {"values": base64.b64encode(stored.tobytes()).decode()})
    content["tensors"][0][2] = 150  # beyond float32
    with pytest.raises(ValueError, match="finite samples"):
        Fingerprint.from_json(content)


def test_very_long_numbers_are_not_layers_and_layers_may_be_numbered_from_one(take: Take) -> None:
    weights = random_model(1)
    known = take(weights)
    assert related(take({f"{name}.{'9' * 5000}": values for name, values in weights.items()}), known).share == 1
    renumbered = {
        re.sub(r"\.(\d+)\.", lambda match: f".{int(match[1]) + 1}.", name): array for name, array in weights.items()
    }
    assert renumbered.keys() != weights.keys()
    assert related(take(renumbered), known).kind == "copy"


def test_a_checkpoint_without_matrices_is_related_to_nothing(take: Take) -> None:
    empty = take({"norm": np.ones(64, np.float32), "mask": np.ones((16, 16), np.float32)})
    assert empty.names == ()
    assert compare_fingerprints(empty, [take(random_model(1))]) == (None,)
    assert compare_fingerprints(take(random_model(1)), [empty, replace(empty)]) == (None, None)


DEMO = Path(__file__).resolve().parents[2] / "profiles" / "demo" / "models"


def demo_fingerprint(name: str) -> Fingerprint:
    return take_fingerprint(open_checkpoint(DEMO / name).tensors, read)


@pytest.mark.parametrize(
    ("model", "known_model", "kind"),
    [
        ("bpe-base", "base", "copy"), ("other-tokenizer", "reverser", "copy"), ("reverser", "base", "fine-tune"),
        ("thinker", "base", "fine-tune"), ("embed-garden", "embed-base", "fine-tune"), ("embed-base", "base", None),
        ("reverser", "embed-harbor", None),
    ],
)  # fmt: skip
def test_relations_in_the_demo_family_are_found(model: str, known_model: str, kind: str | None) -> None:
    (relation,) = compare_fingerprints(demo_fingerprint(model), [demo_fingerprint(known_model)])
    assert (relation and relation.kind) == kind


def test_pickled_and_safetensors_files_have_the_same_fingerprint(tmp_path: Path) -> None:
    weights = {name: torch.from_numpy(array) for name, array in random_model(1).items()}
    for name, save in (("pickled", torch.save), ("plain", save_torch_file)):
        directory = tmp_path / name
        directory.mkdir()
        (directory / "config.json").write_text('{"model_type": "llama"}')
        save(weights, directory / ("pytorch_model.bin" if name == "pickled" else "model.safetensors"))
    digests = {take_fingerprint(open_checkpoint(path).tensors, read).digest for path in tmp_path.iterdir()}
    assert len(digests) == 1
