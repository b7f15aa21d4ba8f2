"""Compute embedding rows for tokens that a model lacks, as combinations of its existing rows.

Tokens of two tokenizers are compared by the bytes that they represent: ``Ġthe`` of a byte-level tokenizer and ``▁the``
of SentencePiece are two spellings of the same token.

A new token comes from a donor model, and tokens that both models have connect their embedding spaces. The donor's row
for the new token is approximated by a combination of the donor's rows for a few shared tokens. The same combination of
*the model's* rows for these tokens is the new row (arXiv:2506.06607). Orthogonal matching pursuit determines the
combination: each step selects the row that is best aligned with the residual, fits all selected rows by least squares,
and updates the residual.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, Literal, get_args

from mergegate.merge_core.checkpoint.vocabulary.definition import TokenizerDefinition

if TYPE_CHECKING:
    import torch

TransplantMethod = Literal["omp", "mean"]
METHODS: tuple[str, ...] = get_args(TransplantMethod)
# A residual below this fraction of the target is rounding error.
_ROUNDING = 1e-6


def token_bytes(tokenizer: TokenizerDefinition) -> dict[bytes, int]:
    """Return the id of every token by the bytes that it represents.

    The key of an added token is its text after a zero byte, which distinguishes it from ordinary tokens. If several
    tokens represent the same bytes, the first one counts.
    """
    types = {*_types(tokenizer.content.get("decoder")), *_types(tokenizer.content.get("pre_tokenizer"))}
    byte_level = "ByteLevel" in types
    # GPT-2's table: printable Latin-1 characters are their own bytes, U+0100 and up are the other bytes.
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    unprintable = [byte for byte in range(256) if byte not in printable]
    table = {chr(byte): byte for byte in printable}
    table |= {chr(0x100 + index): byte for index, byte in enumerate(unprintable)}
    metaspace = not byte_level and any("▁" in token for token in tokenizer.model_ids)
    ids: dict[bytes, int] = {}
    for token, number in tokenizer.ids.items():
        if token in tokenizer.added:
            ids.setdefault(b"\0" + token.encode(), number)
        elif byte_level and all(character in table for character in token):
            ids.setdefault(bytes(table[character] for character in token), number)
        elif metaspace and re.fullmatch("<0x[0-9A-Fa-f]{2}>", token):
            ids.setdefault(bytes([int(token[3:5], 16)]), number)
        elif metaspace:
            ids.setdefault(token.replace("▁", " ").encode(), number)
        else:
            ids.setdefault(token.encode(), number)
    return ids


def _types(part: Any) -> Iterator[str]:
    if isinstance(part, Mapping):
        yield str(part.get("type"))
        for inner in part.values():
            yield from _types(inner)
    elif isinstance(part, list):
        for inner in part:
            yield from _types(inner)


def sparse_combinations(targets: torch.Tensor, atoms: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Approximate many targets by sparse combinations of atoms, with orthogonal matching pursuit.

    Args:
        targets: Rows to approximate, [n, d] in float32 or float64.
        atoms: Rows to combine, [s, d] in the same format. Zero rows are never selected.
        k: Maximum number of atoms per target, at least 1.

    Returns:
        Indices of the selected atoms [n, k], and coefficients [n, k]. An atom that is not needed has the coefficient 0.
    """
    import torch

    count, width = targets.shape
    k = max(1, min(k, len(atoms), width))
    lengths = atoms.norm(dim=1)
    directions = atoms / lengths.clamp_min(torch.finfo(atoms.dtype).tiny)[:, None]
    usable = (lengths > 0).to(atoms.dtype)
    indices = torch.zeros(count, k, dtype=torch.long, device=targets.device)
    basis = targets.new_zeros(count, k, width)
    upper = torch.eye(k, dtype=targets.dtype, device=targets.device).repeat(count, 1, 1)
    along = targets.new_zeros(count, k)
    available = usable.repeat(count, 1)
    residual, size = targets.clone(), targets.norm(dim=1)
    rows = torch.arange(count, device=targets.device)
    for step in range(k):
        match = (residual @ directions.T).abs() * available
        index = match.argmax(dim=1)
        indices[:, step] = index
        available[rows, index] = 0
        atom = directions[index]
        # One pass loses orthogonality if atoms are nearly parallel. Two passes are enough (Kahan, Parlett).
        inside = targets.new_zeros(count, step)
        for _ in range(2):
            part = torch.einsum("nkd,nd->nk", basis[:, :step], atom)
            atom = atom - torch.einsum("nk,nkd->nd", part, basis[:, :step])
            inside = inside + part
        length = atom.norm(dim=1)
        needed = (length > _ROUNDING) & (residual.norm(dim=1) > _ROUNDING * size) & (match.amax(dim=1) > 0)
        direction = torch.where(needed[:, None], atom / length.clamp_min(_ROUNDING)[:, None], torch.zeros_like(atom))
        basis[:, step] = direction
        upper[:, :step, step] = torch.where(needed[:, None], inside, torch.zeros_like(inside))
        upper[:, step, step] = torch.where(needed, length, torch.ones_like(length))
        along[:, step] = (residual * direction).sum(1)
        residual = residual - along[:, step, None] * direction
    weights = torch.linalg.solve_triangular(upper, along[:, :, None], upper=True)[:, :, 0]
    return indices, weights / lengths[indices].clamp_min(torch.finfo(atoms.dtype).tiny)


def combined_rows(indices: torch.Tensor, weights: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """Return [n, h] combinations of ``rows`` [s, h], with the result of :func:`sparse_combinations`."""
    import torch

    return torch.einsum("nk,nkh->nh", weights.to(rows.dtype), rows[indices])
