"""Write a model with another model's tokenizer: create new token tables, and stream everything else unchanged.

Tokens that both tokenizers have keep the model's rows byte by byte, at the donor's ids. Two tokens are the same if they
stand for the same bytes. Rows of other tokens are computed (see ``merge_core.checkpoint.vocabulary``), separately for
embeddings and head. One table at a time is in memory, and nothing else.
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
from mergegate.merge_core.engine.writer import refuse_disk_errors
from mergegate.merge_core.errors import InvalidInput
from mergegate.merge_core.parsing import open_plain
from mergegate.merge_core.plan import plan_transplant

if TYPE_CHECKING:
    import torch

# New tokens whose rows are computed together. With 100,000 shared tokens, the matches then take 100 MB.
_BATCH_TOKENS = 256


@dataclass(frozen=True)
class Transplant:
    """The outcome of a transplant.

    Args:
        record: Record of the merge that copies the model.
        tokens: Number of the donor's tokens that have a row.
        shared: Number of these tokens that the model has too.
        errors: Error of the combinations relative to the donor's own rows, by table: square root of the mean of
            ``|difference|² / |row|²``. Empty if rows are means.
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
        model: Model that provides the weights.
        donor: Model that provides the tokenizer. Its tables define the meaning of its tokens.
        out: New or empty directory.
        scratch: File for the new tables until ``out`` is finished. The caller removes it.
        method: Method that computes rows of tokens that the model lacks.
        k: Maximum number of shared tokens in one combination.
        device: Device that computes combinations, in torch's notation.
        on_progress: Function called with the number of computed rows and of all rows to compute.

    Raises:
        InvalidInput: A tokenizer is missing or unreadable, the tables are ambiguous, the tokenizers have no token in
            common, a table has NaN or infinity, or the device does not exist.
    """
    device = choose_devices(device).all[0]
    tokenizers = (_require_tokenizer(model), _require_tokenizer(donor))
    tables = _token_tables(model)
    donor_tables = {name: _counterpart(donor, name, tables) for name in tables}
    size = next(iter(donor_tables.values())).shape[0]
    rows = next(iter(tables.values())).shape[0]
    model_ids, donor_ids = (token_bytes(definition) for definition in tokenizers)
    shared = ((number, model_ids[text]) for text, number in donor_ids.items() if text in model_ids)
    pairs = sorted((number, row) for number, row in shared if number < size and row < rows)
    if not pairs:
        raise InvalidInput(
            str(donor.directory),
            found=f"no token that {model.directory.name} has, too",
            expected="tokens in common: they tie the two spaces together",
        )
    shared_rows = np.array(pairs, np.int64).T
    missing = np.setdiff1d(np.array(sorted({n for n in donor_ids.values() if n < size}), np.int64), shared_rows[0])
    done, total = 0, len(missing) * len(tables)

    def report(count: int) -> None:
        nonlocal done
        done += count
        if on_progress is not None:
            on_progress(done, total)

    errors: dict[str, float] = {}
    layout = _lay_out(tables, size, scratch)
    with refuse_disk_errors(scratch), scratch.open("wb") as file:
        file.write(layout[0])
        for name, table in tables.items():
            content, error = _new_table(table, donor_tables[name], shared_rows, missing, method, k, device, report)
            if error is not None:
                errors[name] = error
            file.write(content.data)
    plan = plan_transplant(model, donor, {tensor.name: tensor for tensor in layout[1]}, tokenizers)
    record = merge_weights(plan, out, device="cpu")
    return Transplant(record, len(shared_rows[0]) + len(missing), len(shared_rows[0]), errors)


def _new_table(
    table: AnyTensor,
    donor_table: AnyTensor,
    shared_rows: np.ndarray,
    missing: np.ndarray,
    method: TransplantMethod,
    k: int,
    device: str,
    report: Callable[[int], None],
) -> tuple[np.ndarray, float | None]:
    """Return the bytes of a new token table [donor's rows, width], and the error of its combinations.

    Args:
        table: The model's table [rows, width], or a bias [rows].
        donor_table: The donor's table for the same purpose [rows, its width].
        shared_rows: Rows of shared tokens, in the donor and in the model [2, shared].
        missing: Rows of the donor whose tokens the model lacks.
    """
    import torch

    model_rows = _read_tensor(table)
    wide = model_rows.float() if table.dtype.code != "F64" else model_rows
    shared = wide[torch.from_numpy(shared_rows[1])]
    result = model_rows.new_zeros((donor_table.shape[0], *model_rows.shape[1:]))
    result[:] = shared.mean(0).to(model_rows.dtype)  # This includes padding rows, which no text uses.
    result[torch.from_numpy(shared_rows[0])] = model_rows[torch.from_numpy(shared_rows[1])]
    error = None
    if method == "omp" and len(model_rows.shape) == 2 and len(missing):
        donor_rows = _read_tensor(donor_table).float().to(device)
        atoms, rows = donor_rows[torch.from_numpy(shared_rows[0]).to(device)], shared.float().to(device)
        squares = 0.0
        for first in range(0, len(missing), _BATCH_TOKENS):
            part = torch.from_numpy(missing[first : first + _BATCH_TOKENS])
            targets = donor_rows[part.to(device)]
            chosen, weights = sparse_combinations(targets, atoms, k)
            result[part] = combined_rows(chosen, weights, rows).to("cpu", model_rows.dtype)
            difference = combined_rows(chosen, weights, atoms) - targets
            errors = difference.norm(dim=1) / targets.norm(dim=1).clamp_min(1e-30)
            squares += float(errors.double().square().sum())
            report(len(part))
        error = float(np.sqrt(squares / len(missing)))
    else:
        report(len(missing))
    stored: np.ndarray = result.contiguous().view(torch.uint8).numpy().reshape(-1)
    return stored, error


def _token_tables(model: Checkpoint) -> dict[str, AnyTensor]:
    """Return the model's token tables, each with one row per token."""
    tables = {
        name: tensor for name, tensor in model.tensors.items() if is_embedding(name) or is_head(name) or _is_bias(name)
    }
    embeddings = [name for name in tables if is_embedding(name)]
    sizes = {tensor.shape[0] for tensor in tables.values() if tensor.shape}
    floating = all(tensor.dtype.kind == "float" for tensor in tables.values())
    if len(embeddings) != 1 or len(sizes) != 1 or not floating:
        raise InvalidInput(
            f"{model.directory}: embeddings",
            found=f"{len(embeddings)} tables of {', '.join(map(str, sorted(sizes))) or 'no'} rows",
            expected="one table of embeddings in a floating-point format, and a head of as many rows",
        )
    return tables


def _counterpart(donor: Checkpoint, name: str, tables: dict[str, AnyTensor]) -> AnyTensor:
    """Return the donor's table for the same purpose.

    For a bias, which the donor may lack, return its embeddings, because only the number of rows matters.
    """
    donor_tables = _token_tables(donor)
    embedding = next(table for table_name, table in donor_tables.items() if is_embedding(table_name))
    if not is_head(name):
        return embedding
    heads = [table for table_name, table in donor_tables.items() if is_head(table_name)]
    return heads[0] if heads else embedding


def _is_bias(name: str) -> bool:
    return name.endswith("lm_head.bias")


def _lay_out(tables: dict[str, AnyTensor], size: int, file: Path) -> tuple[bytes, list[StoredTensor]]:
    """Return the header of a file with the new tables, and the stored tensors at their offsets in it."""
    shapes = {name: (size, *table.shape[1:]) for name, table in tables.items()}
    nbytes = {name: table.nbytes // table.shape[0] * size for name, table in tables.items()}
    header = render_header([(name, table.dtype.code, shapes[name], nbytes[name]) for name, table in tables.items()], {})
    new_tensors, offset = [], len(header)
    for name, table in tables.items():
        new_tensors.append(StoredTensor(name, file, table.dtype, shapes[name], offset))
        offset += nbytes[name]
    return header, new_tensors


def _read_tensor(tensor: AnyTensor) -> torch.Tensor:
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


def _require_tokenizer(checkpoint: Checkpoint) -> TokenizerDefinition:
    definition = read_tokenizer(checkpoint.companions)
    if definition is None:
        raise InvalidInput(
            str(checkpoint.directory),
            found="no tokenizer.json",
            expected="a readable tokenizer, to match tokens",
            remedy="save its tokenizer as tokenizer.json (a fast tokenizer)",
        )
    return definition
