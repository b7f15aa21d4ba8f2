"""Rows for tokens that a model never had, made of rows that it has.

A token that both tokenizers have ties the two models' spaces of embeddings together. A new token's row in the donor is
written as a combination of a few such tokens' rows in the donor; the same combination of *their rows in the model* is
the new row (arXiv:2506.06607). The combination is found by orthogonal matching pursuit: take the row that points most
in the direction of what is left, fit all taken ones by least squares, go on with the rest.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, get_args

if TYPE_CHECKING:
    import torch

TransplantMethod = Literal["omp", "mean"]
METHODS: tuple[str, ...] = get_args(TransplantMethod)
# A remainder below this share of the target is rounding.
_DONE = 1e-6


def sparse_combinations(wanted: torch.Tensor, atoms: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Orthogonal matching pursuit of many targets at once.

    Args:
        wanted: Targets [n, d], float32 or float64.
        atoms: Rows to combine [s, d], in the same format; those of zeros are never taken.
        k: How many atoms at most make one target, from 1.

    Returns:
        Numbers of the atoms [n, k] and coefficients [n, k]; an atom that was not needed has the coefficient 0.
    """
    import torch

    count, width = wanted.shape
    k = max(1, min(k, len(atoms), width))
    lengths = atoms.norm(dim=1)
    directions = atoms / lengths.clamp_min(torch.finfo(atoms.dtype).tiny)[:, None]
    usable = (lengths > 0).to(atoms.dtype)
    chosen = torch.zeros(count, k, dtype=torch.long, device=wanted.device)
    basis = wanted.new_zeros(count, k, width)
    upper = torch.eye(k, dtype=wanted.dtype, device=wanted.device).repeat(count, 1, 1)
    along = wanted.new_zeros(count, k)
    open_atoms = usable.repeat(count, 1)
    left, size = wanted.clone(), wanted.norm(dim=1)
    everyone = torch.arange(count, device=wanted.device)
    for step in range(k):
        match = (left @ directions.T).abs() * open_atoms
        number = match.argmax(dim=1)
        chosen[:, step] = number
        open_atoms[everyone, number] = 0
        atom = directions[number]
        # Twice is enough (Kahan, Parlett): one pass loses orthogonality where atoms are nearly parallel.
        inside = wanted.new_zeros(count, step)
        for _ in range(2):
            part = torch.einsum("nkd,nd->nk", basis[:, :step], atom)
            atom = atom - torch.einsum("nk,nkd->nd", part, basis[:, :step])
            inside = inside + part
        length = atom.norm(dim=1)
        needed = (length > _DONE) & (left.norm(dim=1) > _DONE * size) & (match.amax(dim=1) > 0)
        direction = torch.where(needed[:, None], atom / length.clamp_min(_DONE)[:, None], torch.zeros_like(atom))
        basis[:, step] = direction
        upper[:, :step, step] = torch.where(needed[:, None], inside, torch.zeros_like(inside))
        upper[:, step, step] = torch.where(needed, length, torch.ones_like(length))
        along[:, step] = (left * direction).sum(1)
        left = left - along[:, step, None] * direction
    weights = torch.linalg.solve_triangular(upper, along[:, :, None], upper=True)[:, :, 0]
    return chosen, weights / lengths[chosen].clamp_min(torch.finfo(atoms.dtype).tiny)


def combined_rows(chosen: torch.Tensor, weights: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """The same combinations of other rows.

    Args:
        chosen, weights: From :func:`sparse_combinations`, [n, k].
        rows: What the atoms are in the other space [s, h].

    Returns:
        [n, h].
    """
    import torch

    return torch.einsum("nk,nkh->nh", weights.to(rows.dtype), rows[chosen])
