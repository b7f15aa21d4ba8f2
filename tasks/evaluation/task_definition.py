"""Evaluation tasks, pinned by content: which files define a task, and one digest over them.

A task is either shipped by lm-eval and known by name, or a YAML file of the user. For the latter everything it draws in
is hashed: YAMLs it includes, Python files its ``!function`` tags name, and local data (``task_file``). A YAML file may
also stand for several tasks (``local_groups``).
"""

from __future__ import annotations

from collections.abc import Callable
from difflib import get_close_matches
from importlib.metadata import version
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict

from mergegate.merge_core.errors import InvalidInput
from mergegate.merge_core.files import HashMemo, sha256_file
from mergegate.tasks.evaluation.lm_eval_index import shipped_leaves, shipped_names
from mergegate.tasks.evaluation.local_groups import group_members
from mergegate.tasks.evaluation.mirror import files_of_all, find_datasets
from mergegate.tasks.evaluation.prompt_settings import PromptSettings
from mergegate.tasks.evaluation.splits import DocumentSet
from mergegate.tasks.evaluation.task_data import DataSource, LoadedData, TaskData
from mergegate.tasks.evaluation.task_datasets import TaskDataset, asked_dataset
from mergegate.tasks.evaluation.task_file import Definition, one_definition, read_task_file
from mergegate.tasks.sandbox import ProgramLimits
from mergegate.tasks.store import NotInKey, digest


class EvalTask(BaseModel):
    """An lm-eval task pinned by content: definition and local data are hashed, so a changed document is a new task.
    What only loading shows (data of the Hub, templates of a task by name) is pinned where ``data`` is there."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str  # what lm-eval calls it, or the profile, where it asks one task in two ways
    digest: str  # sha256 over the definition and its local data
    definition: Annotated[Path | None, NotInKey]  # a local YAML, None for a task that lm-eval ships
    cluster_field: str | None = None  # of a document: what it shares with those that it belongs together with
    data_digest: str | None = None  # sha256 over what it asks when it is loaded; None: nobody has looked
    sources: Annotated[tuple[DataSource, ...], NotInKey] = ()  # that it was loaded from
    documents: Annotated[int | None, NotInKey] = None  # that it has; known with ``data_digest``
    mirror: Annotated[Path | None, NotInKey] = None  # directory with its datasets, which are in ``digest``
    only: DocumentSet | None = None  # of its documents; None: all of them
    code: ProgramLimits | None = None  # in which what the model wrote is run; None: it is not
    asked: PromptSettings | None = None  # what is said of it alone; None: it is asked as all others
    known_as: Annotated[str | None, NotInKey] = None  # by lm-eval, where ``name`` is the profile's

    def content_key(self) -> object:
        # What was measured before there were sets, and settings of one task, keeps its key.
        said = {"name", "digest", "cluster_field", "data_digest"}
        said |= ({"only"} if self.only else set()) | ({"code"} if self.code else set())
        known = self.model_dump(mode="json", include=said)
        return {**known, "asked": self.asked} if self.asked else known

    @property
    def in_lm_eval(self) -> str:
        """What lm-eval calls it."""
        return self.known_as or self.name

    @property
    def data(self) -> TaskData | None:
        """What it asks, once somebody has looked."""
        return TaskData(digest=self.data_digest, sources=self.sources) if self.data_digest else None

    def loaded(self, found: LoadedData) -> EvalTask:
        """The same task, with what loading it has shown."""
        data = found.data
        return self.model_copy(
            update={"data_digest": data.digest, "sources": data.sources, "documents": found.documents}
        )

    @property
    def is_local(self) -> bool:
        """All of its data lies here, and is in its digest."""
        if self.mirror is not None:
            return True
        return self.definition is not None and read_definition(self.definition).is_local


def pin_task(task: str, root: Path, hashes: HashMemo, mirror: Path | None = None) -> EvalTask:
    """The task that ``task`` names, with its digest.

    Args:
        task: A YAML file, relative to ``root``; otherwise the name of a task, group or tag that lm-eval ships.
        root: Directory of the profile.
        mirror: Directory of datasets (``tasks.evaluation.mirror``), for data that do not lie beside the task; None: the
            Hub.

    Raises:
        InvalidInput: for an unknown name, a dataset that is not in ``mirror``, a definition that cannot be read, or
            data that is not there.
    """
    if is_file_name(task):
        path = (root / task).absolute()
        definition = read_definition(path)
        named = mirror if _named_in(definition) else None
        return EvalTask(
            name=definition.name, digest=_digest(definition, hashes.sha256, named), definition=path, mirror=named
        )
    _require_shipped(task)
    pinned: dict[str, object] = {"task": task, "lm_eval": version("lm_eval")}
    if mirror is not None:
        pinned["data"] = _data_hashes(mirror, named_data(task, None), hashes.sha256)
    return EvalTask(name=task, digest=digest(pinned), definition=None, mirror=mirror)


def _require_shipped(task: str) -> None:
    if task not in (known := shipped_names()):
        near = get_close_matches(task, known, n=1)
        raise InvalidInput(
            f"task {task}",
            found=f"no task of lm-eval {version('lm_eval')}",
            expected="a task, group or tag that lm-eval ships, or a YAML file of your own",
            remedy=f"did you mean {near[0]!r}?" if near else "`lm-eval ls tasks` lists them",
        )


def is_file_name(task: str) -> bool:
    """Whether a task of a profile is a YAML file; else it is the name of one that lm-eval ships."""
    return task.endswith((".yaml", ".yml"))


def still_as_pinned(task: EvalTask, definition: Definition) -> bool:
    """Whether the files of a local task are those that were pinned; every byte is read."""
    return _digest(definition, sha256_file, task.mirror) == task.digest


def named_data(task: str, definition: Path | None) -> tuple[TaskDataset, ...]:
    """The datasets that a task, or each of those below it, is loaded from by name: what ``evaluate.data`` is asked for.

    Args:
        task: What lm-eval calls it.
        definition: Its own YAML file; None for a task that lm-eval ships.

    Raises:
        InvalidInput: for a definition that cannot be read, or an unknown name.
    """
    if definition is not None:
        return _named_in(read_definition(definition))
    _require_shipped(task)
    found = (asked_dataset(leaf.name, leaf.config) for leaf in shipped_leaves(task))
    return tuple(asked for asked in found if asked)


def _named_in(definition: Definition) -> tuple[TaskDataset, ...]:
    found = (asked_dataset(leaf.name, leaf.config) for leaf in definition.leaves if not leaf.is_local)
    return tuple(asked for asked in found if asked)


def read_definition(path: Path) -> Definition:
    """Read a local task definition, and find all that it draws in.

    Raises:
        InvalidInput: naming the file and what is wrong with it.
    """
    files: list[Path] = []
    config, data_root = read_task_file(path, files, ())
    name = config.get("task")
    if "group" not in config and "task_list" not in config:
        if not isinstance(name, str):
            raise InvalidInput(str(path), found="no name under 'task'", expected="one task with 'task: <name>'")
        return one_definition(path, name, config, data_root, files)
    members = group_members(path, config, data_root, files)
    every = dict.fromkeys([*files, *(file for member in members for file in member.files)])
    return Definition(path, str(config.get("group") or path.stem), config, tuple(every), "", None, members)


def _digest(definition: Definition, sha256: Callable[[Path], str], mirror: Path | None) -> str:
    # Contents only: a task that is moved or renamed with its data is the same task.
    contents = [sha256(file) for file in definition.files]
    pinned: dict[str, object] = {"task": definition.name, "files": contents, "lm_eval": version("lm_eval")}
    if mirror is not None:
        pinned["data"] = _data_hashes(mirror, _named_in(definition), sha256)
    return digest(pinned)


def _data_hashes(mirror: Path, asked: tuple[TaskDataset, ...], sha256: Callable[[Path], str]) -> list[str]:
    return [sha256(file) for file in files_of_all(find_datasets(mirror, asked))]
