"""Measure the likelihood of documents under a model, window by window, in the model process.

A document is read in windows of ``max_length`` tokens, and every token is scored once. The first window begins with
the begin-of-text token, or with the end-of-text token if the tokenizer has no other; without both, the first token is
not scored. Each further window begins with the token that precedes its first scored token. The last, shorter window
is extended to the left with preceding context. These are the windows of lm-eval's rolling log-likelihood.

The journal stores each batch of windows, so that an interrupted run resumes with the next batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from inspect import signature
from typing import TYPE_CHECKING, Literal, NamedTuple

from pydantic import BaseModel, ConfigDict, Field

from mergegate.merge_core.errors import InvalidInput
from mergegate.merge_core.files import JournalLocation, open_journal
from mergegate.tasks.models.checkpoints import LoadedModel, Model, TellProgress, load_model, tokenizer_digest
from mergegate.tasks.models.llama_cpp import GgufNetwork, load_gguf, runs_in_llama_cpp
from mergegate.tasks.quality.perplexity.text import HeldOutDocument, HeldOutText, read_distinct

if TYPE_CHECKING:
    import torch

_LOGITS = 1 << 28  # largest number of logits per batch, overriding batch_size: 1 GB in float32
_SLICE = 16  # number of positions per log-softmax, few enough for the processor's cache


class WindowSettings(BaseModel):
    """How documents are divided into windows and read. Equal for all models, and part of the cache key."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    max_length: int = Field(default=2048, ge=2)  # tokens per window
    documents: int | None = Field(default=1000, ge=1)  # number of distinct documents, from the first; None: all
    dtype: Literal["auto", "bfloat16", "float16", "float32"] = "auto"
    batch_size: int = Field(default=16, ge=1)


class DocumentLikelihood(NamedTuple):
    """Likelihood of one document, a row of ``documents.parquet``."""

    doc_id: int  # position in the file
    loglik: float  # nats; NaN or infinite for a broken model
    tokens: int  # number of scored tokens
    bytes: int  # size of the text in UTF-8
    hash: str = ""  # 16 hex digits of the text without differences in white space
    stratum: str = ""  # language or source that the document names; empty if it names none


class TextMeasurement(NamedTuple):
    """Likelihoods of held-out text under one model."""

    rows: list[DocumentLikelihood]
    vocabulary: str  # digest of the tokenizer
    window: int | None  # tokens; None if unknown
    duplicates: int  # number of documents that were dropped because they repeat another one


def measure(
    model: Model,
    documents: HeldOutText,
    windows: WindowSettings,
    device: str,
    location: JournalLocation,
    on_progress: TellProgress,
) -> TextMeasurement:
    """Compute the log-likelihood of every held-out document under ``model``.

    An interrupted run resumes from the journal at ``location``. ``on_progress`` is called with the number of scored
    tokens and their total.

    Raises:
        InvalidInput: If the model cannot be loaded, or the documents are unreadable or missing.
    """
    texts, duplicates = read_distinct(documents, windows.documents)
    with (  # GGUF variants are evaluated in llama.cpp, all other models in transformers
        load_gguf(model)
        if runs_in_llama_cpp(model)
        else load_model(model, dtype=windows.dtype, device=device) as loaded,
        open_journal(location) as journal,
    ):
        reading = divide_documents(loaded, model, texts, windows)
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
            document_rows(texts, reading, logliks), tokenizer_digest(loaded.tokenizer), reading.length, duplicates
        )


class TextWindow(NamedTuple):
    """Part of a document that is scored in one pass."""

    row: int  # index of its document
    start: int  # index of its first target among the document's scored tokens
    inputs: list[int]  # tokens that the model reads
    targets: list[int]  # tokens that the last inputs predict, one each


@dataclass(frozen=True)
class TokenizedText:
    """Held-out documents in the windows of one model, for callers that score many models on them.

    ``documents`` are the ascending positions in the file of the documents with tokens to score. ``batch_size`` is the
    number of windows in a batch.
    """

    documents: tuple[int, ...]
    batch_size: int
    _rows: tuple[int, ...]
    _reading: Reading

    def likelihoods(self, loaded_model: LoadedModel, part: range) -> list[float]:
        """Return the log-likelihood per token, in nats, of the documents at positions ``part`` of ``documents``."""
        rows = [self._rows[position] for position in part]
        selected = set(rows)
        windows = [window for window in self._reading.windows if window.row in selected]
        sums = dict.fromkeys(rows, 0.0)
        for batch in batches_of(loaded_model, self._reading._replace(windows=tuple(windows)), self.batch_size):
            for window, tokens in zip(batch, read_batch(loaded_model, batch), strict=True):
                sums[window.row] += float(tokens.sum())
        return [sums[row] / self._reading.tokens[row] for row in rows]


def read_held_out(
    loaded_model: LoadedModel, model: Model, documents: HeldOutText, windows: WindowSettings
) -> TokenizedText:
    """Divide held-out documents into the windows in which a model reads them."""
    texts, _ = read_distinct(documents, windows.documents)
    reading = divide_documents(loaded_model, model, texts, windows)
    rows = tuple(row for row, tokens in enumerate(reading.tokens) if tokens)
    return TokenizedText(tuple(texts[row].doc_id for row in rows), windows.batch_size, rows, reading)


class Reading(NamedTuple):
    """Documents divided into the windows of one model."""

    length: int  # tokens per window
    tokens: tuple[int, ...]  # number of scored tokens, by document
    windows: tuple[TextWindow, ...]


def divide_documents(
    loaded_model: LoadedModel, model: Model, texts: Sequence[HeldOutDocument], windows: WindowSettings
) -> Reading:
    """Divide documents into the windows in which ``model`` reads them."""
    length = min(windows.max_length, loaded_model.context or windows.max_length)
    cut_windows: list[TextWindow] = []
    tokens = [0] * len(texts)
    for row, text in enumerate(texts):
        encoded = encode_text(loaded_model, model, text.text, with_specials=False)
        sequence = encoded if loaded_model.prefix is None else [loaded_model.prefix, *encoded]
        for start in range(0, len(sequence) - 1, length):
            end = min(start + length, len(sequence) - 1)
            cut_windows.append(
                TextWindow(row, start, sequence[max(0, end - length) : end], sequence[start + 1 : end + 1])
            )
        tokens[row] = max(0, len(sequence) - 1)
    if not any(tokens):
        raise InvalidInput(
            f"{model.name} ({model.directory})", found="a tokenizer that produces no token for any document"
        )
    return Reading(length, tuple(tokens), tuple(cut_windows))


def encode_text(loaded_model: LoadedModel, model: Model, text: str, *, with_specials: bool) -> list[int]:
    """Return the tokens of a text, with the special tokens that the tokenizer adds if ``with_specials`` is true."""
    embeddings = loaded_model.embeddings
    encoded: list[int] = loaded_model.tokenizer.encode(text, add_special_tokens=with_specials)
    if encoded and max(encoded) >= embeddings:
        raise InvalidInput(
            f"{model.name} ({model.directory})",
            found=f"token {max(encoded)} from the tokenizer, and an embedding with {embeddings} rows",
            expected="a tokenizer that belongs to the weights",
        )
    return encoded


def batches_of(loaded_model: LoadedModel, reading: Reading, batch_size: int) -> list[list[TextWindow]]:
    """Group windows of similar length into batches, longest first, so that memory runs out immediately or never."""
    vocabulary = loaded_model.embeddings
    windows = sorted(reading.windows, key=lambda window: len(window.inputs), reverse=True)
    batches = []
    start = 0
    while start < len(windows):
        size = min(batch_size, max(1, _LOGITS // (vocabulary * len(windows[start].inputs))))
        batches.append(windows[start : start + size])
        start += size
    return batches


def document_rows(
    texts: Sequence[HeldOutDocument], reading: Reading, logliks: Sequence[float]
) -> list[DocumentLikelihood]:
    """Return a row for each document with scored tokens."""
    return [
        DocumentLikelihood(
            document.doc_id,
            logliks[row],
            reading.tokens[row],
            len(document.text.encode()),
            document.hash,
            document.stratum,
        )
        for row, document in enumerate(texts)
        if reading.tokens[row]
    ]


def read_batch(loaded_model: LoadedModel, batch: Sequence[TextWindow]) -> list[torch.Tensor]:
    """Return the log-likelihoods of each window's targets, in nats: float64, ``[targets]``."""
    import torch

    network = loaded_model.network
    if isinstance(network, GgufNetwork):  # llama.cpp computes each window alone
        logliks = []
        for window in batch:
            context = window.inputs[: len(window.inputs) - len(window.targets) + 1]
            values = network.gguf.log_probabilities(context, window.targets).values
            logliks.append(torch.tensor(values, dtype=torch.float64))
        return logliks
    longest = len(batch[0].inputs)
    ids = torch.zeros((len(batch), longest), dtype=torch.long)
    mask = torch.zeros_like(ids)
    for row, window in enumerate(batch):
        ids[row, : len(window.inputs)] = torch.tensor(window.inputs)
        mask[row, : len(window.inputs)] = 1
    # Only positions from the first target of any window on need logits.
    scored = longest - min(len(window.inputs) - len(window.targets) for window in batch)
    selection = {"logits_to_keep": scored} if "logits_to_keep" in signature(network.forward).parameters else {}
    with torch.inference_mode():
        logits = network(
            input_ids=ids.to(network.device), attention_mask=mask.to(network.device), use_cache=False, **selection
        ).logits
        logliks = []
        for row, window in enumerate(batch):
            targets = torch.tensor(window.targets, device=logits.device)
            first = len(window.inputs) - len(targets) - longest + logits.shape[1]
            parts = []
            for start in range(0, len(targets), _SLICE):  # log softmax in float32
                part = targets[start : start + _SLICE]
                log_p = torch.log_softmax(logits[row, first + start : first + start + len(part)].float(), dim=-1)
                parts.append(log_p.gather(1, part[:, None])[:, 0].double())
            logliks.append(torch.cat(parts).cpu())
        return logliks
