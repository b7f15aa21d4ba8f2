"""Determine from a task's configuration which named dataset its documents come from.

A task names a dataset on the Hub (``dataset_path: org/name``), files in one (``dataset_path: json`` with ``data_files:
hf://datasets/org/name/…``), or files at a web address. If a profile sets a local directory for such data
(``evaluate.data``), ``mirror`` finds it there.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

# A file of a dataset on the Hub: repository, optional revision, path in the repository.
_ON_THE_HUB = re.compile(
    r"hf://datasets/(?P<repo>[^/@]+/[^/@]+)(?:@(?P<commit>[^/]+))?/(?P<file>.+)"
    r"|https://huggingface\.co/datasets/(?P<web>[^/]+/[^/]+)/(?:resolve|raw|blob)/(?P<branch>[^/]+)/(?P<path>[^?]+).*"
)


@dataclass(frozen=True)
class TaskDataset:
    """A dataset from which a task is loaded, and the parts of it that the task uses."""

    task: str
    path: str  # 'cais/mmlu'; empty for files at web addresses, which only files named after the task can replace
    config: str | None  # 'anatomy'
    evaluated: str  # split with the documents to evaluate
    examples: str | None  # split to draw few-shot examples from; None: not named
    files: tuple[tuple[str, str], ...] = ()  # (split, file in the dataset), if the task names files
    reader: str = ""  # format, such as 'json', if the task names it; empty: the dataset's own
    revision: str = ""  # revision that the task requires; empty: any
    num_fewshot: int | None = None  # number of examples in the task's configuration; None: absent

    @property
    def key(self) -> tuple[str, str | None]:
        """Arguments of ``load_dataset`` that identify the dataset."""
        return self.reader or self.path, self.config

    def __str__(self) -> str:
        return f"{self.path or 'files at a web address'}{f' ({self.config})' if self.config else ''}"


def declared_dataset(task: str, config: Mapping[str, Any]) -> TaskDataset | None:
    """Return the dataset that ``task`` declares, or None if it does not load a dataset by name.

    ``config`` is the configuration of the task, merged with the files that it includes.
    """
    dataset_path = str(config.get("dataset_path") or "")
    if not dataset_path or config.get("custom_dataset"):
        return None
    splits = [config.get(key) for key in ("test_split", "validation_split", "training_split")]
    fewshot_config = config.get("fewshot_config")
    fewshot = fewshot_config if isinstance(fewshot_config, Mapping) else {}
    examples = config.get("fewshot_split") or fewshot.get("split")
    if not examples and not fewshot.get("samples"):  # samples are listed in the configuration itself
        examples = splits[2] or splits[1]
    name = config.get("dataset_name")
    kwargs = config.get("dataset_kwargs")
    kwargs = kwargs if isinstance(kwargs, Mapping) else {}
    # Files without a split belong to 'train', as in datasets.
    data_files = kwargs.get("data_files")
    by_split = data_files if isinstance(data_files, Mapping) else {"train": data_files}
    files = tuple(
        (str(split), str(file))
        for split, split_files in by_split.items()
        for file in (split_files if isinstance(split_files, (list, tuple)) else [split_files])
        if file
    )
    path, reader, revision = dataset_path, "", str(kwargs.get("revision") or "")
    if any("://" in file or file.startswith("/") for _, file in files):
        # Repository, revision and files in the repository; all empty if it is not a single one on the Hub.
        reader = dataset_path
        matches = [(split, _ON_THE_HUB.fullmatch(file)) for split, file in files]
        hits = [(split, match) for split, match in matches if match]
        repositories = {(match["repo"] or match["web"], match["commit"] or match["branch"] or "") for _, match in hits}
        path, revision, files = "", "", ()
        if len(repositories) == 1 and len(hits) == len(matches):
            ((path, branch),) = repositories
            revision = "" if branch == "main" else branch
            files = tuple((split, match["file"] or match["path"]) for split, match in hits)
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
