"""Define the types of the files that lm-eval writes: a results file, and one line of a samples file.

These files are untrusted, so every value that a gate reads has a type here; all other values are ignored. The shapes
follow ``lm_eval.result_schema``. Keys that some versions of lm-eval omit have a default.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from mergegate.merge_core.errors import InvalidInput
from mergegate.merge_core.parsing import JsonBounds, expectation, format_value, join_expectations, parse_json

# MMLU has 14,042 documents. Each takes 0.6 kB of memory and 30 microseconds to read.
MAX_SAMPLES = 200_000
MAX_SAMPLE_BYTES = 16 << 20
MAX_RESULTS_BYTES = 64 << 20
_BOUNDS = JsonBounds(size=MAX_RESULTS_BYTES)
_LINE_BOUNDS = JsonBounds(size=MAX_SAMPLE_BYTES, values=200_000)
_AGAIN = "copy the file again, or run lm-eval again with --output_path and --log_samples"

M = TypeVar("M", bound=BaseModel)
_Hash = Annotated[str, Field(max_length=128)]


class _Written(BaseModel):
    """Part of an lm-eval file. Types are strict: text is never read as a number, nor a number as a boolean."""

    model_config = ConfigDict(frozen=True, strict=True, extra="ignore")


class ListedMetric(_Written):
    """One entry of a task's ``metric_list``."""

    metric: str
    aggregation: str | None = None  # None: lm-eval's default for the metric


class WrittenTask(_Written):
    """Configuration of one task."""

    output_type: str | None = None
    process_results: str | None = None  # source of a function
    metric_list: list[ListedMetric] | None = None
    doc_to_target: str | int | list[Any] | None = None
    repeats: int | None = None


class SampleCount(_Written):
    """Number of documents in one task, and number of scored ones."""

    original: int  # documents in the task
    effective: int  # documents that were scored


class WrittenConfig(_Written):
    """Settings with which lm-eval was started."""

    gen_kwargs: dict[str, Any] | str | None = None
    model_dtype: str | None = None
    batch_size: int | str | None = None


class WrittenResults(_Written):
    """Content of a results file."""

    results: dict[str, dict[str, Any]]  # by task and 'acc,none'; checked when a number is read
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
    """One line of a samples file: one document under one filter. ``metrics`` lists the keys of its scores."""

    doc_id: Annotated[int, Field(ge=0, lt=1 << 53)]
    filter: str
    metrics: Annotated[list[str], Field(max_length=64)]
    doc_hash: _Hash
    prompt_hash: _Hash
    target_hash: _Hash


def parse_written(model: type[M], text: bytes, location: str) -> tuple[M, Mapping[str, Any]]:
    """Parse a results file (``WrittenResults``) or a line of a samples file (``WrittenSample``).

    The result is the typed value, and the same content as plain data.

    Raises:
        InvalidInput: If ``text`` is not JSON or has a value of the wrong type; the message names the key.
    """
    is_sample = issubclass(model, WrittenSample)
    bounds = _LINE_BOUNDS if is_sample else _BOUNDS
    expected = "one sample per line; the file may be cut off" if is_sample else "a complete file"
    problem = f"not a {'sample' if is_sample else 'results file'} of lm-eval"
    content: Any = parse_json(text, location, bounds=bounds, expected=expected)
    try:
        return model.model_validate(content), content
    except ValidationError as error:
        faults = error.errors()
    first = faults[0]
    if first["type"] == "missing":
        raise InvalidInput(
            location,
            found=f"{problem}: {_key(first['loc'])} is missing",
            expected=", ".join(
                field.alias or name for name, field in model.model_fields.items() if field.is_required()
            ),
            remedy=_AGAIN,
        )
    key_path, value = _located(first["loc"], content)
    # pydantic reports one error for each type that a value may have.
    expectations = [
        expectation(fault["type"], fault.get("ctx") or {}, str(fault["msg"]))
        for fault in faults
        if _located(fault["loc"], content)[0] == key_path
    ]
    raise InvalidInput(
        f"{location}: {_key(key_path)}" if key_path else location,
        found=format_value(value) if key_path else f"{problem}: {format_value(value)}",
        expected=join_expectations(expectations).removeprefix("expected "),
        remedy=_AGAIN,
    )


def _located(key_path: Sequence[str | int], content: object) -> tuple[tuple[str | int, ...], object]:
    """Return the part of ``key_path`` that exists in ``content``, without pydantic's names of types, and its value."""
    keys: tuple[str | int, ...] = ()
    for key in key_path:
        is_item = isinstance(content, list) and isinstance(key, int)
        if not is_item and not (isinstance(content, Mapping) and key in content):
            break
        content = content[key]  # type: ignore[index]  # a list or a mapping
        keys = (*keys, key)
    return keys, content


def _key(key_path: Sequence[str | int]) -> str:
    return "".join(f"[{key}]" if isinstance(key, int) else f".{key}" for key in key_path).removeprefix(".")
