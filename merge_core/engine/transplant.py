"""Replace the tokenizer of a model by that of a donor model: create new token tables, and copy all other tensors.

Tokens that stand for the same bytes in both tokenizers keep the model's rows unchanged, at the ids of the donor. The
rows of other tokens are computed (see ``merge_core.checkpoint.vocabulary``), separately for embeddings and head. Only
one table at a time is in memory.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
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
from mergegate.merge_core.engine.input_files import InputFiles
from mergegate.merge_core.engine.writer import refuse_disk_errors
from mergegate.merge_core.errors import InvalidInput
from mergegate.merge_core.plan import plan_transplant

if TYPE_CHECKING:
    import torch

# Number of tokens whose rows are computed together. With 100,000 shared tokens, this takes 100 MB.
_BATCH_TOKENS = 256


@dataclass(frozen=True)
class TransplantSettings:
    """Settings for the rows of tokens that the model lacks.

    Args:
        method: Method that computes the rows.
        k: Maximum number of shared tokens whose rows are combined into one row.
        device: Device that computes the combinations, in torch's notation.
    """

    method: TransplantMethod = "omp"
    k: int = 64
    device: str = "cpu"


@dataclass(frozen=True)
class Transplant:
    """Result of :func:`transplant_tokenizer`.

    Args:
        record: Record of the merge that wrote the model.
        tokens: Number of tokens of the donor that have a row.
        shared: Number of these tokens that the model has too.
        errors: Relative error by table name if the donor's rows are combined in the same way: the root of the mean of
            ``|difference|² / |row|²``. Empty if new rows are means.
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
    settings: TransplantSettings = TransplantSettings(),
    *,
    on_progress: Callable[[int, int], None] | None = None,
) -> Transplant:
    """Write ``model`` with the tokenizer of ``donor`` into ``out``.

    Args:
        model: Model that provides the weights.
        donor: Model that provides the tokenizer. Its token tables show which tokens have similar meanings.
        out: New or empty directory.
        scratch: Path of a temporary file for the new tables. The caller removes it.
        settings: Settings for the rows of tokens that the model lacks.
        on_progress: Function called with the number of computed rows and the number of all rows to compute.

    Raises:
        InvalidInput: A tokenizer is missing or unreadable, the tables are ambiguous, the tokenizers have no token in
            common, a table has NaN or infinity, or the device does not exist.
    """
    settings = replace(settings, device=choose_devices(settings.device).all[0])
    tokenizers = (_require_tokenizer(model), _require_tokenizer(donor))
    tables = _token_tables(model)
    donor_tables = _token_tables(donor)
    donor_embedding = next(table for name, table in donor_tables.items() if is_embedding(name))
    donor_head = next((table for name, table in donor_tables.items() if is_head(name)), donor_embedding)
    size, rows = donor_embedding.shape[0], next(iter(tables.values())).shape[0]
    model_ids, donor_ids = (token_bytes(definition) for definition in tokenizers)
    shared = ((number, model_ids[text]) for text, number in donor_ids.items() if text in model_ids)
    pairs = sorted((number, row) for number, row in shared if number < size and row < rows)
    if not pairs:
        raise InvalidInput(
            str(donor.directory),
            found=f"no token in common with {model.directory.name}",
            expected="common tokens, which relate the two embedding spaces",
        )
    shared_rows = np.array(pairs, np.int64).T
    donor_rows = np.array(sorted({number for number in donor_ids.values() if number < size}), np.int64)
    missing = np.setdiff1d(donor_rows, shared_rows[0])
    rows_done, total = 0, len(missing) * len(tables)

    def report(count: int) -> None:
        nonlocal rows_done
        rows_done += count
        if on_progress is not None:
            on_progress(rows_done, total)

    errors: dict[str, float] = {}
    shapes = {name: (size, *table.shape[1:]) for name, table in tables.items()}
    nbytes = {name: table.nbytes // table.shape[0] * size for name, table in tables.items()}
    header = render_header([(name, table.dtype.code, shapes[name], nbytes[name]) for name, table in tables.items()], {})
    new_tables, offset = {}, len(header)
    with refuse_disk_errors(scratch), scratch.open("wb") as file:
        file.write(header)
        for name, table in tables.items():
            # For a bias, only the donor's number of rows matters. The donor may lack a bias, so use its embeddings.
            donor_table = donor_head if is_head(name) else donor_embedding
            content, error = _create_table(table, donor_table, shared_rows, missing, settings, report)
            if error is not None:
                errors[name] = error
            file.write(content.data)
            new_tables[name] = StoredTensor(name, scratch, table.dtype, shapes[name], offset)
            offset += nbytes[name]
    plan = plan_transplant(model, donor, new_tables, tokenizers)
    record = merge_weights(plan, out, device="cpu")
    shared_count = len(pairs)
    return Transplant(record, shared_count + len(missing), shared_count, errors)


def _create_table(
    table: AnyTensor,
    donor_table: AnyTensor,
    shared_rows: np.ndarray,
    missing: np.ndarray,
    settings: TransplantSettings,
    report: Callable[[int], None],
) -> tuple[np.ndarray, float | None]:
    """Return the bytes of a new token table ``[donor's rows, width]``, and the error of its combinations (or None).

    Args:
        table: Table of the model, ``[rows, width]``, or ``[rows]`` for a bias.
        donor_table: Table of the donor, ``[donor's rows, donor's width]``.
        shared_rows: Rows of the shared tokens in the donor and in the model, ``[2, shared]``.
        missing: Rows in the donor of the tokens that the model lacks.
        settings: Settings for these rows.
        report: Function called with the number of computed rows.
    """
    import torch

    model_rows = _read_tensor(table)
    wide = model_rows.float() if table.dtype.code != "F64" else model_rows
    shared = wide[torch.from_numpy(shared_rows[1])]
    result = model_rows.new_zeros((donor_table.shape[0], *model_rows.shape[1:]))
    result[:] = shared.mean(0).to(model_rows.dtype)  # This includes padding rows, which no text uses.
    result[torch.from_numpy(shared_rows[0])] = model_rows[torch.from_numpy(shared_rows[1])]
    error = None
    if settings.method == "omp" and len(model_rows.shape) == 2 and len(missing):
        donor_rows = _read_tensor(donor_table).float().to(settings.device)
        atoms, rows = (
            donor_rows[torch.from_numpy(shared_rows[0]).to(settings.device)],
            shared.float().to(settings.device),
        )
        squares = 0.0
        for first in range(0, len(missing), _BATCH_TOKENS):
            part = torch.from_numpy(missing[first : first + _BATCH_TOKENS])
            targets = donor_rows[part.to(settings.device)]
            atom_indices, weights = sparse_combinations(targets, atoms, settings.k)
            result[part] = combined_rows(atom_indices, weights, rows).to("cpu", model_rows.dtype)
            difference = combined_rows(atom_indices, weights, atoms) - targets
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
        name: tensor
        for name, tensor in model.tensors.items()
        if is_embedding(name) or is_head(name) or name.endswith("lm_head.bias")
    }
    embeddings = [name for name in tables if is_embedding(name)]
    sizes = {tensor.shape[0] for tensor in tables.values() if tensor.shape}
    floating = all(tensor.dtype.kind == "float" for tensor in tables.values())
    if len(embeddings) != 1 or len(sizes) != 1 or not floating:
        raise InvalidInput(
            f"{model.directory}: embeddings",
            found=f"{len(embeddings)} embedding tables; tables with {', '.join(map(str, sorted(sizes))) or 'no'} rows",
            expected="one embedding table in a floating-point format, and a head with as many rows",
        )
    return tables


def _read_tensor(tensor: AnyTensor) -> torch.Tensor:
    import torch

    content = np.empty(tensor.nbytes, np.uint8)
    with InputFiles(part.file for part in tensor.parts) as files:
        open_elements(tensor, files)(0, content)
    values = torch.from_numpy(content).view(getattr(torch, tensor.dtype.torch_name)).reshape(tensor.shape)
    if not bool(torch.isfinite(values).all()):
        raise InvalidInput(
            f"{tensor.parts[0].file}: {tensor.name}", found="NaN or infinite numbers", expected="finite numbers"
        )
    return values


def _require_tokenizer(checkpoint: Checkpoint) -> TokenizerDefinition:
    definition = read_tokenizer(checkpoint.companions)
    if definition is None:
        raise InvalidInput(
            str(checkpoint.directory),
            found="no tokenizer.json",
            expected="a readable tokenizer to match tokens with",
            remedy="save it with a fast tokenizer, which writes tokenizer.json",
        )
    return definition
