"""Measure the log-likelihood of each document of held-out text, as cached stages, under one model or several together.

mergegate does not use lm-eval for this, for three reasons. Every document must have exactly one begin-of-text token
(with tokenizers that add their own, lm-eval scores P(BOS | BOS)). Sums must use float32 log-softmax (bf16 rounds the
likelihood of a document to whole nats). The paired comparison needs the number of tokens and bytes of each document.

To estimate how much a merge can gain, ``ensemble_likelihoods`` averages the probabilities that its parents assign to
each token. It needs one forward pass per parent; merging the weights approximates it with a single pass (Wortsman et
al. 2022, arXiv 2203.05482, section 4). The share of the ensemble's gain that a merge retains therefore distinguishes a
poor merge from parents that do not complement each other::

    ensemble = ensemble_likelihoods(parents, documents, windows, runtime())
    ensemble_gain_share([likelihoods[name].value for name in parents], ensemble.value, likelihoods["merge"].value)
"""

from __future__ import annotations

import base64
import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from mergegate.merge_core.errors import InvalidInput
from mergegate.merge_core.files import JOURNAL, HashMemo, JournalLocation, keep_only_journal, open_journal
from mergegate.tasks.base.stage import Runtime, StageValue, advance, stage
from mergegate.tasks.base.store import Artifact, NotInKey
from mergegate.tasks.models.checkpoints import (
    Model,
    TellProgress,
    call_model_process,
    files_fingerprint,
    load_model,
    tokenizer_digest,
)
from mergegate.tasks.quality.perplexity.measurement import (
    DocumentLikelihood,
    TextMeasurement,
    WindowSettings,
    batches_of,
    divide_documents,
    document_rows,
    measure,
    read_batch,
)
from mergegate.tasks.quality.perplexity.settings import PerplexitySettings
from mergegate.tasks.quality.perplexity.text import HeldOutText, TextSetting, pin_text, read_distinct

if TYPE_CHECKING:
    import torch

LIKELIHOODS_FILE = "documents.parquet"
ENSEMBLE = "ensemble"


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
    """Return the held-out documents with their sha256. A relative path is relative to ``root``."""
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


@stage("ensemble", version=2, resumable=True)
def ensemble_likelihoods(
    out: Path, models: tuple[Model, ...], documents: HeldOutText, windows: WindowSettings, runtime: Runtime
) -> Likelihoods:
    """Measure every held-out document under the mean of the models' next-token probabilities.

    The artifact has the same form as that of ``perplexity``. The models, which are the parents without the base (at
    least two), run one after another. An interrupted run resumes from its journal.

    Raises:
        InvalidInput: See ``perplexity``; also if the models do not divide text into the same tokens and windows.
    """
    if len(models) < 2:
        raise InvalidInput("perplexity.ensemble", found=f"{len(models)} parent", expected="at least two parents")
    keep_only_journal(out)
    key = ensemble_likelihoods.key(models, documents, windows, runtime)
    journal = JournalLocation(out / JOURNAL, key + files_fingerprint(models))
    measurement = call_model_process(
        _measure_together,
        (models, documents, windows, runtime.device, journal),
        location="perplexity of the parents together",
        models=models,
        on_progress=lambda done, total: advance(done, total, "tokens"),
    )
    write_documents(out / LIKELIHOODS_FILE, measurement.rows)
    return total_likelihood(ENSEMBLE, measurement)


def _measure_together(
    models: Sequence[Model],
    documents: HeldOutText,
    windows: WindowSettings,
    device: str,
    location: JournalLocation,
    on_progress: TellProgress,
) -> TextMeasurement:
    import numpy as np
    import torch

    texts, duplicates = read_distinct(documents, windows.documents)
    sums: list[torch.Tensor] = []  # log of the sum of probabilities over the models, by document: [tokens]
    first_reading, vocabulary, done = None, "", 0
    with open_journal(location) as journal:
        recorded = iter(journal.records)
        for model in models:
            with load_model(model, dtype=windows.dtype, device=device) as loaded:
                vocabulary_digest = tokenizer_digest(loaded.tokenizer)
                reading = divide_documents(loaded, model, texts, windows)
                if first_reading is None:
                    first_reading, vocabulary = reading, vocabulary_digest
                    sums = [torch.full((count,), -math.inf, dtype=torch.float64) for count in reading.tokens]
                elif (vocabulary_digest, reading.length) != (vocabulary, first_reading.length):
                    is_tokenizer = vocabulary_digest != vocabulary
                    lengths = (reading.length, first_reading.length)
                    raise InvalidInput(
                        f"perplexity.ensemble: {model.name} and {models[0].name}",
                        found="different tokenizers"
                        if is_tokenizer
                        else f"windows of {lengths[0]} and {lengths[1]} tokens",
                        expected="models that read text in the same tokens: probabilities are averaged token by token",
                        remedy="perplexity: {ensemble: false}"
                        if is_tokenizer
                        else f"perplexity.max_length: {min(lengths)}",
                    )
                for batch in batches_of(loaded, reading, windows.batch_size):
                    if (record := next(recorded, None)) is None:
                        token_logliks = read_batch(loaded, batch)
                        content = b"".join(tokens.numpy().tobytes() for tokens in token_logliks)
                        journal.append(base64.b64encode(content).decode())
                    else:
                        values = np.frombuffer(base64.b64decode(record), dtype=np.float64)
                        ends = np.cumsum([len(window.targets) for window in batch])
                        token_logliks = [torch.tensor(tokens) for tokens in np.split(values, ends[:-1])]
                    for window, logliks in zip(batch, token_logliks, strict=True):
                        part = sums[window.row][window.start : window.start + len(logliks)]
                        torch.logaddexp(part, logliks, out=part)
                        done += len(logliks)
                    on_progress(done, len(models) * sum(reading.tokens))
    assert first_reading is not None, "there are models"
    rows = document_rows(texts, first_reading, [float((part - math.log(len(models))).sum()) for part in sums])
    return TextMeasurement(rows, vocabulary, first_reading.length, duplicates)


def ensemble_gain_share(parents: Sequence[Likelihoods], together: Likelihoods, merge: Likelihoods) -> float | None:
    """Return the share of the ensemble's gain over the best parent, in nats per token, that the merge retains.

    1 means as good as the ensemble, 0 as good as the best parent, and a negative value worse than that. The result is
    None if the ensemble gains nothing, a likelihood is not finite, or the tokens differ. ``together`` is the likelihood
    of the ensemble.
    """
    values = (*parents, together, merge)
    if any((value.vocabulary, value.tokens) != (together.vocabulary, together.tokens) for value in values):
        return None
    finite = [-value.loglik / value.tokens for value in values if value.loglik is not None]
    if len(finite) < len(values):
        return None
    *members, lowest, merge_loss = finite
    best = min(members)
    return (best - merge_loss) / (best - lowest) if lowest < best else None


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
