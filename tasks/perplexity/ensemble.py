"""The ensemble of a merge's parents on the held-out text: what the merge could have gained, as a cached stage.

Averaging the probabilities that the parents give to each token costs as many forward passes as there are parents, and
is what merging their weights tries to come near to in one (Wortsman et al. 2022, arXiv 2203.05482, section 4). So the
share of the ensemble's gain that the merge keeps tells a poor merge from parents that have nothing to give each other::

    together = ensemble(parents, documents, windows, runtime())
    gain_kept([likelihoods[name].value for name in parents], together.value, likelihoods["merge"].value)
"""

from __future__ import annotations

import base64
import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from mergegate.merge_core.errors import InvalidInput
from mergegate.merge_core.files import JOURNAL, JournalPlace, keep_only_journal, open_journal
from mergegate.tasks.checkpoints import (
    Model,
    TellProgress,
    call_model_process,
    files_fingerprint,
    load_model,
    tokenizer_digest,
)
from mergegate.tasks.perplexity.measurement import (
    TextMeasurement,
    TextWindow,
    WindowSettings,
    batches_of,
    document_rows,
    read_batch,
    read_by,
)
from mergegate.tasks.perplexity.stage import FILE, Likelihoods, total_likelihood, write_documents
from mergegate.tasks.perplexity.text import HeldOutText, read_texts
from mergegate.tasks.stage import Runtime, advance, stage

if TYPE_CHECKING:
    import torch

ENSEMBLE = "ensemble"


@stage("ensemble", version=1, resumable=True)
def ensemble_likelihoods(
    out: Path, models: tuple[Model, ...], documents: HeldOutText, windows: WindowSettings, runtime: Runtime
) -> Likelihoods:
    """Log-likelihood of every held-out document under the mean of the models' next-token probabilities.

    The artifact is like that of ``perplexity``. The models are read with one after another; what is kept of each is one
    number a token. Goes on from the journal of a killed run.

    Args:
        models: The parents, two or more, without the base.

    Raises:
        InvalidInput: as ``perplexity``; or when the models do not cut text into the same tokens and windows.
    """
    if len(models) < 2:
        raise InvalidInput("perplexity.ensemble", found=f"{len(models)} model", expected="two parents or more")
    keep_only_journal(out)
    key = ensemble_likelihoods.key(models, documents, windows, runtime)
    place = JournalPlace(out / JOURNAL, key + files_fingerprint(models))
    found = call_model_process(
        _measure_together,
        (models, documents, windows, runtime.device, place),
        where="perplexity of the parents together",
        models=models,
        on_progress=lambda done, total: advance(done, total, "tokens"),
    )
    write_documents(out / FILE, found.rows)
    return total_likelihood(ENSEMBLE, found)


def _measure_together(
    models: Sequence[Model],
    documents: HeldOutText,
    windows: WindowSettings,
    device: str,
    place: JournalPlace,
    on_progress: TellProgress,
) -> TextMeasurement:
    import torch

    texts = read_texts(documents, windows.documents)
    sums: list[torch.Tensor] = []  # log of the summed probabilities so far, by document: [tokens]
    read, vocabulary, done = None, "", 0
    with open_journal(place, lambda record: isinstance(record, str)) as journal:
        before = iter(journal.records)
        for model in models:
            with load_model(model, dtype=windows.dtype, device=device) as loaded:
                own = tokenizer_digest(loaded.tokenizer)
                reading = read_by(loaded, model, texts, windows)
                if read is None:
                    read, vocabulary = reading, own
                    sums = [torch.full((count,), -math.inf, dtype=torch.float64) for count in reading.tokens]
                elif (own, reading.length) != (vocabulary, read.length):
                    raise _other_reading(models[0], model, (own == vocabulary, read.length, reading.length))
                for batch in batches_of(loaded, reading, windows.batch_size):
                    if (record := next(before, None)) is None:
                        found = read_batch(loaded, batch)
                        journal.append(_packed(found))
                    else:
                        found = _unpacked(record, batch)
                    for window, logliks in zip(batch, found, strict=True):
                        part = sums[window.row][window.start : window.start + len(logliks)]
                        torch.logaddexp(part, logliks, out=part)
                        done += len(logliks)
                    on_progress(done, len(models) * sum(reading.tokens))
    assert read is not None, "there are models"
    rows = document_rows(texts, read, [float((part - math.log(len(models))).sum()) for part in sums])
    return TextMeasurement(rows, vocabulary, read.length)


def _packed(logliks: Sequence[torch.Tensor]) -> str:
    return base64.b64encode(b"".join(tokens.numpy().tobytes() for tokens in logliks)).decode()


def _unpacked(record: str, batch: Sequence[TextWindow]) -> list[torch.Tensor]:
    import numpy as np
    import torch

    every = np.frombuffer(base64.b64decode(record), dtype=np.float64)
    ends = np.cumsum([len(window.targets) for window in batch])
    return [torch.tensor(tokens) for tokens in np.split(every, ends[:-1])]


def ensemble_gain_share(parents: Sequence[Likelihoods], together: Likelihoods, merge: Likelihoods) -> float | None:
    """Share of the ensemble's gain over the better parent that the merge keeps, in nats a token.

    1: as good as the ensemble; 0: as the better parent; negative: worse than that.

    Args:
        parents: Likelihoods of the ensemble's members.

    Returns:
        None where the ensemble gains nothing, a likelihood is not finite, or tokens do not compare.
    """
    losses = [_loss(value, together) for value in (*parents, together, merge)]
    known = [loss for loss in losses if loss is not None]
    if len(known) < len(losses):
        return None
    *members, lowest, own = known
    best = min(members)
    return (best - own) / (best - lowest) if lowest < best else None


def _loss(value: Likelihoods, like: Likelihoods) -> float | None:
    """Nats a token; None where it is not finite, or of other tokens than those of ``like``."""
    if value.loglik is None or (value.vocabulary, value.tokens) != (like.vocabulary, like.tokens):
        return None
    return -value.loglik / value.tokens


def _other_reading(first: Model, model: Model, found: tuple[bool, int, int]) -> InvalidInput:
    same_tokenizer, length, own = found
    return InvalidInput(
        f"perplexity.ensemble: {model.name} and {first.name}",
        found=f"windows of {own} and {length} tokens" if same_tokenizer else "different tokenizers",
        expected="models that read text in the same tokens: probabilities are averaged token by token",
        remedy=f"perplexity.max_length: {min(length, own)}" if same_tokenizer else "perplexity: {ensemble: false}",
    )
