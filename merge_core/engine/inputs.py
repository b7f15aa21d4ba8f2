"""The input files of a plan: each opened once, and at the end still what it was, and where it was."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from mergegate.merge_core.errors import InvalidInput, MergegateError
from mergegate.merge_core.files import FileIdentity, file_identity, require_unchanged
from mergegate.merge_core.plan import MergePlan, step_of


def require_prepared(plan: MergePlan) -> None:
    """Raise InvalidInput unless everything that the recipe asks to be computed beforehand has been."""
    if missing := plan.recipe.missing_preparation():
        raise InvalidInput(plan.recipe.where, found=missing, expected="a recipe that was prepared before its plan")


@contextmanager
def open_inputs(plan: MergePlan, step_file: Callable[[str, str], Path | int]) -> Iterator[dict[Path, int]]:
    """Open every input file of ``plan``; its steps are done.

    Args:
        plan: One document.
        step_file: (name of a step, name of one of its shards): where that lies, or the descriptor of a file that has no
            name.

    Yields:
        Descriptors, by the paths that the plan has.

    Raises:
        InvalidInput: A file cannot be read.
        ChangedInput: A file was changed or replaced while it was open.
    """
    files: dict[Path, int] = {}
    opened: list[tuple[Path, FileIdentity, int]] = []
    try:
        for path in dict.fromkeys(part.file for job in plan.jobs for part in (*job.stored, *job.measured)):
            try:
                step = step_of(path)
                real = step_file(step, path.name) if step else path
                if isinstance(real, int):
                    files[path] = os.dup(real)
                    continue
                files[path] = os.open(real, os.O_RDONLY | os.O_CLOEXEC)
                opened.append((real, file_identity(files[path]), files[path]))
            except OSError as error:
                raise InvalidInput(str(path), found=f"cannot be read: {error.strerror}") from None
        try:
            yield files
        except MergegateError:
            for one in opened:
                require_unchanged(*one)  # It may be why a read ended early.
            raise
        for one in opened:
            require_unchanged(*one)
    finally:
        for fd in files.values():
            os.close(fd)
