"""Interference tallies match float64 numpy on whole tensors, however the tensors are read."""

from __future__ import annotations

import itertools
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from family import load, merge_text, random_tensors, save_checkpoint
from hypothesis import given, settings
from hypothesis import strategies as st

import mergegate.merge_core.analysis.interference as interference
from mergegate.merge_core import open_checkpoint
from mergegate.merge_core.analysis.interference import (
    GRAIN,
    NOTICEABLE,
    Interference,
    Tally,
    measure_interference,
    tally_grains,
)
from mergegate.merge_core.architecture.structure import tensor_kind
from mergegate.merge_core.errors import InvalidInput
from mergegate.merge_core.methods.contract import StoredBlock

HALVES = (
    "merge_method: task_arithmetic\nbase_model: base\nmodels: [{model: a}, {model: b}]\nparameters: {weight: 0.5}\n"
)


@pytest.fixture
def merged(family: Path) -> Path:
    merge_text(HALVES, family)
    return family


def measure(root: Path, *names: str, merge: str | None = None) -> Interference:
    origin, *parents = (open_checkpoint(root / name) for name in names)
    return measure_interference(origin, parents, open_checkpoint(root / merge) if merge else None)


def vectors(root: Path, *names: str) -> list[np.ndarray]:
    """Return flat float64 task vectors of the other models, relative to the first of ``names``."""
    origin, *others = (load(root / name) for name in names)
    flat = [np.concatenate([(np.float32(m[n]) - np.float32(origin[n])).ravel() for n in origin]) for m in others]
    return [vector.astype(np.float64) for vector in flat]


def test_lengths_and_angles_match_those_of_whole_vectors(merged: Path) -> None:
    whole = measure(merged, "base", "a", "b", "c", merge="out").network_tally
    a, b, c, own = vectors(merged, "base", "a", "b", "c", "out")
    size = np.linalg.norm(np.concatenate([tensor.ravel() for tensor in load(merged / "base").values()]))
    assert whole.elements == len(a)
    assert [whole.length(i) for i in range(3)] == pytest.approx([np.linalg.norm(v) / size for v in (a, b, c)])
    assert whole.merge_length == pytest.approx(np.linalg.norm(own) / size)
    assert [whole.merge_distance(i) for i in range(3)] == pytest.approx(
        [np.linalg.norm(own - v) / size for v in (a, b, c)]
    )
    for (i, one), (k, other) in itertools.combinations(enumerate((a, b, c)), 2):
        wanted = one @ other / np.linalg.norm(one) / np.linalg.norm(other)
        assert whole.cosine(i, k) == pytest.approx(wanted, abs=1e-9)
        assert whole.cosine(k, i) == whole.cosine(i, k)


def conflict_of(signs: np.ndarray) -> tuple[int, int]:
    moved = (signs != 0).sum(axis=0) >= 2
    return int(moved.sum()), int((moved & (signs.max(axis=0) > 0) & (signs.min(axis=0) < 0)).sum())


def test_sign_conflict_counts_what_two_parents_move_noticeably_and_oppositely(family: Path) -> None:
    found = measure(family, "base", "a", "b", "c")
    base, *parents = (load(family / name) for name in ("base", "a", "b", "c"))
    moved = opposed = 0
    pairs = np.zeros((3, 2), int)
    for name in base:  # Each tensor is smaller than a grain, so a grain's root mean square is the tensor's.
        deltas = np.stack([np.float32(p[name]) - np.float32(base[name]) for p in parents]).reshape(3, -1)
        limits = NOTICEABLE * np.sqrt((deltas.astype(np.float64) ** 2).mean(axis=1, keepdims=True))
        signs = np.where(np.abs(deltas) > limits, np.sign(deltas), 0)
        more = conflict_of(signs)
        moved, opposed = moved + more[0], opposed + more[1]
        for at, pair in enumerate(itertools.combinations(range(3), 2)):
            pairs[at] += conflict_of(signs[list(pair)])
    whole = found.network_tally
    assert (whole.moved, whole.opposed) == (moved, opposed)
    assert whole.conflict == opposed / moved
    assert 0.65 < opposed / moved < 0.8  # By chance, three unrelated task vectors conflict in 3 of 4 weights.
    assert list(zip(whole.pair_moved, whole.pair_opposed, strict=True)) == [tuple(pair) for pair in pairs.tolist()]
    assert whole.pair_conflict(2, 0) == pairs[1, 1] / pairs[1, 0]


def test_groups_are_in_network_order_and_add_up(merged: Path) -> None:
    found = measure(merged, "base", "a", "b", merge="out")
    layer = ["q", "up", "norm"]
    assert [(spot.layer, spot.kind) for spot in found.spots] == [
        (None, "embedding"), *((at, kind) for at in range(3) for kind in layer), (None, "norm"), (None, "head"),
    ]  # fmt: skip
    assert found.skipped == ()
    assert list(found.layers()) == [("model.layers", at) for at in range(3)]
    parts = [spot.tally for spot in found.spots if spot.layer == 1]
    assert found.layers()["model.layers", 1] == parts[0] + parts[1] + parts[2]
    assert Interference.model_validate_json(found.model_dump_json()) == found


def test_equal_models_have_distance_zero_and_no_direction(family: Path) -> None:
    whole = measure(family, "base", "a", "b", merge="a").network_tally
    assert whole.merge_distance(0) == 0.0
    assert whole.merge_length == whole.length(0)
    whole = measure(family, "base", "base", "a").network_tally
    assert (whole.length(0), whole.cosine(0, 1), whole.conflict, whole.pair_conflict(0, 1)) == (0.0, None, None, None)


def test_tensors_that_cannot_be_compared_are_skipped_and_listed(tmp_path: Path) -> None:
    base = random_tensors(0)
    save_checkpoint(tmp_path / "base", base)
    wider = random_tensors(1, tokens=30)
    wider["model.layers.1.mlp.up_proj.weight"][3, 4] = float("nan")
    save_checkpoint(tmp_path / "a", wider)
    del wider["model.norm.weight"]
    save_checkpoint(tmp_path / "b", wider)
    found = measure(tmp_path, "base", "a", "b")
    said = {skipped.reason: (skipped.tensors, skipped.example) for skipped in found.skipped}
    assert said == {
        "of another shape in some model": (2, "lm_head.weight"),
        "not in every model": (1, "model.norm.weight"),
        "NaN or infinities": (1, "model.layers.1.mlp.up_proj.weight"),
    }
    assert {(spot.layer, spot.kind) for spot in found.spots} == {
        (layer, kind) for layer in range(3) for kind in ("q", "up", "norm")
    } - {(1, "up")}


def test_a_merge_with_other_layers_is_not_compared_with_its_parents(tmp_path: Path, family: Path) -> None:
    save_checkpoint(tmp_path / "deeper", random_tensors(9, layers=5))
    found = measure(family, "base", "a", "b", merge="../" + str((tmp_path / "deeper").relative_to(family.parent)))
    assert not found.has_merge
    assert found.network_tally.merge_length is None
    assert found.skipped[0].reason == "the merge has other layers than its parents"


def test_models_without_common_tensors_are_refused(tmp_path: Path) -> None:
    save_checkpoint(tmp_path / "base", random_tensors(0))
    save_checkpoint(
        tmp_path / "a", {f"other.{name}": tensor for name, tensor in random_tensors(1).items()} | {
            "model.embed_tokens.weight": torch.zeros(3, 3)
        },
    )  # fmt: skip
    with pytest.raises(InvalidInput, match="no tensor with the same name and shape"):
        measure(tmp_path, "base", "a")


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_every_format_of_weights_is_read(tmp_path: Path, dtype: torch.dtype) -> None:
    base = random_tensors(0)
    for name, tensors in (("base", base), ("a", random_tensors(1, base)), ("b", random_tensors(2, base))):
        save_checkpoint(tmp_path / name, {key: tensor.to(dtype) for key, tensor in tensors.items()})
    whole = measure(tmp_path, "base", "a", "b").network_tally
    a, b = vectors(tmp_path, "base", "a", "b")
    assert whole.cosine(0, 1) == pytest.approx(a @ b / np.linalg.norm(a) / np.linalg.norm(b), abs=1e-9)


def assert_alike(one: Tally, other: Tally) -> None:
    assert (one.moved, one.opposed, one.pair_moved, one.pair_opposed) == (
        other.moved, other.opposed, other.pair_moved, other.pair_opposed,
    )  # fmt: skip
    assert one.origin == pytest.approx(other.origin, rel=1e-12)
    assert np.asarray(one.gram) == pytest.approx(np.asarray(other.gram), rel=1e-9, abs=1e-12)


@pytest.mark.proof
@given(
    st.integers(1, 3 * 4096 + 700), st.integers(2, 5), st.booleans(), st.booleans(), st.integers(0, 2**32 - 1)
)  # fmt: skip
@settings(max_examples=25)
def test_the_fused_tally_equals_the_numpy_tally(
    length: int, models: int, bf16: bool, with_merge: bool, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    rows = rng.normal(size=(models + with_merge, length)).astype(np.float32)
    rows[1:] = np.where(rng.random(rows[1:].shape) < 0.4, rows[:1], rows[1:])  # Many weights do not move at all.
    data = (rows.view(np.uint32) >> np.uint32(16)).astype(np.uint16) if bf16 else rows
    starts = np.arange(len(rows), dtype=np.int64) * length
    block = StoredBlock(data.ravel(), starts, length, 0, 4096)
    assert_alike(interference._fused_tally(block, models - 1), tally_grains(block, models - 1))


def test_the_sums_do_not_depend_on_the_number_of_threads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wide = {"model.embed_tokens.weight": torch.randn(300, 2048, generator=torch.Generator().manual_seed(1))}
    assert 9 * GRAIN < 300 * 2048
    save_checkpoint(tmp_path / "base", wide)
    save_checkpoint(tmp_path / "a", {name: 1.01 * tensor for name, tensor in wide.items()})
    found = []
    for threads in (1, 4):
        monkeypatch.setattr(interference, "_THREADS", threads)
        monkeypatch.setattr(interference, "_BLOCK_BYTES", 2 * 4 * GRAIN)
        found.append(measure(tmp_path, "base", "a"))
    assert found[0] == found[1]
    assert found[0].network_tally.length(0) == pytest.approx(0.01, rel=1e-4)


@pytest.mark.story
def test_memory_does_not_depend_on_the_size_of_a_tensor(tmp_path: Path) -> None:
    """Three models of 256 MB in one tensor each are measured in a separate process."""
    rows = torch.zeros(32768, 2048, dtype=torch.bfloat16)
    for at, name in enumerate(("base", "a", "b")):
        rows[at] = 1
        save_checkpoint(tmp_path / name, {"model.embed_tokens.weight": rows})
    code = f"""
from pathlib import Path
from mergegate.merge_core import open_checkpoint
from mergegate.merge_core.analysis import measure_interference
import mergegate.merge_core.methods.kernels
def anonymous():
    status = Path("/proc/self/status").read_text()
    return int(status.split("RssAnon:")[1].split()[0])
before, most = anonymous(), 0
def look(done, total):
    global most
    most = max(most, anonymous())
opened = [open_checkpoint(Path({str(tmp_path)!r}) / name) for name in ("base", "a", "b")]
print(measure_interference(opened[0], opened[1:], on_progress=look).network_tally.elements, most - before)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    elements, grown = map(int, done.stdout.split())
    assert elements == 32768 * 2048
    assert grown * 1024 < 200e6


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("model.layers.0.self_attn.q_proj.weight", "q"), ("model.layers.0.self_attn.k_proj.bias", "k"),
        ("model.layers.0.self_attn.q_norm.weight", "norm"), ("model.layers.3.self_attn.o_proj.weight", "o"),
        ("model.layers.3.mlp.gate_up_proj.weight", "gate_up"),
        ("model.layers.3.block_sparse_moe.experts.7.w1.weight", "gate"),
        ("model.layers.3.block_sparse_moe.gate.weight", "other"),
        ("model.layers.3.post_attention_layernorm.weight", "norm"), ("transformer.h.1.attn.c_attn.weight", "qkv"),
        ("transformer.h.1.attn.c_proj.weight", "o"), ("transformer.h.1.mlp.c_proj.weight", "down"),
        ("transformer.h.1.ln_1.weight", "norm"), ("transformer.ln_f.bias", "norm"),
        ("transformer.wte.weight", "embedding"), ("gpt_neox.layers.2.attention.dense.weight", "o"),
        ("gpt_neox.layers.2.mlp.dense_4h_to_h.weight", "down"),
        ("model.decoder.layers.0.self_attn.out_proj.weight", "o"),
        ("bert.encoder.layer.0.attention.self.query.weight", "q"), ("model.embed_tokens.weight", "embedding"),
        ("model.norm.weight", "norm"), ("language_model.lm_head.weight", "head"),
    ],
)  # fmt: skip
def test_the_kind_of_a_tensor_follows_from_its_name(name: str, kind: str) -> None:
    assert tensor_kind(name) == kind
