"""Perplexity: per-document log-likelihoods of one model on held-out text, as a cached stage.

Computed here rather than by lm-eval, for three reasons: every document counts exactly one begin-of-text token (lm-eval
scores P(BOS | BOS) with tokenizers that add their own), sums are of float32 log-softmax (a bf16 one rounds a document
to whole nats), and tokens and bytes of each document are kept for the paired comparison.

A document is read in windows of ``max_length`` tokens, and every token is scored once. The first window begins with
begin of text (or end of text, for a tokenizer that has only that; with neither, the first token is not scored); each
further one with the token before those that it scores, and the last, shorter one is filled up with context from before.
These are the windows of lm-eval's rolling log-likelihood.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from merge_core.errors import InvalidInput, suggest
from merge_core.parsing import line_place, parse_line
from merge_core.store import HashMemo, NotInKey
from tasks.checkpoints import LoadedModel, Model, load_model, tokenizer_digest
from tasks.stage import Runtime, StageValue, advance, stage

if TYPE_CHECKING:
    import torch

FILE = "documents.parquet"
_LOGITS = 1 << 28  # elements of one batch's logits, whatever batch_size says: 1 GB in float32
_SLICE = 512  # positions whose log-softmax is taken at once


def _percentage(value: object) -> object:
    if isinstance(value, str) and value.strip().endswith("%"):
        try:
            return float(value.strip()[:-1]) / 100
        except ValueError:
            raise ValueError(f"{value!r} is no percentage such as 5%") from None
    if isinstance(value, (int, float)) and value >= 1:
        raise ValueError(f"{value} is more than double; write {value}% for per cent")
    return value


Percentage = Annotated[float, BeforeValidator(_percentage), Field(gt=0, lt=1)]


class HeldOutText(BaseModel):
    """Held-out documents pinned by content."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    path: Annotated[Path, NotInKey]  # jsonl with one document a line, or plain text with one a paragraph
    sha256: str
    field: str = "text"  # of a jsonl line; empty for plain text


class WindowSettings(BaseModel):
    """How documents are read: equal for all models, and part of the key."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    max_length: int = Field(default=2048, ge=2)  # tokens a window
    documents: int | None = Field(default=1000, ge=1)  # the first so many; None: all
    dtype: Literal["auto", "bfloat16", "float16", "float32"] = "auto"
    batch_size: int = Field(default=16, ge=1)


class DriftLimits(BaseModel):
    """How much the perplexity of a merge may exceed that of its better parent."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    max_increase: Percentage = 0.05
    warn_increase: Percentage = 0.02
    reference: str | tuple[str, ...] = "fine-tunes"  # parents of which the better one counts

    @model_validator(mode="after")
    def _warns_before_it_fails(self) -> Self:
        if self.warn_increase > self.max_increase:
            raise ValueError(f"warn_increase ({self.warn_increase:g}) must not exceed max_increase")
        return self


class PerplexitySettings(BaseModel):
    """Which text is held out and what drift is allowed, in a profile under ``perplexity``."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    documents: Path = Field(description="jsonl with one document a line, or plain text with one a paragraph.")
    field: str = Field(default="text", min_length=1, description="Of a jsonl line.")
    max_increase: Percentage = Field(default=0.05, description="'5%' or 0.05 over the better parent; more fails.")
    warn_increase: Percentage | None = Field(default=None, description="Default: 2 %, or max_increase if less.")
    max_length: int = Field(default=2048, ge=2, description="Tokens a window.")
    reference: str | tuple[str, ...] = Field(
        default="fine-tunes",
        description="Parents of which the better one counts: fine-tunes (what was merged; the base only where it has a "
        "weight of its own), all, or names.",
    )
    max_documents: int | None = Field(default=1000, ge=1, description="The first so many; null: all.")
    dtype: Literal["auto", "bfloat16", "float16", "float32"] = "auto"
    batch_size: int = Field(default=16, ge=1)
    ensemble: bool = Field(
        default=False, description="Also measure the parents together, see tasks/perplexity/ensemble.py."
    )

    @model_validator(mode="after")
    def _limits_agree(self) -> Self:
        _ = self.limits
        return self

    @property
    def windows(self) -> WindowSettings:
        """The part that decides likelihoods."""
        return WindowSettings(
            max_length=self.max_length, documents=self.max_documents, dtype=self.dtype, batch_size=self.batch_size
        )

    @property
    def limits(self) -> DriftLimits:
        """The part that judges them."""
        warn = self.warn_increase if self.warn_increase is not None else min(0.02, self.max_increase)
        return DriftLimits(max_increase=self.max_increase, warn_increase=warn, reference=self.reference)


class Likelihoods(StageValue):
    """Likelihood of the held-out text under one model.

    ``documents.parquet`` has the columns ``doc_id, loglik (nats), tokens, bytes``.
    """

    model: Annotated[str, NotInKey]
    documents: int
    tokens: int
    bytes: int
    loglik: float | None  # nats, summed over all documents; None when any of it is not finite
    perplexity: float | None  # exp(-loglik / tokens)
    bits_per_byte: float | None
    vocabulary: str  # digest of the tokenizer; token perplexities compare only where it is equal
    window: int | None = None  # tokens a window: the setting, or what the model was made for where that is less

    def summary(self) -> str:
        return f"{self.perplexity:.3f}" if self.perplexity is not None else "not finite"


class DocumentLikelihood(NamedTuple):
    """One row of ``documents.parquet``."""

    doc_id: int  # position in the file
    loglik: float  # nats; NaN or infinite for a broken model
    tokens: int  # scored
    bytes: int  # of the text in UTF-8


def pin_documents(settings: PerplexitySettings, root: Path, hashes: HashMemo) -> HeldOutText:
    """The held-out documents with their sha256; a relative path is relative to ``root``.

    Raises:
        InvalidInput: when there is no such file, or its first document is not as the settings say.
    """
    path = (root / settings.documents).absolute()
    if not path.is_file():
        raise InvalidInput(
            f"perplexity.documents: {settings.documents}",
            found="no such file",
            expected="jsonl with one document a line, or plain text with one a paragraph, relative to the profile",
        )
    field = settings.field if path.suffix in (".jsonl", ".json", ".ndjson") else ""
    with path.open("rb") as file:
        first = file.readline() if field else b""
    if field:
        _field_of_line(first, field, path, 1)
    return HeldOutText(path=path, sha256=hashes.sha256(path), field=field)


@stage("perplexity", version=1, subject="model")
def perplexity(
    out: Path, model: Model, documents: HeldOutText, windows: WindowSettings, runtime: Runtime
) -> Likelihoods:
    """Log-likelihood of every held-out document under ``model``, in ``documents.parquet``.

    Raises:
        InvalidInput: when the model cannot be loaded, the documents cannot be read, or there are none.
    """
    texts = read_texts(documents, windows.documents)
    with load_model(model, dtype=windows.dtype, device=runtime.device) as loaded:
        rows, window = _likelihoods(loaded, model, texts, windows)
        vocabulary = tokenizer_digest(loaded.tokenizer)
    write_documents(out / FILE, rows)
    return total_likelihood(model.name, rows, vocabulary, window)


def total_likelihood(model: str, rows: Sequence[DocumentLikelihood], vocabulary: str, window: int) -> Likelihoods:
    """What documents with their likelihoods say together; ``model`` is whose they are."""
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
        vocabulary=vocabulary,
        window=window,
    )


def read_texts(documents: HeldOutText, most: int | None) -> tuple[tuple[int, str], ...]:
    """``(doc_id, text)`` of the first ``most`` documents that are not empty.

    Raises:
        InvalidInput: when the file changed after it was pinned, a line is not as expected, or there is no document.
    """
    content = documents.path.read_bytes()
    if hashlib.sha256(content).hexdigest() != documents.sha256:
        raise InvalidInput(str(documents.path), found="changed while the run was going on", remedy="run again")
    texts: list[tuple[int, str]] = []
    for doc_id, text in enumerate(_split(content, documents)):
        if text and not text.isspace():
            texts.append((doc_id, text))
        if len(texts) == most:
            break
    if not texts:
        raise InvalidInput(str(documents.path), found="no document", expected="held-out text")
    return tuple(texts)


def write_documents(path: Path, rows: Sequence[DocumentLikelihood]) -> None:
    """Store likelihoods as parquet, one row a document."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    columns = {name: [getattr(row, name) for row in rows] for name in DocumentLikelihood._fields}
    pq.write_table(pa.table(columns), path, compression="zstd")


def read_documents(directory: Path) -> tuple[DocumentLikelihood, ...]:
    """The documents of an artifact of this stage."""
    import pyarrow.parquet as pq

    columns = pq.read_table(directory / FILE).to_pydict()
    return tuple(
        DocumentLikelihood(*row) for row in zip(*(columns[n] for n in DocumentLikelihood._fields), strict=True)
    )


def _split(content: bytes, documents: HeldOutText) -> Iterator[str]:
    if documents.field:
        for number, line in enumerate(content.splitlines(), start=1):
            yield _field_of_line(line, documents.field, documents.path, number) if line.strip() else ""
        return
    try:
        yield from content.decode().replace("\r\n", "\n").split("\n\n")
    except UnicodeDecodeError as error:
        raise InvalidInput(str(documents.path), found=f"not UTF-8: {error}", expected="text") from None


def _field_of_line(line: bytes, field: str, path: Path, number: int) -> str:
    document = parse_line(line, path, number)
    text = document.get(field)
    if not isinstance(text, str):
        found = f"no field {field!r}" if field not in document else f"{type(text).__name__} in field {field!r}"
        remedy = suggest(field, document) if field not in document and document else ""
        expected = "text, in the field that perplexity.field names"
        raise InvalidInput(line_place(path, number), found=found, expected=expected, remedy=remedy)
    return text


class TextWindow(NamedTuple):
    """A part of a document that is scored at once."""

    row: int  # index of its document
    start: int  # of its targets among the document's scored tokens
    inputs: list[int]  # tokens that the model reads
    targets: list[int]  # tokens that the last so many of them predict


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
    embeddings = int(loaded.network.get_input_embeddings().num_embeddings)
    cut: list[TextWindow] = []
    tokens = [0] * len(texts)
    for row, (_, text) in enumerate(texts):
        encoded = loaded.tokenizer.encode(text, add_special_tokens=False)
        if encoded and max(encoded) >= embeddings:
            raise InvalidInput(
                f"{model.name} ({model.directory})",
                found=f"a tokenizer with token {max(encoded)} over an embedding of {embeddings} rows",
                expected="a tokenizer that belongs to the weights",
            )
        sequence = encoded if loaded.prefix is None else [loaded.prefix, *encoded]
        for start in range(0, len(sequence) - 1, length):
            end = min(start + length, len(sequence) - 1)
            cut.append(TextWindow(row, start, sequence[max(0, end - length) : end], sequence[start + 1 : end + 1]))
        tokens[row] = max(0, len(sequence) - 1)
    if not any(tokens):
        raise InvalidInput(f"{model.name} ({model.directory})", found="a tokenizer that finds no token in any document")
    return Reading(length, tuple(tokens), tuple(cut))


def token_logliks(loaded: LoadedModel, reading: Reading, batch_size: int) -> Iterator[tuple[TextWindow, torch.Tensor]]:
    """Each window with the log-likelihoods of its targets: nats, float64, [targets]. Longest windows first."""
    embeddings = int(loaded.network.get_input_embeddings().num_embeddings)
    done, total = 0, sum(reading.tokens)
    for batch in _batches(reading.cut, batch_size, embeddings):
        for window, logliks in zip(batch, _score(loaded.network, batch), strict=True):
            done += len(window.targets)
            yield window, logliks
        advance(done, total, "tokens")


def _likelihoods(
    loaded: LoadedModel, model: Model, texts: Sequence[tuple[int, str]], windows: WindowSettings
) -> tuple[list[DocumentLikelihood], int]:
    reading = read_by(loaded, model, texts, windows)
    sums = [0.0] * len(texts)
    for window, logliks in token_logliks(loaded, reading, windows.batch_size):
        sums[window.row] += float(logliks.sum())
    return document_rows(texts, reading, sums), reading.length


def document_rows(
    texts: Sequence[tuple[int, str]], reading: Reading, logliks: Sequence[float]
) -> list[DocumentLikelihood]:
    """A row for each document of which anything was scored."""
    return [
        DocumentLikelihood(doc_id, logliks[row], reading.tokens[row], len(text.encode()))
        for row, (doc_id, text) in enumerate(texts)
        if reading.tokens[row]
    ]


def _batches(cut: Sequence[TextWindow], batch_size: int, vocabulary: int) -> Iterator[list[TextWindow]]:
    """Windows of like length together, longest first, so that memory runs out at once or never."""
    ordered = sorted(cut, key=lambda window: len(window.inputs), reverse=True)
    start = 0
    while start < len(ordered):
        fits = max(1, _LOGITS // (vocabulary * len(ordered[start].inputs)))
        step = min(batch_size, fits)
        yield ordered[start : start + step]
        start += step


def _score(network: Any, batch: Sequence[TextWindow]) -> list[torch.Tensor]:
    """Log-likelihoods of each window's targets, nats."""
    import torch

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
