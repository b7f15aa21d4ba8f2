"""Typed contents of the files that lm-eval writes: a results file, and one line of a samples file.

A file may come from anyone, so every value that a gate reads has its type here, and nothing else of the file is
looked at. The shapes are those of ``lm_eval.result_schema``; keys that a version of lm-eval may leave out have a
default.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from mergegate.merge_core.errors import InvalidInput
from mergegate.merge_core.parsing import (
    JsonBounds,
    expectation,
    format_value,
    join_expectations,
    line_location,
    parse_json,
    read_plain,
)

# MMLU has 14,042 documents. Each takes 0.6 kB of memory here, and 30 microseconds.
MAX_SAMPLES = 200_000
MAX_SAMPLE_BYTES = 16 << 20
_BOUNDS = JsonBounds(size=64 << 20)
_LINE_BOUNDS = JsonBounds(size=MAX_SAMPLE_BYTES, values=200_000)
_AGAIN = "copy the file again, or run lm-eval again with --output_path and --log_samples"

M = TypeVar("M", bound=BaseModel)
_Hash = Annotated[str, Field(max_length=128)]


class _Written(BaseModel):
    """Part of a file of lm-eval. Types are strict: a text is never read as a number, nor a number as a switch."""

    model_config = ConfigDict(frozen=True, strict=True, extra="ignore")


class ListedMetric(_Written):
    """One entry of a task's ``metric_list``."""

    metric: str
    aggregation: str | None = None  # None: lm-eval's own for this metric


class WrittenTask(_Written):
    """Configuration of one task."""

    output_type: str | None = None
    process_results: str | None = None  # text of a function
    metric_list: list[ListedMetric] | None = None
    doc_to_target: str | int | list[Any] | None = None


class SampleCount(_Written):
    """Number of documents of one task."""

    original: int  # that the task has
    effective: int  # that were scored


class WrittenConfig(_Written):
    """How lm-eval was started."""

    gen_kwargs: dict[str, Any] | str | None = None
    model_dtype: str | None = None
    batch_size: int | str | None = None


class WrittenResults(_Written):
    """A results file."""

    results: dict[str, dict[str, Any]]  # by task and 'acc,none'; checked where a number is read
    configs: dict[str, WrittenTask]
    lm_eval_version: str
    group_subtasks: dict[str, list[str]] = Field(default_factory=dict)
    versions: dict[str, str | int | float | None] = Field(default_factory=dict)
    higher_is_better: dict[str, dict[str, bool | None]] = Field(default_factory=dict)
    n_samples: dict[str, SampleCount] = Field(default_factory=dict, alias="n-samples")
    task_hashes: dict[str, str] = Field(default_factory=dict)
    config: WrittenConfig = WrittenConfig()
    transformers_version: str | None = None
    max_length: int | None = None
    model_source: str | None = None
    model_name: str | None = None
    system_instruction_sha: str | None = None
    fewshot_as_multiturn: bool | None = None
    chat_template_sha: str | None = None


class WrittenSample(_Written):
    """One line of a samples file: one document under one filter. ``metrics`` names the keys of its scores."""

    doc_id: Annotated[int, Field(ge=0, lt=1 << 53)]
    filter: str
    metrics: Annotated[list[str], Field(max_length=64)]
    doc_hash: _Hash
    prompt_hash: _Hash
    target_hash: _Hash


def read_results_file(path: Path) -> WrittenResults:
    """Read and check a results file.

    Raises:
        InvalidInput: for a file that cannot be read, is not JSON, or has a value of another type, naming its key.
    """
    content = parse_json(
        read_plain(path, _BOUNDS.size), str(path), bounds=_BOUNDS, expected="a file that is not cut off"
    )
    return _checked(WrittenResults, content, str(path), "not a results file of lm-eval")


def parse_sample(line: bytes, path: Path, number: int) -> tuple[WrittenSample, Mapping[str, Any]]:
    """Parse line ``number`` (from 1) of a samples file.

    Returns:
        The typed sample, and the whole line as plain data.

    Raises:
        InvalidInput: for a line that is not JSON, or has a value of another type, naming line and key.
    """
    where = line_location(path, number)
    content = parse_json(line, where, bounds=_LINE_BOUNDS, expected="one sample a line; the file may be cut off")
    return _checked(WrittenSample, content, where, "not a sample of lm-eval"), content


def _checked(model: type[M], content: object, where: str, otherwise: str) -> M:
    try:
        return model.model_validate(content)
    except ValidationError as error:
        faults = error.errors()
    first = faults[0]
    if first["type"] == "missing":
        raise InvalidInput(
            where,
            found=f"{otherwise}: {_key(first['loc'])} is missing",
            expected=", ".join(
                field.alias or name for name, field in model.model_fields.items() if field.is_required()
            ),
            remedy=_AGAIN,
        )
    place, value = _located(first["loc"], content)
    # A value that may be of several types has one fault for each of them.
    said = [
        expectation(fault["type"], fault.get("ctx") or {}, str(fault["msg"]))
        for fault in faults
        if _located(fault["loc"], content)[0] == place
    ]
    raise InvalidInput(
        f"{where}: {_key(place)}" if place else where,
        found=format_value(value) if place else f"{otherwise}: {format_value(value)}",
        expected=join_expectations(said).removeprefix("expected "),
        remedy=_AGAIN,
    )


def _located(place: Sequence[str | int], content: object) -> tuple[tuple[str | int, ...], object]:
    """The keys of ``place`` that are in ``content``, and the value there: pydantic adds names of types to them."""
    keys: tuple[str | int, ...] = ()
    for key in place:
        is_item = isinstance(content, list) and isinstance(key, int)
        if not is_item and not (isinstance(content, Mapping) and key in content):
            break
        content = content[key]  # type: ignore[index]  # one of the two
        keys = (*keys, key)
    return keys, content


def _key(place: Sequence[str | int]) -> str:
    return "".join(f"[{key}]" if isinstance(key, int) else f".{key}" for key in place).removeprefix(".")
