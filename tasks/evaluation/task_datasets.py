"""Which dataset a task is loaded from by name, as its configuration says it. Pure.

A task names a dataset of the Hub (``dataset_path: org/name``), files in one (``dataset_path: json`` with ``data_files:
hf://datasets/org/name/…``), or files at some address of the web. None of these lie beside the task: where a profile
names a directory for them (``evaluate.data``), they are looked for there (``tasks.evaluation.mirror``).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

# A file of a dataset on the Hub: repository, perhaps a revision, path in it.
_ON_THE_HUB = re.compile(
    r"hf://datasets/(?P<repo>[^/@]+/[^/@]+)(?:@(?P<commit>[^/]+))?/(?P<file>.+)"
    r"|https://huggingface\.co/datasets/(?P<web>[^/]+/[^/]+)/(?:resolve|raw|blob)/(?P<branch>[^/]+)/(?P<path>[^?]+).*"
)


@dataclass(frozen=True)
class TaskDataset:
    """A dataset that a task is loaded from, and which parts of it."""

    task: str
    path: str  # 'cais/mmlu'; empty: files at addresses, which only files called by the task can stand in for
    config: str | None  # 'anatomy'
    evaluated: str  # the split whose documents are asked
    examples: str | None  # the split that few-shot examples are drawn from; None: none is named
    files: tuple[tuple[str, str], ...] = ()  # split and file in the dataset, where the task names files
    reader: str = ""  # 'json': the task says how files are read; empty: the dataset does
    revision: str = ""  # that the task wants; empty: any
    num_fewshot: int | None = None  # examples, as the task says; None: it says nothing

    @property
    def key(self) -> tuple[str, str | None]:
        """What ``load_dataset`` is called with for it."""
        return self.reader or self.path, self.config

    def __str__(self) -> str:
        return f"{self.path or 'files at an address'}{f' ({self.config})' if self.config else ''}"


def asked_dataset(task: str, config: Mapping[str, Any]) -> TaskDataset | None:
    """The dataset of a task by name; None for one that loads none.

    Args:
        task: What lm-eval calls it.
        config: As its YAML says it, with all that it includes.
    """
    said = str(config.get("dataset_path") or "")
    if not said or config.get("custom_dataset"):
        return None
    splits = [config.get(key) for key in ("test_split", "validation_split", "training_split")]
    given = config.get("fewshot_config")
    fewshot = given if isinstance(given, Mapping) else {}
    examples = config.get("fewshot_split") or fewshot.get("split")
    if not examples and not fewshot.get("samples"):  # which stand in the task itself
        examples = splits[2] or splits[1]
    name = config.get("dataset_name")
    kwargs = config.get("dataset_kwargs")
    kwargs = kwargs if isinstance(kwargs, Mapping) else {}
    path, reader, revision, files = said, "", str(kwargs.get("revision") or ""), tuple(_by_split(kwargs))
    if any("://" in file or file.startswith("/") for _, file in files):
        path, reader, revision, files = _of_addresses(said, files)
    return TaskDataset(
        task=task,
        path=path,
        config=None if name is None else str(name),
        evaluated=str(splits[0] or splits[1] or "test"),
        examples=str(examples) if examples else None,
        files=files,
        reader=reader,
        revision=revision,
        num_fewshot=config.get("num_fewshot"),
    )


def _of_addresses(said: str, files: tuple[tuple[str, str], ...]) -> tuple[str, str, str, tuple[tuple[str, str], ...]]:
    """Repository, reader, revision and files in the repository; neither where it is not one of the Hub."""
    found = [(split, _ON_THE_HUB.fullmatch(file)) for split, file in files]
    places = {(match["repo"] or match["web"], match["commit"] or match["branch"] or "") for _, match in found if match}
    if len(places) != 1 or not all(match for _, match in found):
        return "", said, "", ()
    ((repo, revision),) = places
    inside = tuple((split, match["file"] or match["path"]) for split, match in found if match)
    return repo, said, "" if revision == "main" else revision, inside


def _by_split(kwargs: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Split and name of every data file; a file without a split is 'train', as datasets has it."""
    named = kwargs.get("data_files")
    by_split = named if isinstance(named, Mapping) else {"train": named}
    for split, files in by_split.items():
        for file in files if isinstance(files, (list, tuple)) else [files]:
            if file:
                yield str(split), str(file)
