"""Define the types of the logs that inspect_ai writes, and read their parts: the header, then one sample at a time.

A log is one JSON file (``.json``), or a zip with a JSON file for the header and one for each sample (``.eval``).
inspect_ai compresses the parts with zstd, which pyarrow can read. Logs are untrusted: their sizes and numbers have
limits, nothing is extracted to disk, and every value that a gate reads has a type here. The shapes follow
``inspect_ai.log.EvalLog``, version 2 of the format. Keys that some versions of inspect_ai omit have a default.
"""

from __future__ import annotations

import os
import re
import struct
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, BinaryIO

from pydantic import Field

from mergegate.merge_core.errors import InvalidInput
from mergegate.merge_core.parsing import (
    JsonBounds,
    check_zip_directory,
    format_value,
    open_buffered,
    parse_json,
    parsing_errors,
    read_plain,
)
from mergegate.tasks.quality.evaluation.results.contract import MAX_SAMPLES, L, Logged, parse_logged

# A sample holds every message and event of its conversation. Most have 10 kB, and long agent runs some MB.
MAX_SAMPLE_BYTES = 64 << 20
MAX_HEADER_BYTES = 64 << 20
MAX_JSON_LOG_BYTES = 256 << 20
_MAX_TOTAL_BYTES = 16 << 30  # of all samples, decompressed
_MAX_MEMBERS = MAX_SAMPLES + 50_000  # samples, and the journal of the run
_SAMPLE_NAME = re.compile(r"samples/(.+)_epoch_(\d{1,9})\.json", re.DOTALL)
_ZSTD = 93  # compression method in zip files
_SAMPLE_BOUNDS = JsonBounds(size=MAX_SAMPLE_BYTES, values=2_000_000, depth=256)
_LOG_BOUNDS = JsonBounds(size=MAX_JSON_LOG_BYTES, values=8_000_000, depth=256)
DAMAGED = "copy the log again, or run inspect_ai again"
REWRITE = "write the log again with read_eval_log and write_eval_log of the current inspect_ai"

SampleId = int | Annotated[str, Field(max_length=4096)]
ScoreValue = bool | int | float | str | list[Any] | dict[str, Any] | None


class LoggedDataset(Logged):
    """Data that was evaluated."""

    sample_ids: Annotated[list[SampleId], Field(max_length=MAX_SAMPLES)] | None = None


class LoggedScorer(Logged):
    """One scorer of the task, as it was configured."""

    name: str
    options: dict[str, Any] | None = None
    metrics: list[Any] | dict[str, Any] | None = None


class LoggedSpec(Logged):
    """Task, model and settings of an evaluation."""

    task: str
    task_version: int | str = 0
    task_registry_name: str | None = None
    task_args: dict[str, Any] = Field(default_factory=dict)
    created: str
    dataset: LoggedDataset
    model: str
    model_args: dict[str, Any] = Field(default_factory=dict)
    model_generate_config: dict[str, Any] = Field(default_factory=dict)
    model_roles: dict[str, Any] | None = None
    config: dict[str, Any]
    packages: dict[str, str] = Field(default_factory=dict)
    scorers: list[LoggedScorer] | None = None
    metadata: dict[str, Any] | None = None


class LoggedStep(Logged):
    """One solver."""

    solver: str
    params: dict[str, Any] = Field(default_factory=dict)


class LoggedPlan(Logged):
    """Solvers and generation settings of the task."""

    steps: list[LoggedStep] = Field(default_factory=list)
    finish: LoggedStep | None = None
    config: dict[str, Any] = Field(default_factory=dict)


class LoggedMetric(Logged):
    """Value of one metric over all samples."""

    value: Any = None
    group: str | None = None


class LoggedScore(Logged):
    """Metrics of one scorer, or of one key of the dictionaries that a scorer returns."""

    name: str
    scorer: str
    reducer: str | None = None  # how the epochs of a sample are combined; None: their mean
    metadata: dict[str, Any] | None = None
    metrics: dict[str, LoggedMetric] = Field(default_factory=dict)


class LoggedTotals(Logged):
    """Results over all samples."""

    total_samples: int
    completed_samples: int
    logged_samples: int | None = None
    early_stopping: dict[str, Any] | None = None
    scores: Annotated[list[LoggedScore], Field(max_length=1000)]


class LogHeader(Logged):
    """Everything in a log except its samples."""

    version: int
    status: str
    eval: LoggedSpec
    plan: LoggedPlan = LoggedPlan()
    results: LoggedTotals | None = None
    invalidated: bool = False
    config_updates: list[dict[str, Any]] | None = None


class ScoreNotes(Logged):
    """Metadata of a score, as far as a gate reads it. The rest, such as explanations, can be large."""

    chance: Any = None


class SampleScore(Logged):
    """Score of one sample by one scorer."""

    value: ScoreValue
    metadata: ScoreNotes | None = None
    history: list[Any] = Field(default_factory=list)


class LoggedChoice(Logged):
    """One answer of the model."""

    stop_reason: str | None = None


class LoggedOutput(Logged):
    """Last output of the model."""

    choices: list[LoggedChoice] = Field(default_factory=list)


class SampleLimit(Logged):
    """Limit that ended a sample."""

    type: str


class LoggedSummary(Logged):
    """The scores of one sample in one epoch."""

    id: SampleId
    epoch: int
    scores: dict[str, SampleScore] | None = None
    uuid: str | None = None


class LoggedSample(LoggedSummary):
    """One sample in one epoch."""

    epoch: Annotated[int, Field(ge=1)]
    input: str | list[dict[str, Any]]
    choices: list[str] | None = None
    target: str | list[str]
    messages: list[dict[str, Any]] = Field(default_factory=list)
    output: LoggedOutput = LoggedOutput()
    metadata: dict[str, Any] = Field(default_factory=dict)
    attachments: dict[str, str] = Field(default_factory=dict)
    error: dict[str, Any] | None = None
    limit: SampleLimit | None = None
    invalidation: dict[str, Any] | None = None


class ReducedScore(Logged):
    """Score of one sample over all its epochs."""

    sample_id: SampleId | None = None
    value: ScoreValue


class LoggedReduction(Logged):
    """Scores of all samples by one scorer, over all epochs."""

    scorer: str
    reducer: str | None = None
    samples: Annotated[list[ReducedScore], Field(max_length=MAX_SAMPLES)]


class RepeatedScores(Logged):
    """Parts of a log in which the scores of its samples are repeated. None: the log does not have the part."""

    summaries: list[LoggedSummary] | None = None
    reductions: list[LoggedReduction] | None = None


@contextmanager
def open_samples(path: Path) -> Iterator[_EvalLog | _JsonLog]:
    """Open a log to read its header, its samples, and the parts that repeat their scores."""
    try:
        file = open_buffered(path)
    except FileNotFoundError:
        raise InvalidInput(str(path), found="no such file", expected="a log of inspect_ai") from None
    with file:
        yield _EvalLog(file, path) if file.read(4) == b"PK\x03\x04" else _JsonLog(path)


def _parse(model: type[L], content: object, location: str) -> L:
    kind = "a sample" if model is LoggedSample else "a log"
    return parse_logged(model, content, location, f"{kind} of inspect_ai", DAMAGED)


class _JsonLog:
    """A log in one JSON file."""

    def __init__(self, path: Path) -> None:
        remedy = f"convert it: inspect log convert {path.name} --to eval --output-dir DIRECTORY"
        content = read_plain(path, MAX_JSON_LOG_BYTES, remedy=remedy)
        parsed = parse_json(content, str(path), bounds=_LOG_BOUNDS, expected="a complete log of inspect_ai")
        if not isinstance(parsed, dict):
            raise InvalidInput(str(path), found=format_value(parsed), expected="a log of inspect_ai", remedy=DAMAGED)
        self._path, self._content = path, parsed

    def header(self) -> LogHeader:
        return _parse(LogHeader, self._content, str(self._path))

    def samples(self) -> Iterator[LoggedSample]:
        samples = self._content.get("samples")
        if not isinstance(samples, list):
            raise InvalidInput(
                f"{self._path}: samples",
                found=format_value(samples),
                expected="a list of samples",
                remedy="run inspect_ai without --no-log-samples",
            )
        for position, content in enumerate(samples):
            yield _parse(LoggedSample, content, f"{self._path}: samples[{position}]")

    def repeated_scores(self) -> RepeatedScores:
        return _parse(RepeatedScores, {"reductions": self._content.get("reductions")}, str(self._path))


class _EvalLog:
    """A log in a zip. Names of members are never used as paths, because no member is extracted."""

    def __init__(self, file: BinaryIO, path: Path) -> None:
        self._file, self._path = file, path
        with parsing_errors(str(path), "not a readable zip file", expected="a complete .eval log", remedy=DAMAGED):
            check_zip_directory(file, os.fstat(file.fileno()).st_size, path, most=_MAX_MEMBERS)
            self._zip = zipfile.ZipFile(file)
        members = self._zip.infolist()
        self._members = {info.filename: info for info in members}
        if len(self._members) < len(members) or len({info.header_offset for info in members}) < len(members):
            raise InvalidInput(str(path), found="a zip that contains a part twice", remedy=DAMAGED)

    def header(self) -> LogHeader:
        if "header.json" not in self._members:
            raise InvalidInput(
                str(self._path),
                found="no part header.json",
                expected="the log of a complete evaluation",
                remedy=f"complete the evaluation: inspect eval-retry {self._path.name}",
            )
        content = self._json("header.json", MAX_HEADER_BYTES, _LOG_BOUNDS)
        return _parse(LogHeader, content, str(self._path))

    def samples(self) -> Iterator[LoggedSample]:
        """Yield all samples, of which only one is in memory at a time."""
        total = 0
        for name, info in self._members.items():
            if not name.startswith("samples/"):
                continue
            location = f"{self._path}: {name!r:.200}"
            total += info.file_size
            if total > _MAX_TOTAL_BYTES:
                raise InvalidInput(
                    str(self._path), found="samples that are too large", expected=f"at most {_MAX_TOTAL_BYTES} bytes"
                )
            match = _SAMPLE_NAME.fullmatch(name)
            if match is None:
                raise InvalidInput(
                    location, found="a sample in several parts", expected="samples/ID_epoch_NUMBER.json", remedy=REWRITE
                )
            sample = _parse(LoggedSample, self._json(name, MAX_SAMPLE_BYTES, _SAMPLE_BOUNDS), location)
            if (match[1], int(match[2])) != (str(sample.id), sample.epoch):
                raise InvalidInput(
                    location,
                    found=f"sample {sample.id!r:.80} of epoch {sample.epoch}",
                    expected="the sample in the name of the part",
                    remedy=DAMAGED,
                )
            yield sample

    def repeated_scores(self) -> RepeatedScores:
        names = [name for name in ("summaries", "reductions") if f"{name}.json" in self._members]
        contents = {name: self._json(f"{name}.json", MAX_JSON_LOG_BYTES, _LOG_BOUNDS) for name in names}
        return _parse(RepeatedScores, contents, str(self._path))

    def _json(self, name: str, most: int, bounds: JsonBounds) -> object:
        """Return a part of at most ``most`` bytes, whose size and checksum agree with the list of parts."""
        location, info = f"{self._path}: {name!r:.200}", self._members[name]
        if info.file_size > most or info.compress_size > most:
            raise InvalidInput(location, found=f"{info.file_size} bytes", expected=f"at most {most} bytes")
        if info.flag_bits & 1 or info.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED, _ZSTD):
            raise InvalidInput(
                location,
                found="an encrypted part" if info.flag_bits & 1 else f"compression method {info.compress_type}",
                expected="zstd, deflate or no compression",
                remedy=REWRITE,
            )
        with parsing_errors(location, "damaged", remedy=DAMAGED):
            if info.compress_type == _ZSTD:
                data = self._decompress(info)
            else:
                with self._zip.open(info) as member:
                    data = member.read(info.file_size + 1)
        if len(data) != info.file_size or zlib.crc32(data) != info.CRC:
            raise InvalidInput(location, found="the bytes differ from their checksum in the zip", remedy=DAMAGED)
        return parse_json(data, location, bounds=bounds)

    def _decompress(self, info: zipfile.ZipInfo) -> bytes:
        """Decompress a zstd member, which ``zipfile`` supports only since Python 3.14."""
        import pyarrow as pa

        self._file.seek(info.header_offset)
        header = self._file.read(30)
        if len(header) < 30 or header[:4] != b"PK\x03\x04":
            raise ValueError("the local header is missing")
        self._file.seek(sum(struct.unpack("<HH", header[26:30])), os.SEEK_CUR)
        with pa.CompressedInputStream(pa.BufferReader(self._file.read(info.compress_size)), "zstd") as stream:
            return bytes(stream.read(info.file_size + 1))
