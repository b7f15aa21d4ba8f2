"""Reading documents with a model, window by window: what is done in the process that holds models.

A document is read in windows of ``max_length`` tokens, and every token is scored once. The first window begins with
begin of text (or end of text, for a tokenizer that has only that; with neither, the first token is not scored); each
further one with the token before those that it scores, and the last, shorter one is filled up with context from before.
These are the windows of lm-eval's rolling log-likelihood.

Each batch of windows that is done is kept in the journal; after a kill the next one is read as if nothing had happened.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NamedTuple

from pydantic import BaseModel, ConfigDict, Field

from mergegate.merge_core.errors import InvalidInput
from mergegate.merge_core.files import JournalPlace, open_journal
from mergegate.tasks.checkpoints import LoadedModel, Model, TellProgress, load_model, tokenizer_digest
from mergegate.tasks.perplexity.text import HeldOutText, read_texts

if TYPE_CHECKING:
    import torch

_LOGITS = 1 << 28  # elements of one batch's logits, whatever batch_size says: 1 GB in float32
_SLICE = 512  # positions whose log-softmax is taken at once


class WindowSettings(BaseModel):
    """How documents are read: equal for all models, and part of the key."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    max_length: int = Field(default=2048, ge=2)  # tokens a window
    documents: int | None = Field(default=1000, ge=1)  # the first so many; None: all
    dtype: Literal["auto", "bfloat16", "float16", "float32"] = "auto"
    batch_size: int = Field(default=16, ge=1)


class DocumentLikelihood(NamedTuple):
    """One row of ``documents.parquet``."""

    doc_id: int  # position in the file
    loglik: float  # nats; NaN or infinite for a broken model
    tokens: int  # scored
    bytes: int  # of the text in UTF-8


class TextMeasurement(NamedTuple):
    """Held-out text as one model read it."""

    rows: list[DocumentLikelihood]
    vocabulary: str  # digest of the tokenizer
    window: int  # tokens


def measure(
    model: Model,
    documents: HeldOutText,
    windows: WindowSettings,
    device: str,
    place: JournalPlace,
    on_progress: TellProgress,
) -> TextMeasurement:
    """Log-likelihood of every held-out document under ``model``; ``on_progress`` is told tokens.

    Raises:
        InvalidInput: when the model cannot be loaded, the documents cannot be read, or there are none.
    """
    texts = read_texts(documents, windows.documents)
    with load_model(model, dtype=windows.dtype, device=device) as loaded, open_journal(place, _is_record) as journal:
        reading = read_by(loaded, model, texts, windows)
        logliks = [0.0] * len(texts)
        done, total = 0, sum(reading.tokens)
        for position, batch in enumerate(batches_of(loaded, reading, windows.batch_size)):
            if position < len(journal.records):
                sums = journal.records[position]
            else:
                sums = [float(tokens.sum()) for tokens in read_batch(loaded, batch)]
                journal.append(sums)
            for window, value in zip(batch, sums, strict=True):
                logliks[window.row] += value
                done += len(window.targets)
            on_progress(done, total)
        return TextMeasurement(
            document_rows(texts, reading, logliks), tokenizer_digest(loaded.tokenizer), reading.length
        )


def _is_record(record: object) -> bool:
    return isinstance(record, list) and all(isinstance(value, float) for value in record)


class TextWindow(NamedTuple):
    """A part of a document that is scored at once."""

    row: int  # index of its document
    start: int  # of its targets among the document's scored tokens
    inputs: list[int]  # tokens that the model reads
    targets: list[int]  # tokens that the last so many of them predict


@dataclass(frozen=True)
class TokenizedText:
    """Held-out documents as one model reads them, for whoever reads the same many times.

    Args:
        documents: Of the file, those that have anything to score, in its order.
        batch_size: Windows that are read together.
    """

    documents: tuple[int, ...]
    batch_size: int
    _rows: tuple[int, ...]
    _reading: Reading

    def likelihoods(self, loaded: LoadedModel, part: range) -> list[float]:
        """Log-likelihood of ``part`` of ``documents``, nats a token each; they are read in batches of their own."""
        rows = [self._rows[position] for position in part]
        wanted = set(rows)
        windows = [window for window in self._reading.cut if window.row in wanted]
        sums = dict.fromkeys(rows, 0.0)
        for batch in batches_of(loaded, self._reading._replace(cut=tuple(windows)), self.batch_size):
            for window, tokens in zip(batch, read_batch(loaded, batch), strict=True):
                sums[window.row] += float(tokens.sum())
        return [sums[row] / self._reading.tokens[row] for row in rows]


def read_held_out(
    loaded: LoadedModel,
    model: Model,
    documents: HeldOutText,
    windows: WindowSettings,
) -> TokenizedText:
    """Cut held-out documents into the windows in which a model reads them.

    Raises:
        InvalidInput: as ``measure``.
    """
    texts = read_texts(documents, windows.documents)
    reading = read_by(loaded, model, texts, windows)
    rows = tuple(row for row, tokens in enumerate(reading.tokens) if tokens)
    return TokenizedText(tuple(texts[row][0] for row in rows), windows.batch_size, rows, reading)


class Reading(NamedTuple):
    """Documents as one model reads them."""

    length: int  # tokens a window
    tokens: tuple[int, ...]  # scored, by document
    cut: tuple[TextWindow, ...]


def read_by(loaded: LoadedModel, model: Model, texts: Sequence[tuple[int, str]], windows: WindowSettings) -> Reading:
    """Cut documents into the windows in which ``model`` reads them.

    Raises:
        InvalidInput: when the tokenizer does not belong to the weights, or finds no token at all.
    """
    length = min(windows.max_length, loaded.context or windows.max_length)
    cut: list[TextWindow] = []
    tokens = [0] * len(texts)
    for row, (_, text) in enumerate(texts):
        encoded = encode_text(loaded, model, text, with_specials=False)
        sequence = encoded if loaded.prefix is None else [loaded.prefix, *encoded]
        for start in range(0, len(sequence) - 1, length):
            end = min(start + length, len(sequence) - 1)
            cut.append(TextWindow(row, start, sequence[max(0, end - length) : end], sequence[start + 1 : end + 1]))
        tokens[row] = max(0, len(sequence) - 1)
    if not any(tokens):
        raise InvalidInput(f"{model.name} ({model.directory})", found="a tokenizer that finds no token in any document")
    return Reading(length, tuple(tokens), tuple(cut))


def encode_text(loaded: LoadedModel, model: Model, text: str, *, with_specials: bool) -> list[int]:
    """Tokens of a text, with the special ones that the tokenizer adds by itself or without.

    Raises:
        InvalidInput: when the tokenizer does not belong to the weights.
    """
    embeddings = int(loaded.network.get_input_embeddings().num_embeddings)
    encoded: list[int] = loaded.tokenizer.encode(text, add_special_tokens=with_specials)
    if encoded and max(encoded) >= embeddings:
        raise InvalidInput(
            f"{model.name} ({model.directory})",
            found=f"a tokenizer with token {max(encoded)} over an embedding of {embeddings} rows",
            expected="a tokenizer that belongs to the weights",
        )
    return encoded


def batches_of(loaded: LoadedModel, reading: Reading, batch_size: int) -> list[list[TextWindow]]:
    """Windows of like length together, longest first, so that memory runs out at once or never."""
    vocabulary = int(loaded.network.get_input_embeddings().num_embeddings)
    ordered = sorted(reading.cut, key=lambda window: len(window.inputs), reverse=True)
    batches = []
    start = 0
    while start < len(ordered):
        fits = max(1, _LOGITS // (vocabulary * len(ordered[start].inputs)))
        step = min(batch_size, fits)
        batches.append(ordered[start : start + step])
        start += step
    return batches


def document_rows(
    texts: Sequence[tuple[int, str]], reading: Reading, logliks: Sequence[float]
) -> list[DocumentLikelihood]:
    """A row for each document of which anything was scored."""
    return [
        DocumentLikelihood(doc_id, logliks[row], reading.tokens[row], len(text.encode()))
        for row, (doc_id, text) in enumerate(texts)
        if reading.tokens[row]
    ]


def read_batch(loaded: LoadedModel, batch: Sequence[TextWindow]) -> list[torch.Tensor]:
    """Of each window the log-likelihoods of its targets: nats, float64, [targets]."""
    import torch

    network = loaded.network

    longest = len(batch[0].inputs)
    ids = torch.zeros((len(batch), longest), dtype=torch.long)
    mask = torch.zeros_like(ids)
    for row, window in enumerate(batch):
        ids[row, : len(window.inputs)] = torch.tensor(window.inputs)
        mask[row, : len(window.inputs)] = 1
    with torch.inference_mode():
        logits = network(
            input_ids=ids.to(network.device), attention_mask=mask.to(network.device), use_cache=False
        ).logits
        return [
            _logliks(logits[row, len(window.inputs) - len(window.targets) : len(window.inputs)], window.targets)
            for row, window in enumerate(batch)
        ]


def _logliks(logits: torch.Tensor, targets: Sequence[int]) -> torch.Tensor:
    """``log softmax(logits)[position, target]``, nats; softmax in float32. ``logits``: [targets, vocab]."""
    import torch

    wanted = torch.tensor(targets, device=logits.device)
    parts = []
    for start in range(0, len(targets), _SLICE):
        part = wanted[start : start + _SLICE]
        log_p = torch.log_softmax(logits[start : start + len(part)].float(), dim=-1)
        parts.append(log_p.gather(1, part[:, None])[:, 0].double())
    return torch.cat(parts).cpu()
