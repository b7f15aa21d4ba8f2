"""Define the results that a gate reads from files of another library, and compare the conditions of two results.

The files are untrusted, so every value that a gate reads has a type, in a subclass of ``Logged``; other values are
ignored.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from mergegate.merge_core.errors import InvalidInput
from mergegate.merge_core.parsing import expectation, format_value, join_expectations
from mergegate.tasks.quality.evaluation.scoring.document_scores import DocumentScore

LM_EVAL = "lm-eval"
INSPECT = "inspect_ai"
EXPORTED = "inspect_ai, exported by mergegate"  # has lm-eval's hashes of documents, prompts and targets
# MMLU has 14,042 documents. Each takes 0.6 kB of memory and 30 microseconds to read.
MAX_SAMPLES = 200_000  # of all epochs
L = TypeVar("L", bound=BaseModel)


@dataclass(frozen=True)
class TaskResults:
    """Results of one task, or one group of tasks, from the files of another library."""

    task: str
    outcomes: tuple[DocumentScore, ...]  # under metrics that are means over documents
    format: str  # LM_EVAL, INSPECT or EXPORTED
    version: str  # of lm-eval, or name and version of another library that scored the documents
    conditions: Mapping[str, str]  # scores are comparable only if all of them are equal
    precision: Mapping[str, str]  # settings that move scores by tenths of a point; differences are reported
    file: Path
    # Names of documents that the file does not number, by the numbers that stand for them in ``outcomes``.
    names: Mapping[int, str] = field(default_factory=dict)
    warnings: tuple[str, ...] = ()  # properties of the results that the gate does not judge


class LoggedResults(ABC):
    """One file with results of one model, in the format of some library."""

    path: Path
    date: str  # orders the files of one library by age

    @property
    @abstractmethod
    def model(self) -> str:
        """Name of the evaluated model, with everything else that tells models in one directory apart."""

    @property
    def group(self) -> str:
        """Group to which the only task of the file belongs; empty if unknown."""
        return ""

    @property
    @abstractmethod
    def task_names(self) -> tuple[str, ...]:
        """Names of all tasks and groups of tasks with results in this file."""

    @abstractmethod
    def has(self, task: str) -> bool:
        """Return whether the file has results of a task or a group of tasks."""

    @abstractmethod
    def read(self, task: str, cluster_field: str | None) -> TaskResults:
        """Read the results of a task or a group of tasks. See ``read_task``."""


class Logged(BaseModel):
    """Part of a file. Types are strict: text is never read as a number, nor a number as a boolean."""

    model_config = ConfigDict(frozen=True, strict=True, extra="ignore", defer_build=True)  # most commands read no file


def parse_logged(model: type[L], content: object, location: str, kind: str, remedy: str) -> L:
    """Return part of a file as a typed value. ``kind`` names the part in messages: ``a sample of lm-eval``."""
    try:
        return model.model_validate(content)
    except ValidationError as error:
        faults = error.errors()
    key_path, value = _located(faults[0]["loc"], content)
    if faults[0]["type"] == "missing":
        names = (field.alias or name for name, field in model.model_fields.items() if field.is_required())
        missing = _key((*key_path, faults[0]["loc"][-1]))
        raise InvalidInput(
            location, found=f"not {kind}: {missing} is missing", expected=", ".join(names), remedy=remedy
        )
    # pydantic reports one error for each type that a value may have.
    expectations = [
        expectation(fault["type"], fault.get("ctx") or {}, str(fault["msg"]))
        for fault in faults
        if _located(fault["loc"], content)[0] == key_path
    ]
    raise InvalidInput(
        f"{location}: {_key(key_path)}" if key_path else location,
        found=format_value(value) if key_path else f"not {kind}: {format_value(value)}",
        expected=join_expectations(expectations).removeprefix("expected "),
        remedy=remedy,
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
    key = "".join(f"[{key}]" if isinstance(key, int) else f".{key}" for key in key_path)
    return key.removeprefix(".")[:200]


def require_same_conditions(reference: TaskResults, merge: TaskResults, location: str) -> None:
    """Check that two models were evaluated under the same conditions.

    Results in different formats can be compared only if both have lm-eval's hashes of the documents, and the conditions
    that both formats have are equal. Documents and prompts are compared later, when they are paired.

    Raises:
        InvalidInput: If a condition differs; the message names the first one.
    """
    both = (reference, merge)
    is_mixed = reference.format != merge.format
    if is_mixed and INSPECT in (reference.format, merge.format):
        raise InvalidInput(
            location,
            found=f"results of {reference.format} in {reference.file}, of {merge.format} in {merge.file}",
            expected="both in one format, because the documents of the two cannot be matched",
            remedy="evaluate both models with the same library. Of all inspect_ai logs, only those that mergegate "
            "exported have lm-eval's hashes of the documents",
        )
    for name, *values in _pairs(reference.conditions, merge.conditions, is_mixed):
        if values[0] != values[1]:
            texts = [text if len(text := str(value)) <= 40 else f"{text[:12]}…" for value in values]
            library = LM_EVAL if LM_EVAL in (reference.format, merge.format) else INSPECT
            raise InvalidInput(
                location,
                found=f"different {name}: {texts[0]} in {reference.file}, {texts[1]} in {merge.file}",
                expected="the same conditions for both models",
                remedy=f"run {library} on both with the same version and settings",
            )
    if different := reference.names.items() ^ merge.names.items():
        _, name = min(different, key=lambda item: item[1])
        side = next(results for results in both if name in results.names.values())
        raise InvalidInput(
            location,
            found=f"a score of sample {name!r:.80} on one side only, in {side.file}",
            expected="the same samples on both sides",
            remedy="evaluate both models with the same samples",
        )


def precision_differences(reference: TaskResults, merge: TaskResults) -> tuple[str, ...]:
    """Describe each ``precision`` setting that differs between two results, in one phrase each."""
    pairs = _pairs(reference.precision, merge.precision, reference.format != merge.format)
    return tuple(f"{name} {first} and {second}" for name, first, second in pairs if first != second)


def _pairs(
    reference: Mapping[str, str], merge: Mapping[str, str], is_mixed: bool
) -> list[tuple[str, str | None, str | None]]:
    """Return the values of each setting, or only of the settings in both formats. None: not set."""
    names = [name for name in reference if name in merge] if is_mixed else dict.fromkeys((*reference, *merge))
    return [(name, reference.get(name), merge.get(name)) for name in names]
