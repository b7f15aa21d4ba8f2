"""In DARE and DELLA, random masks are checked in distribution and everything derived from them exactly."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from family import load, merge_text, save_checkpoint

ROWS, COLUMNS = 300, 400


@pytest.fixture
def pair(tmp_path: Path) -> Path:
    """A base and one fine-tune with one large float32 tensor."""
    generator = torch.Generator().manual_seed(5)
    base = torch.randn(ROWS, COLUMNS, generator=generator)
    tuned = base + torch.randn(ROWS, COLUMNS, generator=generator)
    for name, tensor in (("base", base), ("a", tuned)):
        save_checkpoint(tmp_path / name, {"model.embed_tokens.weight": tensor}, config={"num_hidden_layers": 0})
    return tmp_path


def factors(root: Path, method: str, parameters: str, **settings: Any) -> tuple[np.ndarray, np.ndarray]:
    """Return the task vector and the factor that the merge applied to each of its elements."""
    merge_text(
        f"merge_method: {method}\nbase_model: base\nmodels: [{{model: a}}]\nparameters: {{weight: 1, {parameters}}}",
        root,
        **settings,
    )
    base, tuned, merged = (load(root / name)["model.embed_tokens.weight"] for name in ("base", "a", "out"))
    return tuned - base, (merged - base) / (tuned - base)


@pytest.mark.parametrize("kernels", ["torch", "fused"])
@pytest.mark.parametrize("method", ["dare_linear", "dare_ties"])
def test_dare_keeps_the_density_and_restores_the_l1_norm(pair: Path, method: str, kernels: str) -> None:
    delta, factor = factors(pair, method, "density: 0.3", kernels=kernels)
    kept = factor != 0
    assert abs(kept.mean() - 0.3) < 5 * (0.3 * 0.7 / delta.size) ** 0.5
    np.testing.assert_allclose(factor[kept], np.abs(delta).sum() / np.abs(delta[kept]).sum(), rtol=1e-3)
    assert np.abs(delta * factor).sum() == pytest.approx(np.abs(delta).sum(), rel=1e-5)


@pytest.mark.parametrize("kernels", ["torch", "fused"])
@pytest.mark.parametrize(("rescale", "expected"), [("density", 1 / 0.3), ("false", 1.0)])
def test_rescaling_can_follow_the_paper_or_be_off(pair: Path, rescale: str, expected: float, kernels: str) -> None:
    _, factor = factors(pair, "dare_linear", f"density: 0.3, rescale: {rescale}", kernels=kernels)
    np.testing.assert_allclose(factor[factor != 0], expected, rtol=1e-3)


@pytest.mark.parametrize("kernels", ["torch", "fused"])
@pytest.mark.parametrize("method", ["della", "della_linear"])
def test_della_keeps_large_elements_of_a_row_more_often(pair: Path, method: str, kernels: str) -> None:
    delta, factor = factors(pair, method, "density: 0.5, epsilon: 0.3, rescale: false", kernels=kernels)
    kept = factor != 0
    ranks = np.abs(delta).argsort(axis=1).argsort(axis=1)
    for low in range(0, COLUMNS, 50):
        part = (ranks >= low) & (ranks < low + 50)
        expected = 0.2 + 0.6 * ((low + 24.5) / (COLUMNS - 1))
        assert abs(kept[part].mean() - expected) < 5 * (0.25 / part.sum()) ** 0.5


def test_della_refuses_probabilities_outside_their_range(pair: Path) -> None:
    from mergegate.merge_core.errors import InvalidInput

    with pytest.raises(InvalidInput, match=r"density 0\.9 with epsilon 0\.2"):
        factors(pair, "della", "density: 0.9, epsilon: 0.2")


@pytest.mark.parametrize(("density", "kept"), [(0.0, 0.0), (1.0, 1.0)])
@pytest.mark.parametrize("method", ["dare_linear", "della_linear", "ties", "breadcrumbs"])
def test_densities_of_zero_and_one_are_not_random(pair: Path, method: str, density: float, kept: float) -> None:
    _, factor = factors(pair, method, f"density: {density}")
    np.testing.assert_allclose(factor, kept, atol=1e-4)
