"""References for the merge methods: float64, whole tensors, written from the papers and mergekit.

Each function takes the base (or None), the models' tensors, and the parameters by their recipe names.
"""

from __future__ import annotations

import numpy as np

Array = np.ndarray
Arrays = list[Array]
Floats = list[float]


def linear(base: Array | None, models: Arrays, *, weight: Floats, normalize: bool = True) -> Array:
    total = sum(w * x for w, x in zip(weight, models, strict=True))
    return total / sum(weight) if normalize else total


def slerp(base: Array | None, models: Arrays, *, t: float) -> Array:
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
    base: Array, deltas: Arrays, *, weight: Floats, consensus: str | None, normalize: bool, scale: float = 1.0
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
    base: Array, models: Arrays, *, weight: Floats, normalize: bool = False, scale: float = 1.0
) -> Array:
    return mix(base, [x - base for x in models], weight=weight, consensus=None, normalize=normalize, scale=scale)


def ties(
    base: Array, models: Arrays, *, weight: Floats, density: Floats, normalize: bool = True, scale: float = 1.0,
    consensus: str = "sum", rescale: bool = False,
) -> Array:  # fmt: skip
    deltas = [x - base for x in models]
    kept = [keep_largest(d, p) for d, p in zip(deltas, density, strict=True)]
    if rescale:
        kept = [l1_match(k, d) for k, d in zip(kept, deltas, strict=True)]
    return mix(base, kept, weight=weight, consensus=consensus, normalize=normalize, scale=scale)


def localize_and_stitch(
    base: Array, models: Arrays, *, weight: Floats, density: Floats, normalize: bool = True, scale: float = 1.0
) -> Array:
    kept = [keep_largest(x - base, share) for x, share in zip(models, density, strict=True)]
    total = sum(w * one for w, one in zip(weight, kept, strict=True))
    shares = sum(w * (one != 0) for w, one in zip(weight, kept, strict=True))
    return base + scale * (np.divide(total, shares, out=np.zeros_like(base), where=shares != 0) if normalize else total)


def consensus_ta(
    base: Array, models: Arrays, *, weight: Floats, threshold: Floats, agreement: int = 2, scale: float = 1.0
) -> Array:
    vectors = np.stack([w * (x - base) for w, x in zip(weight, models, strict=True)])
    total = vectors.sum(0)
    masks = [abs(v) > limit * abs(total - v) for v, limit in zip(vectors, threshold, strict=True)]
    return base + scale * np.where(np.sum(masks, 0) >= agreement, total, 0)


def median(base: Array, models: Arrays, *, scale: float = 1.0) -> Array:
    return base + scale * np.median([x - base for x in models], 0)


def trimmed_mean(base: Array, models: Arrays, *, left_out: int, scale: float = 1.0) -> Array:
    ordered = np.sort([x - base for x in models], 0)
    return base + scale * ordered[left_out : len(models) - left_out].mean(0)


def slerp_chain(base: Array | None, models: Arrays, *, t: float) -> Array:
    result = models[0]
    for model in models[1:]:
        result = slerp(None, [result, model], t=t)
    return result


def nuslerp(
    base: Array | None, models: Arrays, *, weight: Floats, flatten: bool = True, row_wise: bool = False
) -> Array:
    t = weight[1] / sum(weight) if abs(sum(weight)) >= 1e-6 else 0.5
    vectors = [x - base if base is not None else x for x in models]
    if flatten:
        shaped = [v.reshape(1, -1) for v in vectors]
    else:
        shaped = [np.swapaxes(v, 0, -1) if row_wise else v for v in vectors]
    units = [v / np.maximum(np.linalg.norm(v, axis=-1, keepdims=True), 1e-7) for v in shaped]
    cos = np.clip((units[0] * units[1]).sum(-1, keepdims=True), -1, 1)
    theta = np.arccos(cos)
    with np.errstate(all="ignore"):
        curved = (np.sin((1 - t) * theta) * shaped[0] + np.sin(t * theta) * shaped[1]) / np.sin(theta)
    result = np.where(1 - cos**2 <= 1e-16, (1 - t) * shaped[0] + t * shaped[1], curved)
    if not flatten and row_wise:
        result = np.swapaxes(result, 0, -1)
    result = result.reshape(models[0].shape)
    return result if base is None else base + result


def multislerp(
    base: Array | None, models: Arrays, *, weight: Floats, normalize: bool = True, eps: float = 1e-8
) -> Array:
    if len(models) == 1:
        return models[0]
    vectors = np.stack([(x - base if base is not None else x).flatten() for x in models])
    w = np.array(weight) / (sum(weight) if normalize else 1)
    norms = np.linalg.norm(vectors, axis=1)
    units = vectors / (norms + eps)[:, None]
    mean = w @ units
    if np.linalg.norm(mean) < eps:
        result = w @ vectors
    else:
        mean /= np.linalg.norm(mean)
        tangent = sum(w[i] * (units[i] - (units[i] @ mean) * mean) for i in range(len(models)))
        angle = np.linalg.norm(tangent) + eps
        result = (np.cos(angle) * mean + np.sin(angle) / angle * tangent) * (w @ norms)
    result = result.reshape(models[0].shape)
    return result if base is None else base + result


def karcher(base: Array | None, models: Arrays, *, max_iter: int = 10, tol: float = 1e-5) -> Array:
    vectors = np.stack([x.flatten() for x in models])
    norms = np.linalg.norm(vectors, axis=1)
    units = vectors / norms[:, None]
    alpha = 1 / len(models)
    mean = alpha * units.sum(0)
    mean /= np.linalg.norm(mean)
    for _ in range(max_iter):
        tangent = np.zeros_like(mean)
        for unit in units:
            dot = np.clip(mean @ unit, -1, 1)
            theta = np.arccos(dot)
            if theta >= tol:
                tangent += alpha * theta / np.sin(theta) * (unit - dot * mean)
        length = np.linalg.norm(tangent)
        if length < tol:
            break
        mean = np.cos(length) * mean + np.sin(length) * tangent / length
        mean /= np.linalg.norm(mean)
    return (norms.mean() * mean).reshape(models[0].shape)


def model_stock(base: Array, models: Arrays, *, filter_wise: bool = False) -> Array:
    rows = base.shape[-1] if filter_wise else base.size
    start = base.reshape(-1, rows)
    offsets = [x.reshape(-1, rows) - start for x in models]
    cosines = []
    for i, one in enumerate(offsets):
        for other in offsets[i + 1 :]:
            norms = np.linalg.norm(one, axis=-1) * np.linalg.norm(other, axis=-1)
            cosines.append(np.clip((one * other).sum(-1) / np.maximum(norms, 1e-6), -1, 1))
    cos = np.mean(cosines, axis=0)[:, None]
    t = len(models) * cos / (1 + (len(models) - 1) * cos)
    return (t * np.mean([start + o for o in offsets], axis=0) + (1 - t) * start).reshape(base.shape)


def keep_inner(delta: Array, density: float, gamma: float) -> Array:
    if density >= 1:
        return delta
    size = delta.size
    wanted, top = int(density * size), int(gamma * size)
    bottom = max(0, size - wanted - top)
    order = np.argsort(np.abs(delta), axis=None)[bottom : bottom + wanted]
    kept = np.zeros(size)
    kept[order] = delta.flatten()[order]
    return kept.reshape(delta.shape)


def breadcrumbs(
    base: Array, models: Arrays, *, weight: Floats, density: Floats, gamma: float = 0.01, consensus: str | None = None
) -> Array:
    kept = [keep_inner(x - base, p, gamma) for x, p in zip(models, density, strict=True)]
    return mix(base, kept, weight=weight, consensus=consensus, normalize=False)


def sce(base: Array, models: Arrays, *, select_topk: float = 1.0) -> Array:
    deltas = np.stack([x - base for x in models])
    if select_topk < 1:
        variance = deltas.var(0)
        k = int(np.count_nonzero(variance) * select_topk)
        order = np.argsort(-variance, axis=None)[:k]
        mask = np.zeros(base.size)
        mask[order] = 1
        deltas = deltas * mask.reshape(base.shape)
    sign = np.where(deltas.sum(0) >= 0, 1.0, -1.0)
    agrees = np.sign(deltas) == sign
    squares = np.array([(d**2).mean() for d in deltas])
    share = squares / squares.sum() if squares.sum() >= 1e-6 else np.full(len(models), 1 / len(models))
    share = share.reshape(-1, *[1] * base.ndim)
    return base + (deltas * share * agrees).sum(0) / np.maximum((share * agrees).sum(0), 1e-6)


def ram(
    base: Array, models: Arrays, *, epsilon: float = 1e-5, plus: bool = False, r: float = 0.1, alpha: float = 0.2
) -> Array:
    deltas = np.stack([x - base for x in models])
    changed = np.abs(deltas) > epsilon
    number = changed.sum(0)
    result = base.copy()
    for delta, mine in zip(deltas, changed, strict=True):
        shared, unique = (mine & (number > 1)).sum(), (mine & (number == 1)).sum()
        factor = 1 + r * np.clip(shared / max(unique, epsilon), 0, alpha) if plus else 1.0
        result = result + delta * mine * np.where(number == 1, factor, 1 / np.maximum(number, 1))
    return result


def nearswap(base: Array, models: Arrays, *, t: float) -> Array:
    w = np.clip(t / np.maximum(np.abs(base - models[0]), 1e-6), 0, 1)
    return w * models[0] + (1 - w) * base


def softmax(x: Array) -> Array:
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def arcee_fusion(base: Array, models: Arrays) -> Array:
    x = models[0]
    p, q = softmax(x) + 1e-8, softmax(base) + 1e-8
    importance = np.abs(x - base) * (p * np.log(p / q)).sum(-1, keepdims=True)
    ordered = np.sort(importance, axis=None)
    low, median, high = (ordered[int(np.floor(share * (x.size - 1)))] for share in (0.25, 0.5, 0.75))
    return np.where(importance >= median + 1.5 * (high - low), x, base)
