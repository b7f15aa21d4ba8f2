"""Random masks of DARE and DELLA are Philox and right in distribution, and windows for the largest values are small."""

from __future__ import annotations

import tracemalloc
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from family import load, merge_text, save_checkpoint

from mergegate.merge_core.errors import InvalidInput
from mergegate.merge_core.methods import kernels as fused
from mergegate.merge_core.methods.contract import GRAIN, Fold
from mergegate.merge_core.methods.masks import mask_key, mask_words, philox, threshold
from mergegate.merge_core.methods.selection import ScoreFunction, SelectionRequest, guess_windows

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
    models = "base_model: base\nmodels: [{model: a}]"
    merge_text(f"merge_method: {method}\n{models}\nparameters: {{weight: 1, {parameters}}}", root, **settings)
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
    with pytest.raises(InvalidInput, match=r"density 0\.9 with epsilon 0\.2"):
        factors(pair, "della", "density: 0.9, epsilon: 0.2")


@pytest.mark.parametrize(("density", "kept"), [(0.0, 0.0), (1.0, 1.0)])
@pytest.mark.parametrize("method", ["dare_linear", "della_linear", "ties", "breadcrumbs"])
def test_densities_of_zero_and_one_are_not_random(pair: Path, method: str, density: float, kept: float) -> None:
    _, factor = factors(pair, method, f"density: {density}")
    np.testing.assert_allclose(factor, kept, atol=1e-4)


CPU = torch.device("cpu")


# Known answers of philox2x32-10 from the Random123 distribution (kat_vectors).
@pytest.mark.parametrize(
    ("counter", "key", "answer"),
    [
        ((0x00000000, 0x00000000), 0x00000000, (0xFF1DAE59, 0x6CD10DF2)),
        ((0xFFFFFFFF, 0xFFFFFFFF), 0xFFFFFFFF, (0x2C3F628B, 0xAB4FD7AD)),
        ((0x243F6A88, 0x85A308D3), 0x13198A2E, (0xDD7CE038, 0xF62A4C12)),
    ],
)
def test_the_generator_matches_the_published_answers(
    counter: tuple[int, int], key: int, answer: tuple[int, int]
) -> None:
    low, high = philox(torch.tensor([counter[0]]), torch.tensor([counter[1]]), key)
    assert (int(low), int(high)) == answer


@pytest.mark.parametrize("start", [0, 1, 7, 2**32 - 3])
def test_random_words_do_not_depend_on_where_a_block_starts(start: int) -> None:
    key = mask_key(1, "layer", 0)
    whole = mask_words(key, start, 100, CPU)
    parts = [mask_words(key, start + first, count, CPU) for first, count in ((0, 33), (33, 1), (34, 66))]
    assert torch.equal(torch.cat(parts), whole)


def test_the_fused_kernel_draws_the_same_words() -> None:
    key = mask_key(1, "layer", 0)
    for start, count in ((0, 64), (5, 33), (2**33 + 2, 10)):
        out = np.zeros(count + 2, np.uint32)
        fused.mask_words(key[0], key[1], start, count, out)
        assert out[start % 2 :][:count].tolist() == mask_words(key, start, count, CPU).tolist()


def test_seed_tensor_and_model_all_change_the_key() -> None:
    assert len({mask_key(seed, name, model) for seed in (0, 1) for name in "ab" for model in (0, 1)}) == 8


@pytest.mark.parametrize("density", [0.1, 0.5, 0.9])
def test_the_share_of_kept_elements_is_the_density(density: float) -> None:
    count = 200_000
    kept = (mask_words(mask_key(3, "x", 1), 0, count, CPU) < threshold(density)).double()
    # Five standard deviations of a binomial proportion.
    assert abs(float(kept.mean()) - density) < 5 * (density * (1 - density) / count) ** 0.5
    neighbours = float(torch.corrcoef(torch.stack((kept[:-1], kept[1:])))[0, 1])
    assert abs(neighbours) < 5 / count**0.5


# Large enough that a small sample suffices for a guess, as in the largest tensors.
NUMEL = 100 << 20
STREAMS = 3


def begun(requests: Sequence[SelectionRequest]) -> Fold:
    scores = ScoreFunction(lambda block: torch.empty(0), "float32", lambda block: np.empty(0))
    return next(guess_windows(scores, requests, NUMEL))


def draw_parts(fold: Fold, seed: int, scales: Any = 1.0) -> list[Any]:
    generator = np.random.default_rng(seed)
    draws = (generator.standard_normal((STREAMS, GRAIN), np.float32) for _ in range(fold.sample_count))
    return [np.abs(np.float32(scales) * draw).view(np.int32) for draw in draws]


def test_windows_are_guessed_one_stream_at_a_time() -> None:
    """The guess needs only the memory to sort a sample of one stream at a time."""
    requests = [SelectionRequest(stream, k) for stream in range(STREAMS) for k in (NUMEL // 4, NUMEL // 2)]
    fold = begun(requests)
    parts = draw_parts(fold, 0)
    one = fold.sample_count * GRAIN * parts[0].itemsize
    tracemalloc.start()
    try:
        windows = fold.combine(parts)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 2.5 * one, f"{peak / one:.1f} of one stream"
    assert [window.stream for window in windows] == [request.stream for request in requests]


def test_the_window_of_a_request_does_not_depend_on_other_requests() -> None:
    requests = [SelectionRequest(stream, k) for k in (NUMEL // 4, NUMEL // 2) for stream in range(STREAMS)]
    fold = begun(requests)
    parts = draw_parts(fold, 1, [[1.0], [2.0], [3.0]])
    windows = fold.combine(parts)
    assert windows == [window for request in requests for window in begun([request]).combine(parts)]
    assert len(set(windows)) == len(requests)


def test_nan_does_not_stop_the_guess() -> None:
    """NaN is found and refused later, when the full tensor is read."""
    fold = begun([SelectionRequest(0, 1)])
    parts: list[Any] = [np.full((1, GRAIN), 0x7FFFFFFF, np.int32) for _ in range(fold.sample_count)]
    assert len(fold.combine(parts)) == 1
