"""Allow only the tasks that a profile names in ``evaluate.allow_code`` to run generated code.

Generated code never runs by default. Every name in the list must have an effect, so a name that is not evaluated, or
whose task runs no code, is an error.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from mergegate.merge_core.errors import InvalidInput, suggest
from mergegate.tasks.evaluation.code_runs import EVERY, find_unconfined_code
from mergegate.tasks.evaluation.lm_eval_index import shipped_leaves
from mergegate.tasks.evaluation.task_definition import EvalTask, read_definition
from mergegate.tasks.evaluation.task_file import Definition, Function, texts_in
from mergegate.tasks.sandbox import ProgramLimits


def allow_code(task: EvalTask, written: str, allowed: Collection[str]) -> EvalTask:
    """Return ``task`` with limits for its programs, if it runs any and the profile allows it by name.

    Args:
        task: Pinned task.
        written: Name of the task in the profile, as under ``tasks`` and in ``allowed``.
        allowed: Names in ``evaluate.allow_code``.

    Raises:
        InvalidInput: If the task runs code and is not named, is named and runs no code, or runs code in a way that
            mergegate cannot confine.
    """
    named = written in allowed
    if not runs_code(task):
        if named:
            raise InvalidInput(
                f"evaluate.allow_code: {written}",
                found="a task that runs no code",
                expected="tasks that run what the model wrote (unsafe_code: true)",
                remedy="leave it out of allow_code",
            )
        return task
    if not named:
        raise InvalidInput(
            f"evaluate.tasks: {written}",
            found="a task that runs code which the model wrote",
            expected="its name under evaluate.allow_code",
            remedy=allow_code_advice(written),
        )
    way = find_unconfined_code(_functions_of(read_definition(task.definition))) if task.definition else ""
    if way:
        raise InvalidInput(
            f"evaluate.tasks: {written}",
            found=f"functions that run code in a way of their own ({way})",
            expected="code_eval of Hugging Face's evaluate, or a function check_correctness(program)",
            remedy="have them use one of the two: those run programs in bounds",
        )
    return task.model_copy(update={"code": ProgramLimits()})


def _functions_of(definition: Definition) -> Iterator[tuple[Path, str]]:
    """Yield all functions in the modules next to a local task, and each function that it takes from other modules."""
    modules = [file for file in definition.files if file.suffix == ".py"]
    yield from ((file, EVERY) for file in modules)
    for leaf in definition.leaves:
        for text in texts_in(leaf.config):
            if isinstance(text, Function) and not any(file.match(str(text.file)) for file in modules):
                yield Path(f"not beside it: {text}"), str(text)


def allow_code_advice(written: str) -> str:
    """Return the advice for allowing a task to run code."""
    return (
        f"under evaluate 'allow_code: [{written}]': its programs then run in bounds (docs/security.md); or leave it out"
    )


def require_evaluated(allowed: Iterable[str], tasks: Collection[str]) -> None:
    """Check that every task that may run code is evaluated.

    Raises:
        ValueError: For a name that is allowed but not evaluated.
    """
    for name in allowed:
        if name not in tasks:
            near = suggest(name, tasks)
            raise ValueError(f"{name!r} is allowed to run code and not evaluated" + (f"; {near}" if near else ""))


def runs_code(task: EvalTask) -> bool:
    """Return whether a task, or one below it, declares that it runs code that the model wrote."""
    if task.definition is None:
        return any(leaf.config.get("unsafe_code") for leaf in shipped_leaves(task.in_lm_eval))
    return any(leaf.config.get("unsafe_code") for leaf in read_definition(task.definition).leaves)


def find_unconfined_code_of_shipped(config: Mapping[str, Any]) -> str:
    """Apply ``find_unconfined_code`` to a task that lm-eval ships, whose functions are named by their files."""
    named = [text.rpartition(".") for text in texts_in(config) if text.startswith("/")]
    return find_unconfined_code((Path(file + ".py"), function) for file, _, function in named)
