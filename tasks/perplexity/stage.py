"""Measure the log-likelihood of each document of held-out text under one model, as a cached stage.

mergegate does not use lm-eval for this, for three reasons. Every document must have exactly one begin-of-text token
(with tokenizers that add their own, lm-eval scores P(BOS | BOS)). Sums must use float32 log-softmax (bf16 rounds the
likelihood of a document to whole nats). The paired comparison needs the number of tokens and bytes of each document.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

from mergegate.merge_core.files import JOURNAL, HashMemo, JournalLocation, keep_only_journal
from mergegate.tasks.checkpoints import Model, call_model_process, files_fingerprint
from mergegate.tasks.perplexity.measurement import DocumentLikelihood, TextMeasurement, WindowSettings, measure
from mergegate.tasks.perplexity.settings import PerplexitySettings
from mergegate.tasks.perplexity.text import HeldOutText, TextSetting, pin_text
from mergegate.tasks.stage import Runtime, StageValue, advance, stage
from mergegate.tasks.store import Artifact, NotInKey

LIKELIHOODS_FILE = "documents.parquet"


class Likelihoods(StageValue):
    """Likelihood of the held-out text under one model.

    The artifact contains ``documents.parquet`` with one row per distinct document, a ``DocumentLikelihood``.
    """

    model: Annotated[str, NotInKey]
    documents: int  # number of distinct documents
    tokens: int
    bytes: int
    loglik: float | None  # nats, summed over all documents; None if it is not finite for a document
    perplexity: float | None  # exp(-loglik / tokens)
    bits_per_byte: float | None
    vocabulary: str  # digest of the tokenizer; token perplexities are comparable only if it is equal
    window: int | None = None  # tokens per window: the setting, or the model's own limit if that is smaller
    duplicates: int = 0  # number of documents that were dropped because they repeat another one

    def summary(self) -> str:
        return f"{self.perplexity:.3f}" if self.perplexity is not None else "not finite"


def pin_documents(settings: PerplexitySettings, root: Path, hashes: HashMemo) -> HeldOutText:
    """Return the held-out documents with their sha256. A relative path is relative to ``root``.

    Raises:
        InvalidInput: If the file is missing, or a document does not match the settings.
    """
    path = (root / settings.documents).absolute()
    setting = TextSetting(f"perplexity.documents: {settings.documents}")
    return pin_text(path, settings.field, hashes, setting, stratum=settings.stratum or "")


@stage("perplexity", version=2, subject="model", resumable=True)
def perplexity(
    out: Path, model: Model, documents: HeldOutText, windows: WindowSettings, runtime: Runtime
) -> Likelihoods:
    """Measure the log-likelihood of every distinct held-out document under ``model``, and write ``documents.parquet``.

    An interrupted run resumes from its journal.

    Raises:
        InvalidInput: If the model cannot be loaded, the documents are unreadable or missing, or the model process died.
    """
    keep_only_journal(out)
    journal = JournalLocation(
        out / JOURNAL, perplexity.key(model, documents, windows, runtime) + files_fingerprint([model])
    )
    measurement = call_model_process(
        measure,
        (model, documents, windows, runtime.device, journal),
        location=f"perplexity of {model.name}",
        models=[model],
        on_progress=lambda done, total: advance(done, total, "tokens"),
    )
    write_documents(out / LIKELIHOODS_FILE, measurement.rows)
    return total_likelihood(model.name, measurement)


def total_likelihood(model: str, measurement: TextMeasurement) -> Likelihoods:
    """Sum the likelihoods of all documents under ``model``."""
    rows = measurement.rows
    tokens, size = sum(row.tokens for row in rows), sum(row.bytes for row in rows)
    total = math.fsum(row.loglik for row in rows) if all(math.isfinite(row.loglik) for row in rows) else None
    return Likelihoods(
        model=model,
        documents=len(rows),
        tokens=tokens,
        bytes=size,
        loglik=total,
        perplexity=None if total is None else math.exp(min(700.0, -total / tokens)),
        bits_per_byte=None if total is None else -total / size / math.log(2),
        vocabulary=measurement.vocabulary,
        window=measurement.window,
        duplicates=measurement.duplicates,
    )


def sum_documents(artifact: Artifact[Likelihoods]) -> Likelihoods:
    """Return the value of an artifact of this stage, computed from its documents."""
    stored, rows = artifact.value, list(read_documents(artifact.directory))
    return total_likelihood(stored.model, TextMeasurement(rows, stored.vocabulary, stored.window, stored.duplicates))


def write_documents(path: Path, rows: Sequence[DocumentLikelihood]) -> None:
    """Write likelihoods to a parquet file with one row per document."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    columns = {name: [getattr(row, name) for row in rows] for name in DocumentLikelihood._fields}
    pq.write_table(pa.table(columns), path, compression="zstd")


def read_documents(directory: Path) -> tuple[DocumentLikelihood, ...]:
    """Read the likelihoods of all documents from an artifact of this stage."""
    import pyarrow.parquet as pq

    with pq.ParquetFile(directory / LIKELIHOODS_FILE) as file:  # read_table would import pandas
        columns = file.read().to_pydict()
    return tuple(
        DocumentLikelihood(*row) for row in zip(*(columns[n] for n in DocumentLikelihood._fields), strict=True)
    )
