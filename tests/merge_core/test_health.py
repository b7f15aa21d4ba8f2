"""The merge record reports outputs that no healthy network has."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from family import LINEAR, merge_text, random_tensors, save_checkpoint
from hypothesis import given
from hypothesis import strategies as st

from mergegate.merge_core.engine.health import TensorHealth, judge_health, sample_elements

NORM = "model.layers.1.mlp.up_proj.weight"


@pytest.fixture
def pair(tmp_path: Path) -> Path:
    """Two related checkpoints, ``a`` and ``b``."""
    base = random_tensors(0)
    save_checkpoint(tmp_path / "a", base)
    save_checkpoint(tmp_path / "b", random_tensors(1, base))
    return tmp_path


def passthrough(scale: float) -> str:
    """Return a recipe that scales one tensor of ``a``."""
    values = f"{{scale: [{{filter: layers.1.mlp.up_proj, value: {scale}}}, {{value: 1}}]}}"
    return f"merge_method: passthrough\nmodels: [{{model: a, parameters: {values}}}]\n"


@pytest.mark.parametrize("kernels", ["torch", "fused"])
@pytest.mark.parametrize(
    ("scale", "found"), [(0.1, "root mean square"), (30, "root mean square"), (0, "every element is zero")]
)
def test_a_tensor_far_larger_or_smaller_than_its_parents_or_zero_is_a_warning(
    pair: Path, scale: float, found: str, kernels: str
) -> None:
    (finding,) = merge_text(passthrough(scale), pair, kernels=kernels).findings
    assert (finding.severity, finding.where) == ("warn", NORM)
    assert found in finding.found


@pytest.mark.parametrize(
    ("change", "found"),
    [(lambda tensor: tensor + 0.01, []), (torch.zeros_like, []), (torch.neg, [("block", NORM)])],
    ids=["relatives", "zeros of zero parents", "zeros of nonzero parents"],
)
def test_only_zeros_from_nonzero_parents_block_the_merge(
    tmp_path: Path, change: Callable[[torch.Tensor], torch.Tensor], found: list[tuple[str, str]]
) -> None:
    tensors = random_tensors(0)
    own = torch.zeros_like(tensors[NORM]) if change is torch.zeros_like else tensors[NORM]
    save_checkpoint(tmp_path / "a", {**tensors, NORM: own})
    save_checkpoint(tmp_path / "b", {**tensors, NORM: change(tensors[NORM])})
    assert [(one.severity, one.where) for one in merge_text(LINEAR, tmp_path).findings] == found


def test_a_resumed_merge_reports_earlier_findings(pair: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", lambda fd: (_ for _ in ()).throw(OSError(5, "Input/output error")))
        with pytest.raises(Exception, match="Input/output error"):
            merge_text(passthrough(30), pair)
    record = merge_text(passthrough(30), pair)
    assert record.bytes_resumed > 0
    assert [finding.where for finding in record.findings] == [NORM]


def test_unused_tensors_and_a_contradicting_config_are_in_the_record(tmp_path: Path) -> None:
    tensors = random_tensors(0)
    save_checkpoint(tmp_path / "a", tensors, config={"num_hidden_layers": 7})
    save_checkpoint(tmp_path / "b", {**tensors, "extra.weight": torch.ones(3)})
    places = {finding.where for finding in merge_text(LINEAR, tmp_path).findings}
    assert {"b: extra.weight", "a: config.json: num_hidden_layers"} <= places
    assert "the result: config.json: num_hidden_layers" in places


@given(st.integers(0, 60), st.integers(1, 400_000))
def test_samples_do_not_depend_on_where_a_block_starts(start: int, length: int) -> None:
    indices = torch.arange(start * 1000, start * 1000 + length)
    looked_at = sample_elements(indices, start * 1000, 10_000_000).flatten()
    assert ((looked_at % 16384) < 256).all()
    assert len(looked_at) <= length
    assert len(looked_at) >= max(0, (length // 16384 - 1)) * 256


def test_a_broken_tensor_gets_no_finding_about_its_size() -> None:
    (finding,) = judge_health([TensorHealth("x", non_finite=1, zero=False, rms=float("inf"), parents=(1.0,))])
    assert finding.severity == "block"
