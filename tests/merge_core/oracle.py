"""The merge methods once more: float64, whole tensors, written from the papers' and the peer's formulas.

Nothing here is shared with the product. Each function takes the base (or None) and the models' tensors and the
parameters by their recipe names, and returns the merged tensor.
"""

from __future__ import annotations

import numpy as np

Array = np.ndarray


def linear(base: Array | None, models: list[Array], *, weight: list[float], normalize: bool = True) -> Array:
    total = sum(w * x for w, x in zip(weight, models, strict=True))
    return total / sum(weight) if normalize else total


def slerp(base: Array | None, models: list[Array], *, t: float) -> Array:
    a, b = (models[0], models[1]) if base is None else (base, models[0])
    norms = np.linalg.norm(a) * np.linalg.norm(b)
    dot = float((a * b).sum() / norms) if norms else 0.0
    if abs(dot) > 0.9995:
        return (1 - t) * a + t * b
    theta = np.arccos(dot)
    return (np.sin((1 - t) * theta) * a + np.sin(t * theta) * b) / np.sin(theta)


def keep_largest(delta: Array, density: float) -> Array:
    if density >= 1:
        return delta
    if density <= 0:
        return np.zeros_like(delta)
    k = max(1, int(density * delta.size))
    order = np.argsort(-np.abs(delta), axis=None)[:k]
    kept = np.zeros(delta.size)
    kept[order] = delta.flatten()[order]
    return kept.reshape(delta.shape)


def l1_match(kept: Array, delta: Array) -> Array:
    whole, rest = np.abs(delta).sum(), np.abs(kept).sum()
    return kept * (whole / rest) if min(whole, rest) >= 1e-7 else kept


def mix(
    base: Array,
    deltas: list[Array],
    *,
    weight: list[float],
    consensus: str | None,
    normalize: bool,
    scale: float = 1.0,
) -> Array:
    weighted = np.stack([w * d for w, d in zip(weight, deltas, strict=True)])
    if consensus is None:
        total = weighted.sum(0)
        if normalize and abs(sum(weight)) >= 1e-8:
            total = total / sum(weight)
        return base + scale * total
    votes = weighted if consensus == "sum" else np.sign(weighted)
    sign = np.where(votes.sum(0) >= 0, 1.0, -1.0)
    counts = np.sign(weighted) == sign
    total = (weighted * counts).sum(0)
    if normalize:
        shares = (counts * np.array(weight).reshape(-1, *[1] * base.ndim)).sum(0)
        total = total / np.where(shares == 0, 1.0, shares)
    return base + scale * total


def task_arithmetic(
    base: Array, models: list[Array], *, weight: list[float], normalize: bool = False, scale: float = 1.0
) -> Array:
    return mix(base, [x - base for x in models], weight=weight, consensus=None, normalize=normalize, scale=scale)


def ties(
    base: Array,
    models: list[Array],
    *,
    weight: list[float],
    density: list[float],
    normalize: bool = True,
    scale: float = 1.0,
    consensus: str = "sum",
    rescale: bool = False,
) -> Array:
    deltas = [x - base for x in models]
    kept = [keep_largest(d, p) for d, p in zip(deltas, density, strict=True)]
    if rescale:
        kept = [l1_match(k, d) for k, d in zip(kept, deltas, strict=True)]
    return mix(base, kept, weight=weight, consensus=consensus, normalize=normalize, scale=scale)
