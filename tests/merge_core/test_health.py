"""The merge record reports outputs that no healthy network has."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from family import merge_text, random_tensors, save_checkpoint
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
@pytest.mark.parametrize("scale", [0.1, 30])
def test_a_tensor_far_larger_or_smaller_than_its_parents_is_a_warning(pair: Path, scale: float, kernels: str) -> None:
    (finding,) = merge_text(passthrough(scale), pair, kernels=kernels).findings
    assert (finding.severity, finding.where) == ("warn", NORM)
    assert "root mean square" in finding.found


def test_a_merge_of_relatives_is_healthy(pair: Path) -> None:
    assert (
        merge_text("merge_method: linear\nmodels: [{model: a}, {model: b}]\nparameters: {weight: 1}", pair).findings
        == ()
    )


def test_a_tensor_that_the_recipe_scales_to_zero_is_a_warning(pair: Path) -> None:
    (finding,) = merge_text(passthrough(0), pair).findings
    assert (finding.severity, finding.where, finding.found) == ("warn", NORM, "every element is zero")


def test_zeros_from_nonzero_parents_block_the_merge(tmp_path: Path) -> None:
    tensors = random_tensors(0)
    save_checkpoint(tmp_path / "a", tensors)
    save_checkpoint(tmp_path / "b", {**tensors, NORM: -tensors[NORM]})
    text = "merge_method: linear\nmodels: [{model: a}, {model: b}]\nparameters: {weight: 1}"
    (finding,) = merge_text(text, tmp_path).findings
    assert (finding.severity, finding.where) == ("block", NORM)


def test_zeros_from_zero_parents_are_fine(tmp_path: Path) -> None:
    tensors = random_tensors(0)
    for name in "ab":
        save_checkpoint(tmp_path / name, {**tensors, NORM: torch.zeros_like(tensors[NORM])})
    text = "merge_method: linear\nmodels: [{model: a}, {model: b}]\nparameters: {weight: 1}"
    assert merge_text(text, tmp_path).findings == ()


def test_a_resumed_merge_reports_earlier_findings(pair: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import os

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
    text = "merge_method: linear\nmodels: [{model: a}, {model: b}]\nparameters: {weight: 1}"
    places = {finding.where for finding in merge_text(text, tmp_path).findings}
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
