"""Refit the router of a merged mixture to the routers of its parents by the curvature of their routing (HARC).

A merged router is often wrong even if the experts merge well, because softmax and top-k amplify small changes of its
logits. HARC (Huang et al. 2026, https://arxiv.org/abs/2606.03391) replaces the router of each layer. Parent ``i`` has
the router ``W_i``, and ``x`` are the states that enter the router of the merge while it reads the text of parent ``i``.
Around ``W_i``, the Kullback-Leibler divergence from the routing ``p = softmax(W_i x)`` to that of another router ``W``
is, to second order::

    KL(W_i | W)  ≈  ½ mean over x of  d' H d,        d = (W - W_i) x,    H = diag(p) - p p'

The sum over all parents is least where ``(Σ_i A_i) vec(W) = Σ_i A_i vec(W_i)``, with ``A_i`` the mean of ``H ⊗ x x'``.
The matrix has ``(experts * width)²`` elements, so it is never formed. Conjugate gradients need only its products with
matrices of the router's shape, which two matrix products per text compute.

As in RegMean, the elements of each ``A_i`` off the diagonal are multiplied by ``off_diagonals``. This makes the system
regular: without it, adding one row to all rows of a router changes nothing. The iteration starts at the merged router.
Directions without curvature keep its values.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    import torch

RouterScore = Literal["softmax", "sigmoid"]

_CHUNK = 8192  # rows that are converted to float64 at a time
_TOLERANCE = 1e-10  # residual at which the iteration ends, as a share of that at the start
_MAX_ITERATIONS = 2000


@dataclass(frozen=True)
class RoutedText:
    """States of the merge on the text of one parent, and the router of that parent."""

    inputs: torch.Tensor  # states that enter the router, ``[positions, width]``, in any floating-point format
    # Router of the parent, ``[experts, width]``. For a router with biases, they are its last column, and the last
    # column of ``inputs`` contains ones.
    router: torch.Tensor


@dataclass(frozen=True)
class RouterFit:
    """Solution of one layer."""

    router: torch.Tensor  # the new router, float64 ``[experts, width]``
    iterations: int  # number of iterations of conjugate gradients
    # Norm of the remaining residual, divided by that at the start. 0 if the start was the solution.
    residual: float


@dataclass(frozen=True)
class RoutingError:
    """Difference between the routing of a merge and that of its parents, as means over positions, then over texts."""

    divergence: float  # Kullback-Leibler divergence from the parent's routing to that of the merge, in nats
    agreement: float  # share of the experts that the parent selects that the merge selects too, from 0 to 1


def fit_router(
    start: torch.Tensor,
    texts: Sequence[RoutedText],
    *,
    off_diagonals: float = 0.9,
    score: RouterScore = "softmax",
) -> RouterFit:
    """Return the router that minimizes the curvature-weighted distance to the routers of all parents.

    Args:
        start: Router of the merge, ``[experts, width]``.
        texts: One text per parent. Long and short texts count the same.
        off_diagonals: Factor of the off-diagonal elements of each matrix, from 0 to 1. At 1, the system is singular.
        score: Function that turns logits into routing weights. With ``sigmoid``, each expert has its own weight and
            the curvature is ``diag(p (1 - p))``.
    """
    import torch

    device, shape = start.device, start.shape
    base = start.double()
    # p for all positions: [positions, experts], a small share of the size of the inputs.
    shares = [
        torch.cat([_shares(rows.double() @ text.router.double().T, score) for rows in _chunks(text.inputs)])
        for text in texts
    ]
    diagonals = []
    for text, own in zip(texts, shares, strict=True):
        diagonals.append(torch.zeros(shape, dtype=torch.float64, device=device))
        for rows, part in zip(_chunks(text.inputs), _chunks(own), strict=True):
            diagonals[-1] += (part * (1 - part)).T @ rows.double().square() / len(text.inputs)
    diagonal = torch.stack(diagonals).sum(0)

    def product(matrices: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return ``Σ_i A_i vec(matrices[i])`` in the shape of a router."""
        total = torch.zeros(shape, dtype=torch.float64, device=device)
        for text, own, own_diagonal, matrix in zip(texts, shares, diagonals, matrices, strict=True):
            own_total = torch.zeros_like(total)
            for rows, part in zip(_chunks(text.inputs), _chunks(own), strict=True):
                states = rows.double()
                weighted = part * (states @ matrix.T)
                if score == "softmax":
                    weighted -= part * weighted.sum(1, keepdim=True)
                else:
                    weighted *= 1 - part
                own_total += weighted.T @ states / len(text.inputs)
            total += off_diagonals * own_total + (1 - off_diagonals) * own_diagonal * matrix
        return total

    # Solve for the change. Directions without curvature have no residual and stay at zero.
    residual = product([text.router.double() - base for text in texts])
    inverse = torch.where(diagonal > 0, 1 / diagonal.clamp_min(torch.finfo(torch.float64).tiny), 0.0)
    change, first = torch.zeros_like(base), float(residual.norm())
    preconditioned = inverse * residual
    direction, energy = preconditioned, float((residual * preconditioned).sum())
    iterations, remaining = 0, first
    while first and remaining > _TOLERANCE * first and energy > 0 and iterations < _MAX_ITERATIONS:
        image = product([direction] * len(texts))
        curvature = float((direction * image).sum())
        if curvature <= 0:
            break  # rounding: nothing is left that the texts determine
        step = energy / curvature
        change += step * direction
        residual = residual - step * image
        preconditioned = inverse * residual
        previous, energy = energy, float((residual * preconditioned).sum())
        direction = preconditioned + (energy / previous) * direction
        iterations, remaining = iterations + 1, float(residual.norm())
    return RouterFit(base + change, iterations, remaining / first if first else 0.0)


def routing_error(
    router: torch.Tensor, texts: Sequence[RoutedText], top: int, score: RouterScore = "softmax"
) -> RoutingError:
    """Return how far ``router`` routes the states of ``texts`` from the routers of the parents.

    Args:
        router: Router of the merge, ``[experts, width]``.
        texts: States and router of each parent.
        top: Number of experts that a router selects for each position.
        score: Function that turns logits into routing weights.
    """
    divergences, agreements = [], []
    for text in texts:
        divergence = agreement = 0.0
        for rows in _chunks(text.inputs):
            states = rows.double()
            wanted, own = states @ text.router.double().T, states @ router.double().T
            divergence += float(_divergence(wanted, own, score))
            selected = own.topk(top).indices.unsqueeze(1) == wanted.topk(top).indices.unsqueeze(2)
            agreement += float(selected.any(2).double().mean(1).sum())
        divergences.append(divergence / len(text.inputs))
        agreements.append(agreement / len(text.inputs))
    return RoutingError(sum(divergences) / len(texts), sum(agreements) / len(texts))


def _chunks(rows: torch.Tensor) -> Iterator[torch.Tensor]:
    return (rows[first : first + _CHUNK] for first in range(0, len(rows), _CHUNK))


def _shares(logits: torch.Tensor, score: RouterScore) -> torch.Tensor:
    return logits.softmax(1) if score == "softmax" else logits.sigmoid()


def _divergence(parent_logits: torch.Tensor, logits: torch.Tensor, score: RouterScore) -> torch.Tensor:
    """Return the sum over all positions of the divergence from the routing of a parent to that of the merge.

    Both routings are given as logits, ``[positions, experts]``.
    """
    from torch.nn.functional import logsigmoid

    if score == "softmax":
        logs = parent_logits.log_softmax(1)
        return (logs.exp() * (logs - logits.log_softmax(1))).sum()
    selected = parent_logits.sigmoid() * (logsigmoid(parent_logits) - logsigmoid(logits))
    return (selected + (-parent_logits).sigmoid() * (logsigmoid(-parent_logits) - logsigmoid(-logits))).sum()
