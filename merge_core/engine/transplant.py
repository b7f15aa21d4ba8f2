"""A model with another one's tokenizer: new tables of tokens, and everything else streamed as it is.

Tokens that both tokenizers have keep the model's rows, byte by byte, wherever the donor's ids put them; two tokens are
one where they stand for the same bytes. Rows of the others are made (see ``merge_core.checkpoint.vocabulary``), for
embeddings and head apart. The tables are held in memory, one at a time; nothing else is.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from mergegate.merge_core.architecture import is_embedding, is_head
from mergegate.merge_core.checkpoint import AnyTensor, Checkpoint, StoredTensor, render_header
from mergegate.merge_core.checkpoint.vocabulary import (
    TokenizerDefinition,
    TransplantMethod,
    combined_rows,
    read_tokenizer,
    sparse_combinations,
    token_bytes,
)
from mergegate.merge_core.engine.blocks import open_elements
from mergegate.merge_core.engine.devices import choose_devices
from mergegate.merge_core.engine.engine import MergeRecord, merge_weights
from mergegate.merge_core.engine.writer import shard_disk_errors_refused
from mergegate.merge_core.errors import InvalidInput
from mergegate.merge_core.parsing import open_plain
from mergegate.merge_core.plan import plan_transplant

if TYPE_CHECKING:
    import torch

# New tokens whose rows are made at once: of 100,000 shared tokens the matches then take 100 MB.
_BATCH = 256


@dataclass(frozen=True)
class Transplant:
    """What was made.

    Args:
        record: Of the copy.
        tokens: Of the donor's tokenizer that have a row.
        shared: Of these, those that the model had.
        errors: By table, how far the combinations are from the donor's own rows: root of the mean of
            ``|difference|² / |row|²``; empty where rows are means.
    """

    record: MergeRecord
    tokens: int
    shared: int
    errors: dict[str, float]


def transplant_tokenizer(
    model: Checkpoint,
    donor: Checkpoint,
    out: Path,
    scratch: Path,
    *,
    method: TransplantMethod = "omp",
    k: int = 64,
    device: str = "cpu",
    on_progress: Callable[[int, int], None] | None = None,
) -> Transplant:
    """Write ``model`` with the tokenizer of ``donor`` into ``out``.

    Args:
        model: Whose weights.
        donor: Whose tokenizer; its tables say what its tokens mean.
        out: New or empty directory.
        scratch: A file for the new tables until ``out`` is finished; the caller removes it.
        method: How rows are made of tokens that the model lacks.
        k: Shared tokens in one combination, at most.
        device: Where combinations are computed, as torch writes it.
        on_progress: Told of rows that are made, and of all.

    Raises:
        InvalidInput: No readable tokenizer, tables that cannot be told, no token in common, numbers that are not
            finite, a device that there is not.
    """
    device = choose_devices(device).all[0]
    tokenizers = (_tokenizer(model), _tokenizer(donor))
    tables = _tables(model)
    giving = {name: _given(donor, name, tables) for name in tables}
    size = next(iter(giving.values())).shape[0]
    rows = next(iter(tables.values())).shape[0]
    own, others = (token_bytes(one) for one in tokenizers)
    both = ((number, own[text]) for text, number in others.items() if text in own)
    pairs = sorted((number, row) for number, row in both if number < size and row < rows)
    if not pairs:
        raise InvalidInput(
            str(donor.directory),
            found=f"no token that {model.directory.name} has, too",
            expected="tokens in common: they tie the two spaces together",
        )
    known = np.array(pairs, np.int64).T
    missing = np.setdiff1d(np.array(sorted({n for n in others.values() if n < size}), np.int64), known[0])
    done, total = 0, len(missing) * len(tables)

    def told(count: int) -> None:
        nonlocal done
        done += count
        if on_progress is not None:
            on_progress(done, total)

    errors: dict[str, float] = {}
    placed = _lay_out(tables, size, scratch)
    with shard_disk_errors_refused(scratch), scratch.open("wb") as file:
        file.write(placed[0])
        for name, table in tables.items():
            whole, error = _new_table(table, giving[name], known, missing, method, k, device, told)
            if error is not None:
                errors[name] = error
            file.write(whole.data)
    plan = plan_transplant(model, donor, {tensor.name: tensor for tensor in placed[1]}, tokenizers)
    record = merge_weights(plan, out, device="cpu")
    return Transplant(record, len(known[0]) + len(missing), len(known[0]), errors)


def _new_table(
    table: AnyTensor,
    giving: AnyTensor,
    known: np.ndarray,
    missing: np.ndarray,
    method: TransplantMethod,
    k: int,
    device: str,
    told: Callable[[int], None],
) -> tuple[np.ndarray, float | None]:
    """Bytes of a new table of tokens [rows of the donor, width], and the error of its combinations.

    Args:
        table: The model's [rows, width] (or [rows], a bias).
        giving: The donor's of the same use [rows, its width].
        known: Rows of shared tokens: in the donor, in the model [2, shared].
        missing: Rows of the donor whose tokens the model lacks.
    """
    import torch

    mine = _read(table)
    wide = mine.float() if table.dtype.code != "F64" else mine
    shared = wide[torch.from_numpy(known[1])]
    result = mine.new_zeros((giving.shape[0], *mine.shape[1:]))
    result[:] = shared.mean(0).to(mine.dtype)  # Rows without a token, too: padding that no text asks for.
    result[torch.from_numpy(known[0])] = mine[torch.from_numpy(known[1])]
    error = None
    if method == "omp" and len(mine.shape) == 2 and len(missing):
        theirs = _read(giving).float().to(device)
        atoms, rows = theirs[torch.from_numpy(known[0]).to(device)], shared.float().to(device)
        squares = 0.0
        for first in range(0, len(missing), _BATCH):
            part = torch.from_numpy(missing[first : first + _BATCH])
            wanted = theirs[part.to(device)]
            chosen, weights = sparse_combinations(wanted, atoms, k)
            result[part] = combined_rows(chosen, weights, rows).to("cpu", mine.dtype)
            left = (combined_rows(chosen, weights, atoms) - wanted).norm(dim=1) / wanted.norm(dim=1).clamp_min(1e-30)
            squares += float(left.double().square().sum())
            told(len(part))
        error = float(np.sqrt(squares / len(missing)))
    else:
        told(len(missing))
    stored: np.ndarray = result.contiguous().view(torch.uint8).numpy().reshape(-1)
    return stored, error


def _tables(model: Checkpoint) -> dict[str, AnyTensor]:
    """The model's tables of tokens, each with one row a token."""
    found = {name: one for name, one in model.tensors.items() if is_embedding(name) or is_head(name) or _is_bias(name)}
    embeddings = [name for name in found if is_embedding(name)]
    sizes = {tensor.shape[0] for tensor in found.values() if tensor.shape}
    floating = all(tensor.dtype.kind == "float" for tensor in found.values())
    if len(embeddings) != 1 or len(sizes) != 1 or not floating:
        raise InvalidInput(
            f"{model.directory}: embeddings",
            found=f"{len(embeddings)} tables of {', '.join(map(str, sorted(sizes))) or 'no'} rows",
            expected="one table of embeddings in a floating-point format, and a head of as many rows",
        )
    return found


def _given(donor: Checkpoint, name: str, tables: dict[str, AnyTensor]) -> AnyTensor:
    """The donor's table of the same use; of a bias that it may lack, its embeddings (only their number is asked)."""
    own = _tables(donor)
    embedding = next(one for other, one in own.items() if is_embedding(other))
    if not is_head(name):
        return embedding
    heads = [one for other, one in own.items() if is_head(other)]
    return heads[0] if heads else embedding


def _is_bias(name: str) -> bool:
    return name.endswith("lm_head.bias")


def _lay_out(tables: dict[str, AnyTensor], size: int, file: Path) -> tuple[bytes, list[StoredTensor]]:
    """Header of a file with the new tables, and where each lies in it."""
    shapes = {name: (size, *table.shape[1:]) for name, table in tables.items()}
    nbytes = {name: table.nbytes // table.shape[0] * size for name, table in tables.items()}
    header = render_header([(name, one.dtype.code, shapes[name], nbytes[name]) for name, one in tables.items()], {})
    placed, offset = [], len(header)
    for name, table in tables.items():
        placed.append(StoredTensor(name, file, table.dtype, shapes[name], offset))
        offset += nbytes[name]
    return header, placed


def _read(tensor: AnyTensor) -> torch.Tensor:
    import torch

    content = np.empty(tensor.nbytes, np.uint8)
    with ExitStack() as opened:
        files = {part.file: opened.enter_context(open_plain(part.file)).fileno() for part in tensor.parts}
        open_elements(tensor, files)(0, content)
    values = torch.from_numpy(content).view(getattr(torch, tensor.dtype.torch_name)).reshape(tensor.shape)
    if not bool(torch.isfinite(values).all()):
        raise InvalidInput(
            f"{tensor.parts[0].file}: {tensor.name}",
            found="numbers that are NaN or infinite",
            expected="finite numbers",
        )
    return values


def _tokenizer(checkpoint: Checkpoint) -> TokenizerDefinition:
    found = read_tokenizer(checkpoint.companions)
    if found is None:
        raise InvalidInput(
            str(checkpoint.directory),
            found="no tokenizer.json",
            expected="a readable tokenizer, to match tokens",
            remedy="save its tokenizer as tokenizer.json (a fast tokenizer)",
        )
    return found
