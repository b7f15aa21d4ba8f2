"""Pin evaluation tasks by content, with one digest over all files that define a task.

A task is either shipped by lm-eval and known by name, or a local YAML file. The digest of a YAML file covers
everything to which it refers: included YAML files, Python files in ``!function`` tags, and local data
(``task_file``). A YAML file may also define several tasks (``local_groups``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from difflib import get_close_matches
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict

from mergegate.merge_core.architecture import TaskForm
from mergegate.merge_core.errors import InvalidInput
from mergegate.merge_core.files import HashMemo
from mergegate.tasks.evaluation.built_in import AnyBuiltInTask, BuiltInTask
from mergegate.tasks.evaluation.lm_eval_index import shipped_leaves, shipped_names
from mergegate.tasks.evaluation.local_groups import group_members
from mergegate.tasks.evaluation.mirror import find_datasets
from mergegate.tasks.evaluation.settings import PromptSettings, Scoring
from mergegate.tasks.evaluation.splits import DocumentSet
from mergegate.tasks.evaluation.task_data import DataSource, TaskData
from mergegate.tasks.evaluation.task_datasets import TaskDataset, declared_dataset
from mergegate.tasks.evaluation.task_file import Definition, read_task_file, resolve_definition
from mergegate.tasks.sandbox import ProgramLimits
from mergegate.tasks.store import NotInKey, digest


class EvalTask(BaseModel):
    """A task pinned by content: one of lm-eval, or a built-in one.

    The digest covers the definition and local data, so a changed document makes a different task. Content that only
    loading reveals (data on the Hub, templates of a shipped task) is pinned when ``data_digest`` is set.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str  # lm-eval's name, or the profile's if the profile evaluates one task with two settings
    digest: str  # sha256 over the definition and its local data
    definition: Annotated[Path | None, NotInKey]  # local YAML file; None for a task that lm-eval ships
    built_in: Annotated[AnyBuiltInTask | None, NotInKey] = None  # settings of a built-in task, which are in ``digest``
    cluster_field: str | None = None  # document field that names the cluster
    data_digest: str | None = None  # sha256 over what loading reveals; None: not loaded yet
    sources: Annotated[tuple[DataSource, ...], NotInKey] = ()  # datasets that the task was loaded from
    documents: Annotated[int | None, NotInKey] = None  # number of documents; set together with ``data_digest``
    mirror: Annotated[Path | None, NotInKey] = None  # directory with its datasets, whose content is in ``digest``
    only: DocumentSet | None = None  # document set to use; None: all documents
    code: ProgramLimits | None = None  # limits for code that the model wrote; None: no code is run
    prompt_settings: PromptSettings | None = None  # prompt settings of this task alone; None: those of the profile
    original_name: Annotated[str | None, NotInKey] = None  # lm-eval's name, if ``name`` is the profile's
    # Size of the first sample of this task alone; None: that of the profile. The scored parts are in the keys.
    sample: Annotated[int | Literal["all"] | None, NotInKey] = None
    sample_start: Annotated[int, NotInKey] = 0  # position in the task's order at which the sample starts

    def content_key(self) -> object:
        # Optional fields enter the key only if set, so that scores measured before they existed keep their keys.
        fields = {"name", "digest", "cluster_field", "data_digest"}
        fields |= ({"only"} if self.only else set()) | ({"code"} if self.code else set())
        content = self.model_dump(mode="json", include=fields)
        return {**content, "asked": self.prompt_settings} if self.prompt_settings else content

    def first_look(self, scoring: Scoring) -> int | None:
        """Return the number of documents in the first look at this task. None: a single look uses all documents."""
        if self.sample is None:
            return scoring.first_look
        return None if self.sample == "all" else self.sample

    @property
    def in_lm_eval(self) -> str:
        """Name of the task in lm-eval."""
        return self.original_name or self.name

    @property
    def data(self) -> TaskData | None:
        """Digest and sources of the loaded data; None if the task has not been loaded."""
        return TaskData(digest=self.data_digest, sources=self.sources) if self.data_digest else None

    @property
    def form(self) -> TaskForm:
        """What the task asks of a model. A model of a kind without this form cannot be scored."""
        return self.built_in.form if self.built_in is not None else task_form(self.in_lm_eval, self.definition)

    @property
    def label(self) -> str:
        """Name for messages."""
        return self.name

    def pinned_files(self) -> Mapping[Path, str]:
        """Return nothing: ``digest`` covers the files together."""
        return {}

    def present(self) -> Iterable[Path]:
        """Return the files that the model process reads: the definition, its modules and data, or a mirror."""
        built_in = self.built_in.files() if self.built_in else ()
        defined = read_definition(self.definition).files if self.definition else ()
        return (*built_in, *defined, *([self.mirror] if self.mirror else ()))

    @property
    def is_local(self) -> bool:
        """Whether all data of the task is on this machine and covered by its digest."""
        if self.mirror is not None:
            return True
        if self.built_in is not None:
            return bool(self.built_in.files())
        return self.definition is not None and read_definition(self.definition).is_local


def pin_task(task: str, root: Path, hashes: HashMemo, mirror: Path | None = None) -> EvalTask:
    """Find the task that a profile names and compute its digest.

    ``task`` is a YAML file relative to ``root``, or the name of a task, group or tag that lm-eval ships. ``mirror`` is
    the directory with the datasets that are not next to the task (see ``mirror``), or None for the Hub.

    Raises:
        InvalidInput: If the name is unknown, the definition cannot be read, or data is missing.
    """
    if is_file_name(task):
        path = (root / task).absolute()
        definition = read_definition(path)
        own_mirror = mirror if _named_in(definition) else None
        return EvalTask(
            name=definition.name,
            digest=digest_definition(definition, hashes.sha256, own_mirror),
            definition=path,
            mirror=own_mirror,
        )
    _require_shipped(task)
    pinned: dict[str, object] = {"task": task, "lm_eval": version("lm_eval")}
    if mirror is not None:
        pinned["data"] = _data_hashes(mirror, named_data(task, None), hashes.sha256)
    return EvalTask(name=task, digest=digest(pinned), definition=None, mirror=mirror)


def pin_built_in(task: BuiltInTask, root: Path, hashes: HashMemo) -> EvalTask:
    """Compute the digest of a built-in task. Relative paths are relative to ``root``.

    Raises:
        InvalidInput: If a file does not exist, or a package is missing.
    """
    try:
        resolved = task.resolve(root)
    except FileNotFoundError as error:
        raise InvalidInput(
            f"evaluate.tasks: {task.name}",
            found=f"{error.filename}: no such file",
            expected=f"the file with the documents of the {task.kind} task, relative to the profile",
        ) from None
    pinned = digest({"settings": resolved.pinned_settings, "files": [hashes.sha256(file) for file in resolved.files()]})
    return EvalTask(name=resolved.name, digest=pinned, definition=None, built_in=resolved)


def _require_shipped(task: str) -> None:
    if task not in (shipped := shipped_names()):
        matches = get_close_matches(task, shipped, n=1)
        raise InvalidInput(
            f"task {task}",
            found=f"not a task of lm-eval {version('lm_eval')}",
            expected="a task, group or tag that lm-eval ships, or your own YAML file",
            remedy=f"did you mean {matches[0]!r}?" if matches else "list all tasks with `lm-eval ls tasks`",
        )


def is_file_name(task: str) -> bool:
    """Return whether a task in a profile is a YAML file rather than the name of a task that lm-eval ships."""
    return task.endswith((".yaml", ".yml"))


def task_form(task: str, definition: Path | None) -> TaskForm:
    """Return what a task of lm-eval asks of a model: with pictures in the documents of any task below it, ``pictures``.

    ``task`` is the name in lm-eval. ``definition`` is the YAML file; None for a task that lm-eval ships.

    Raises:
        InvalidInput: If the definition cannot be read or the name is unknown.
    """
    if definition is None:
        _require_shipped(task)
    leaves = read_definition(definition).leaves if definition else shipped_leaves(task)
    return "pictures" if any(leaf.config.get("doc_to_image") for leaf in leaves) else "text"


def named_data(task: str, definition: Path | None) -> tuple[TaskDataset, ...]:
    """Return the named datasets from which a task, or each task below it, is loaded. ``evaluate.data`` must have them.

    ``task`` is the name in lm-eval. ``definition`` is the YAML file; None for a task that lm-eval ships.

    Raises:
        InvalidInput: If the definition cannot be read or the name is unknown.
    """
    if definition is not None:
        return _named_in(read_definition(definition))
    _require_shipped(task)
    datasets = (declared_dataset(leaf.name, leaf.config) for leaf in shipped_leaves(task))
    return tuple(dataset for dataset in datasets if dataset)


def _named_in(definition: Definition) -> tuple[TaskDataset, ...]:
    datasets = (declared_dataset(leaf.name, leaf.config) for leaf in definition.leaves if not leaf.is_local)
    return tuple(dataset for dataset in datasets if dataset)


def read_definition(path: Path) -> Definition:
    """Read a local task definition and find everything on which it depends.

    Raises:
        InvalidInput: If the definition is invalid; the message names the file and the problem.
    """
    files: list[Path] = []
    config, data_root = read_task_file(path, files, ())
    name = config.get("task")
    if "group" not in config and "task_list" not in config:
        if not isinstance(name, str):
            raise InvalidInput(str(path), found="no name under 'task'", expected="a task with 'task: <name>'")
        return resolve_definition(path, name, config, data_root, files)
    members = group_members(path, config, data_root, files)
    all_files = dict.fromkeys([*files, *(file for member in members for file in member.files)])
    return Definition(path, str(config.get("group") or path.stem), config, tuple(all_files), "", None, members)


def digest_definition(definition: Definition, sha256: Callable[[Path], str], mirror: Path | None) -> str:
    """Return a digest over the files and the local data of a task, including its datasets in ``mirror``."""
    # Hash only contents, so that a task that is moved or renamed together with its data stays the same task.
    contents = [sha256(file) for file in definition.files]
    pinned: dict[str, object] = {"task": definition.name, "files": contents, "lm_eval": version("lm_eval")}
    if mirror is not None:
        pinned["data"] = _data_hashes(mirror, _named_in(definition), sha256)
    return digest(pinned)


def _data_hashes(mirror: Path, datasets: tuple[TaskDataset, ...], sha256: Callable[[Path], str]) -> list[str]:
    files = dict.fromkeys(file for dataset in find_datasets(mirror, datasets) for file in dataset.files)
    return [sha256(file) for file in files]
