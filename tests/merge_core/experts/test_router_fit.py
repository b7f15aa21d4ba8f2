"""The router fit, compared with a dense float64 Hessian and a direct solution."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from mergegate.merge_core.architecture.experts import RoutedText, RouterScore, fit_router, routing_error

Array = np.ndarray
SHAPES = ((2, 3, 40), (4, 6, 50), (6, 5, 60))


def family(seed: int, experts: int, width: int, positions: int, *, biases: bool = False) -> tuple[Array, list[Array]]:
    """Return a merged router and, for each of three parents, its inputs and its router; inputs have uneven scales."""
    rng = np.random.default_rng(seed)
    scales = np.exp(rng.normal(size=width))
    routers = [rng.normal(size=(experts, width)) / np.sqrt(width) for _ in range(4)]
    inputs = [rng.normal(size=(positions + 7 * number, width)) * scales for number in range(3)]
    if biases:
        routers = [np.hstack([one, rng.normal(size=(experts, 1))]) for one in routers]
        inputs = [np.hstack([one, np.ones((len(one), 1))]) for one in inputs]
    return routers[0], [*zip(inputs, routers[1:], strict=True)]


def texts_of(parents: list[Array]) -> list[RoutedText]:
    return [RoutedText(torch.from_numpy(inputs), torch.from_numpy(router)) for inputs, router in parents]


def shares(inputs: Array, router: Array, score: RouterScore) -> Array:
    logits = inputs @ router.T
    if score == "sigmoid":
        return 1 / (1 + np.exp(-logits))
    powers = np.exp(logits - logits.max(1, keepdims=True))
    return powers / powers.sum(1, keepdims=True)


def dense_solution(start: Array, parents: list[Array], off_diagonals: float, score: RouterScore) -> tuple[Array, Array]:
    """Form every matrix ``mean of H ⊗ x x'`` and solve for the change; return the solution and the matrix."""
    size = start.size
    matrix, right = np.zeros((size, size)), np.zeros(size)
    for inputs, router in parents:
        own = np.zeros((size, size))
        for p, x in zip(shares(inputs, router, score), inputs, strict=True):
            curvature = np.diag(p) - np.outer(p, p) if score == "softmax" else np.diag(p * (1 - p))
            own += np.kron(curvature, np.outer(x, x)) / len(inputs)
        own = off_diagonals * own + (1 - off_diagonals) * np.diag(np.diag(own))
        matrix += own
        right += own @ router.reshape(-1)
    change = np.linalg.lstsq(matrix, right - matrix @ start.reshape(-1), rcond=1e-13)[0]
    return start + change.reshape(start.shape), matrix


@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
@pytest.mark.parametrize("biases", [False, True])
@pytest.mark.parametrize("off_diagonals", [0.0, 0.9])
@pytest.mark.parametrize("shape", SHAPES)
def test_conjugate_gradients_agree_with_the_direct_solution(
    shape: tuple[int, int, int], off_diagonals: float, biases: bool, score: RouterScore
) -> None:
    start, parents = family(sum(shape), *shape, biases=biases)
    wanted, _ = dense_solution(start, parents, off_diagonals, score)
    fit = fit_router(torch.from_numpy(start), texts_of(parents), off_diagonals=off_diagonals, score=score)
    assert np.abs(fit.router.numpy() - wanted).max() <= 1e-8 * np.abs(wanted).max()
    assert fit.residual <= 1e-10


def test_without_shrinkage_the_routing_agrees_although_the_system_is_singular() -> None:
    """Softmax ignores a row that is added to all rows of a router, so only differences of rows are determined."""
    for seed in range(2):
        start, parents = family(seed, 5, 6, 80)
        wanted, matrix = dense_solution(start, parents, 1.0, "softmax")
        assert np.linalg.matrix_rank(matrix) == 4 * 6
        found = fit_router(torch.from_numpy(start), texts_of(parents), off_diagonals=1.0).router.numpy()
        np.testing.assert_allclose(found - found.mean(0), wanted - wanted.mean(0), rtol=0, atol=1e-8)


def test_a_router_that_all_parents_share_is_found_from_any_start() -> None:
    start, parents = family(1, 6, 8, 100)
    shared = parents[0][1]
    same = [(inputs, shared) for inputs, _ in parents]
    found = fit_router(torch.from_numpy(start), texts_of(same)).router.numpy()
    np.testing.assert_allclose(found, shared, atol=1e-8)
    again = fit_router(torch.from_numpy(shared), texts_of(same))
    assert again.iterations == 0
    np.testing.assert_array_equal(again.router.numpy(), shared)


def test_inputs_that_no_text_reaches_keep_the_merged_router() -> None:
    start, parents = family(2, 4, 6, 60)
    for inputs, _ in parents:
        inputs[:, 3] = 0
    found = fit_router(torch.from_numpy(start), texts_of(parents)).router.numpy()
    np.testing.assert_array_equal(found[:, 3], start[:, 3])
    assert np.abs(found - start)[:, [0, 1, 2, 4, 5]].min() > 0


@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
def test_the_fit_lowers_the_divergence_from_close_parents(score: RouterScore) -> None:
    """Near the parents, the quadratic form is the divergence, so its minimum is below that of the mean router."""
    for seed in range(3):
        rng = np.random.default_rng(seed)
        _, parents = family(seed, 6, 10, 300)
        center = parents[0][1]
        close = [(inputs, center + 0.1 * rng.normal(size=center.shape)) for inputs, _ in parents]
        mean = torch.from_numpy(np.mean([router for _, router in close], axis=0))
        texts = texts_of(close)
        fitted = fit_router(mean, texts, score=score).router
        assert routing_error(fitted, texts, 2, score).divergence < routing_error(mean, texts, 2, score).divergence


@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
def test_the_routing_error_equals_its_definition(score: RouterScore) -> None:
    start, parents = family(4, 6, 8, 50)
    divergences, agreements = [], []
    for inputs, router in parents:
        p, q = shares(inputs, router, score), shares(inputs, start, score)
        both = p * np.log(p / q) + (0 if score == "softmax" else (1 - p) * np.log((1 - p) / (1 - q)))
        divergences.append(both.sum(1).mean())
        wanted, own = (np.argsort(-values, axis=1)[:, :2] for values in (p, q))
        agreements.append(np.mean([len(set(a) & set(b)) / 2 for a, b in zip(wanted, own, strict=True)]))
    found = routing_error(torch.from_numpy(start), texts_of(parents), 2, score)
    assert found.divergence == pytest.approx(np.mean(divergences), rel=1e-10)
    assert found.agreement == pytest.approx(np.mean(agreements))
    texts = texts_of(parents)[:1]
    exact = routing_error(texts[0].router, texts, 2, score)
    assert (exact.divergence, exact.agreement) == (pytest.approx(0, abs=1e-12), 1)
