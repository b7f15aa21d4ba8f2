"""A change of a weight as the product of two thin factors, and how much of it is left out."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

# Up to here a whole decomposition takes seconds; above it only the wanted directions are computed.
_WHOLE = 1024
_OVERSAMPLED, _ITERATIONS = 16, 6


@dataclass(frozen=True)
class LowRankChange:
    """A change ``Δ ≈ B @ A``.

    Args:
        a: ``[rank, in]``.
        b: ``[out, rank]``.
        left_out: Squared norm of ``Δ - B @ A``, of the factors as they are kept.
        squared: Squared norm of ``Δ``.
    """

    a: torch.Tensor
    b: torch.Tensor
    left_out: float
    squared: float

    @property
    def error(self) -> float:
        """Norm of what is left out over the norm of the change."""
        return math.sqrt(max(self.left_out, 0.0) / self.squared) if self.squared else 0.0


def factor_change(change: torch.Tensor, rank: int, *, epsilon: float = 0.0, kept_as: torch.dtype) -> LowRankChange:
    """The best factors of a rank for a change ``[out, in]``: ``B = U sqrt(S)``, ``A = sqrt(S) Vᵀ``.

    Args:
        change: float32 or float64.
        rank: The largest that is wanted.
        epsilon: Directions with singular values up to this are left out, but for the strongest.
        kept_as: Format of the factors.
    """
    import torch

    wanted = min(rank, *change.shape)
    if min(change.shape) <= _WHOLE or wanted + _OVERSAMPLED >= min(change.shape):
        u, s, vh = torch.linalg.svd(change, full_matrices=False)
    else:
        u, s, vh = _strongest(change, wanted)
    return _cut(change, u, s, vh, wanted, epsilon, kept_as)


def factor_sum(
    factors: Sequence[tuple[float, torch.Tensor, torch.Tensor]], rank: int | None, *, kept_as: torch.dtype
) -> LowRankChange:
    """Factors of ``Σ weight · B @ A``, given as ``(weight, A, B)``.

    Args:
        factors: At least one.
        rank: The largest that is wanted; None: exact, as many rows as all of them have together.
        kept_as: Format of the factors.

    The product is never made: of the stacked factors, a QR decomposition each leaves a core as small as their ranks.
    """
    import torch

    a = torch.cat([weight * one for weight, one, _ in factors])
    b = torch.cat([one for _, _, one in factors], dim=1)
    core_left, r_left = torch.linalg.qr(b.double())
    core_right, r_right = torch.linalg.qr(a.double().T)
    core = r_left @ r_right.T
    squared = float(core.square().sum())
    if rank is None or rank >= len(a):
        return LowRankChange(a.to(kept_as), b.to(kept_as), 0.0, squared)
    u, s, vh = torch.linalg.svd(core, full_matrices=False)
    root = s[:rank].sqrt()
    near, far = (core_left @ u[:, :rank] * root).to(kept_as), (root[:, None] * (vh[:rank] @ core_right.T)).to(kept_as)
    # ‖Δ - BA‖² = ‖Δ‖² - 2⟨Δ, BA⟩ + ‖BA‖², each from products of thin factors.
    b_, a_, near_, far_ = b.double(), a.double(), near.double(), far.double()
    shared = float(((b_.T @ near_) * (a_ @ far_.T)).sum())
    own = float(((near_.T @ near_) * (far_ @ far_.T)).sum())
    return LowRankChange(far, near, squared - 2 * shared + own, squared)


def _cut(
    change: torch.Tensor,
    u: torch.Tensor,
    s: torch.Tensor,
    vh: torch.Tensor,
    wanted: int,
    epsilon: float,
    kept_as: torch.dtype,
) -> LowRankChange:
    rank = min(wanted, max(1, int((s > epsilon).sum())))
    root = s[:rank].sqrt()
    a, b = (root[:, None] * vh[:rank]).to(kept_as), (u[:, :rank] * root).to(kept_as)
    rest = change - b.to(change.dtype) @ a.to(change.dtype)
    return LowRankChange(a, b, float(rest.double().square().sum()), float(change.double().square().sum()))


def _strongest(change: torch.Tensor, wanted: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The strongest directions, by subspace iteration from a fixed start."""
    import torch

    generator = torch.Generator().manual_seed(0)
    start = torch.randn(change.shape[1], wanted + _OVERSAMPLED, generator=generator, dtype=change.dtype)
    basis = torch.linalg.qr(change @ start)[0]
    for _ in range(_ITERATIONS):
        basis = torch.linalg.qr(change @ torch.linalg.qr(change.T @ basis)[0])[0]
    u, s, vh = torch.linalg.svd(basis.T @ change, full_matrices=False)
    return basis @ u, s, vh
