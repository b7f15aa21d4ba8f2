"""Approximate the change of a weight by the product of two factors of low rank, and measure the error."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

# Up to this size, a full decomposition takes seconds. Above it, only the strongest directions are computed.
_FULL_DECOMPOSITION = 1024
_OVERSAMPLED, _ITERATIONS = 16, 6


@dataclass(frozen=True)
class LowRankChange:
    """Change of a weight ``Δ``, approximated by ``B @ A``.

    Args:
        a: Factor ``A``, ``[rank, in]``.
        b: Factor ``B``, ``[out, rank]``.
        left_out: Squared norm of ``Δ - B @ A``, with the factors in their final format.
        squared: Squared norm of ``Δ``.
    """

    a: torch.Tensor
    b: torch.Tensor
    left_out: float
    squared: float

    @property
    def error(self) -> float:
        """Norm of ``Δ - B @ A``, divided by the norm of ``Δ``."""
        return math.sqrt(max(self.left_out, 0.0) / self.squared) if self.squared else 0.0


def factor_change(change: torch.Tensor, rank: int, *, epsilon: float = 0.0, dtype: torch.dtype) -> LowRankChange:
    """Approximate a change ``[out, in]`` by the factors ``B = U sqrt(S)`` and ``A = sqrt(S) Vᵀ`` of its SVD.

    Args:
        change: Change of a weight, in float32 or float64.
        rank: Maximum rank.
        epsilon: Limit up to which singular values are dropped, except for the largest.
        dtype: Format of the factors.
    """
    import torch

    max_rank = min(rank, *change.shape)
    if min(change.shape) <= _FULL_DECOMPOSITION or max_rank + _OVERSAMPLED >= min(change.shape):
        u, s, vh = torch.linalg.svd(change, full_matrices=False)
    else:  # Only the strongest directions, by subspace iteration from a fixed start.
        generator = torch.Generator().manual_seed(0)
        start = torch.randn(change.shape[1], max_rank + _OVERSAMPLED, generator=generator, dtype=change.dtype)
        basis = torch.linalg.qr(change @ start)[0]
        for _ in range(_ITERATIONS):
            basis = torch.linalg.qr(change @ torch.linalg.qr(change.T @ basis)[0])[0]
        u, s, vh = torch.linalg.svd(basis.T @ change, full_matrices=False)
        u = basis @ u
    rank = min(max_rank, max(1, int((s > epsilon).sum())))
    root = s[:rank].sqrt()
    a, b = (root[:, None] * vh[:rank]).to(dtype), (u[:, :rank] * root).to(dtype)
    rest = change - b.to(change.dtype) @ a.to(change.dtype)
    return LowRankChange(a, b, float(rest.double().square().sum()), float(change.double().square().sum()))


def factor_sum(
    factors: Sequence[tuple[float, torch.Tensor, torch.Tensor]], rank: int | None, *, dtype: torch.dtype
) -> LowRankChange:
    """Return factors for the sum of ``weight · B @ A`` over ``factors``, which are triples ``(weight, A, B)``.

    With ``rank`` None, the result is exact, and its rank is the sum of the ranks. With a smaller rank, it is truncated.
    The full product is never computed: QR decompositions of the stacked factors reduce it to a core matrix whose size
    is the sum of the ranks. ``dtype`` is the format of the result.
    """
    import torch

    a = torch.cat([weight * factor for weight, factor, _ in factors])
    b = torch.cat([factor for _, _, factor in factors], dim=1)
    core_left, r_left = torch.linalg.qr(b.double())
    core_right, r_right = torch.linalg.qr(a.double().T)
    core = r_left @ r_right.T
    squared = float(core.square().sum())
    if rank is None or rank >= len(a):
        return LowRankChange(a.to(dtype), b.to(dtype), 0.0, squared)
    u, s, vh = torch.linalg.svd(core, full_matrices=False)
    root = s[:rank].sqrt()
    near, far = (core_left @ u[:, :rank] * root).to(dtype), (root[:, None] * (vh[:rank] @ core_right.T)).to(dtype)
    # ‖Δ - BA‖² = ‖Δ‖² - 2⟨Δ, BA⟩ + ‖BA‖², where each term is computed from products of thin factors.
    b_, a_, near_, far_ = b.double(), a.double(), near.double(), far.double()
    shared = float(((b_.T @ near_) * (a_ @ far_.T)).sum())
    own = float(((near_.T @ near_) * (far_ @ far_.T)).sum())
    return LowRankChange(far, near, squared - 2 * shared + own, squared)
