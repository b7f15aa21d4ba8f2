"""Pin evaluation tasks by content, with one digest over all files that define a task.

A task is either shipped by lm-eval and known by name, or a local YAML file. The digest of a YAML file covers
everything to which it refers: included YAML files, Python files in ``!function`` tags, and local data
(``task_file``). A YAML file may also define several tasks (``tree``).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict

from mergegate.merge_core.architecture import TaskForm
from mergegate.merge_core.errors import InvalidInput
from mergegate.merge_core.files import HashMemo
from mergegate.tasks.base.sandbox import ProgramLimits
from mergegate.tasks.base.store import NotInKey, digest
from mergegate.tasks.quality.evaluation.built_in import AnyBuiltInTask, BuiltInTask
from mergegate.tasks.quality.evaluation.definitions.tree import TaskTree, task_tree
from mergegate.tasks.quality.evaluation.document_order import DataSource, DocumentSet, TaskData
from mergegate.tasks.quality.evaluation.settings import PromptSettings, Scoring


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
        return self.built_in.form if self.built_in is not None else self.tree.form

    @property
    def tree(self) -> TaskTree:
        """The task with all tasks below it, read again from its files. A built-in task has none."""
        return task_tree(self.definition or self.in_lm_eval)

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
        defined = self.tree.files if self.definition else ()
        return (*built_in, *defined, *([self.mirror] if self.mirror else ()))

    @property
    def is_local(self) -> bool:
        """Whether all data of the task is on this machine and covered by its digest."""
        if self.mirror is not None:
            return True
        if self.built_in is not None:
            return bool(self.built_in.files())
        return self.definition is not None and self.tree.is_local


def pin_task(task: str, root: Path, hashes: HashMemo, mirror: Path | None = None) -> EvalTask:
    """Find the task that a profile names and compute its digest.

    ``task`` is a YAML file relative to ``root``, or the name of a task, group or tag that lm-eval ships. ``mirror`` is
    the directory with the datasets that are not next to the task (see ``datasets``), or None for the Hub.
    """
    tree = task_tree(task, root)
    own_mirror = mirror if tree.path is None or tree.datasets else None
    return EvalTask(
        name=tree.name, digest=tree.digest(hashes.sha256, own_mirror), definition=tree.path, mirror=own_mirror
    )


def pin_built_in(task: BuiltInTask, root: Path, hashes: HashMemo) -> EvalTask:
    """Compute the digest of a built-in task. Relative paths are relative to ``root``."""
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
