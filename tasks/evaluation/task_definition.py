"""Evaluation tasks, pinned by content: which files define a task, and one digest over them.

A task is either shipped by lm-eval and known by name, or a YAML file of the user. For the latter everything it draws in
is hashed: YAMLs it includes, Python files its ``!function`` tags name, and local data. Relative data paths are relative
to the YAML file that names them (lm-eval itself takes them relative to wherever it happens to be started).
"""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any

import yaml
from pydantic import BaseModel, ConfigDict

from merge_core.errors import InvalidInput
from merge_core.parsing import StrictLoader, read_yaml_mapping
from merge_core.store import HashMemo, NotInKey, digest, sha256_file


class EvalTask(BaseModel):
    """An lm-eval task pinned by content: definition and local data are hashed, so a changed document is a new task."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str  # what lm-eval calls it
    digest: str  # sha256 over the definition and its local data
    definition: Annotated[Path | None, NotInKey]  # a local YAML, None for a task that lm-eval ships
    cluster_field: str | None = None  # of a document: what it shares with those that it belongs together with


@dataclass(frozen=True)
class Definition:
    """A local task as its YAML and those it includes say it."""

    path: Path
    config: Mapping[str, Any]  # merged: what a file says itself wins over what it includes
    files: tuple[Path, ...]  # everything that decides what the task asks, in the order in which it is found
    dataset_path: str  # absolute where it is a local directory
    data_files: Any  # as in the YAML, with absolute paths; None where there are none

    @property
    def name(self) -> str:
        return str(self.config["task"])

    @property
    def is_local(self) -> bool:
        """All of its data lies here: nothing is asked of a network, and nothing need be kept for another time."""
        return self.data_files is not None or Path(self.dataset_path).is_absolute()


def pin_task(task: str, root: Path, hashes: HashMemo) -> EvalTask:
    """The task that ``task`` names, with its digest.

    Args:
        task: A YAML file, relative to ``root``; otherwise the name of a task, group or tag that lm-eval ships.
        root: Directory of the profile.

    Raises:
        InvalidInput: for an unknown name, a definition that cannot be read, or data that is not there.
    """
    if task.endswith((".yaml", ".yml")):
        path = (root / task).absolute()
        definition = read_definition(path)
        return EvalTask(name=definition.name, digest=_digest(definition, hashes.sha256), definition=path)
    if task not in (known := _shipped()):
        near = get_close_matches(task, known, n=1)
        raise InvalidInput(
            f"task {task}",
            found=f"no task of lm-eval {version('lm_eval')}",
            expected="a task, group or tag that lm-eval ships, or a YAML file of your own",
            remedy=f"did you mean {near[0]!r}?" if near else "`lm-eval ls tasks` lists them",
        )
    return EvalTask(name=task, digest=digest({"task": task, "lm_eval": version("lm_eval")}), definition=None)


def still_as_pinned(task: EvalTask, definition: Definition) -> bool:
    """Whether the files of a local task are those that were pinned; every byte is read."""
    return _digest(definition, sha256_file) == task.digest


def read_definition(path: Path) -> Definition:
    """Read a local task definition, and find all that it draws in.

    Raises:
        InvalidInput: naming the file and what is wrong with it.
    """
    files: list[Path] = []
    config, data_root = _read(path, files, ())
    where = str(path)
    name = config.get("task")
    if not isinstance(name, str):
        raise InvalidInput(
            where,
            found="a group of tasks" if "group" in config else "no name under 'task'",
            expected="one task with 'task: <name>'",
            remedy="name the tasks of a group one by one in the profile" if "group" in config else "",
        )
    dataset_path = str(config.get("dataset_path", ""))
    kwargs = config.get("dataset_kwargs") or {}
    data_files = kwargs.get("data_files")
    if data_files is not None:
        data_files = _resolve(data_files, data_root, where, files)
    elif (directory := data_root / dataset_path).is_dir():
        dataset_path = str(directory)
        files += sorted(file for file in directory.rglob("*") if file.is_file() and not file.name.startswith("."))
    return Definition(path, config, tuple(files), dataset_path, data_files)


def _digest(definition: Definition, sha256: Callable[[Path], str]) -> str:
    # Contents only: a task that is moved or renamed with its data is the same task.
    contents = [sha256(file) for file in definition.files]
    return digest({"task": definition.name, "files": contents, "lm_eval": version("lm_eval")})


def _read(path: Path, files: list[Path], above: tuple[Path, ...]) -> tuple[dict[str, Any], Path]:
    """The merged configuration, and the directory that its data paths are relative to. Appends to ``files``."""
    where = str(path)
    if path in above:
        raise InvalidInput(where, found="includes itself", expected="includes without a circle")
    functions: list[str] = []
    remedy = f"it is included by {above[-1]}" if above else "paths are relative to the profile"
    own = read_yaml_mapping(path, "an lm-eval task definition (YAML)", remedy=remedy, loader=_loader(functions))
    files.append(path)
    for function in functions:
        module = path.parent / (function.rpartition(".")[0].replace(".", "/") + ".py")
        if module.is_file():  # otherwise it is of an installed package
            files.append(module)
    config: dict[str, Any] = {}
    data_root = path.parent
    for include in _listed(own.pop("include", [])):
        included, included_root = _read((path.parent / str(include)).absolute(), files, (*above, path))
        included.pop("task_list", None)
        config.update(included)
        data_root = included_root
    config.update(own)
    says_data = "dataset_path" in own or "dataset_kwargs" in own
    return config, path.parent if says_data else data_root


def _loader(functions: list[str]) -> type[StrictLoader]:
    class Loader(StrictLoader):
        """Plain data; a function is noted by name and not imported."""

        text_keys = False

    def note(loader: yaml.SafeLoader, node: yaml.ScalarNode) -> str:
        functions.append(str(loader.construct_scalar(node)))
        return functions[-1]

    Loader.add_constructor("!function", note)
    return Loader


def _resolve(data_files: Any, base: Path, where: str, files: list[Path]) -> Any:
    """``data_files`` of datasets (a path, a list, or either by split) with absolute paths; patterns become lists."""
    if isinstance(data_files, Mapping):
        return {split: _resolve(inner, base, where, files) for split, inner in data_files.items()}
    if isinstance(data_files, list):
        return [found for inner in data_files for found in _listed(_resolve(inner, base, where, files))]
    text = str(data_files)
    if "://" in text:
        return text  # fetched by datasets; only its address can be pinned here
    found = sorted(base.glob(text)) if not Path(text).is_absolute() and re.search(r"[*?\[]", text) else [base / text]
    missing = [file for file in found if not file.is_file()]
    if missing or not found:
        raise InvalidInput(
            f"{where}: dataset_kwargs.data_files",
            found=f"no file {missing[0] if missing else base / text}",
            expected="data files, relative to the YAML file",
        )
    files += found
    return [str(file) for file in found] if len(found) > 1 else str(found[0])


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def _shipped() -> frozenset[str]:
    """Names of all tasks, groups and tags that the installed lm-eval ships.

    Read from its YAML files as text (a third of a second): its own index parses 14,000 of them in seven.
    """
    global _shipped_names
    if _shipped_names is None:
        _shipped_names = frozenset(_names_in_yaml())
    return _shipped_names


_shipped_names: frozenset[str] | None = None


def _names_in_yaml() -> Iterator[str]:
    spec = importlib.util.find_spec("lm_eval")
    if spec is None or spec.origin is None:
        return
    scalar = re.compile(rb"^(?:task|group|tag)[ \t]*:[ \t]*['\"]?([^\s'\"#\[]+)", re.MULTILINE)
    listed = re.compile(rb"^tag[ \t]*:[ \t]*\n((?:[ \t]*-[ \t]*\S+[ \t]*\n)+)", re.MULTILINE)
    for path in (Path(spec.origin).parent / "tasks").rglob("*.yaml"):
        text = path.read_bytes()
        for name in scalar.findall(text):
            yield name.decode()
        for block in listed.findall(text):
            for line in block.split(b"\n"):
                if line.strip():
                    yield line.strip().lstrip(b"- ").strip(b"'\"").decode()
