"""Open each input file of a plan once, and check at the end that it is unchanged and was not replaced."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from mergegate.merge_core.errors import InvalidInput, MergegateError
from mergegate.merge_core.files import FileIdentity, file_identity, require_unchanged
from mergegate.merge_core.plan import MergePlan, step_of


def require_prepared(plan: MergePlan) -> None:
    """Raise InvalidInput unless all values that the recipe must compute in advance are available."""
    if missing := plan.recipe.missing_preparation():
        raise InvalidInput(plan.recipe.location, found=missing, expected="a recipe that was prepared before its plan")


@contextmanager
def open_inputs(plan: MergePlan, step_file: Callable[[str, str], Path | int]) -> Iterator[dict[Path, int]]:
    """Open every input file of ``plan``, whose steps have been executed.

    Args:
        plan: Plan of one document.
        step_file: Function from the names of a step and of one of its shards to the path of this file, or to the
            descriptor of an unnamed file.

    Yields:
        Descriptors, by the paths in the plan.

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
                source = step_file(step, path.name) if step else path
                if isinstance(source, int):
                    files[path] = os.dup(source)
                    continue
                files[path] = os.open(source, os.O_RDONLY | os.O_CLOEXEC)
                opened.append((source, file_identity(files[path]), files[path]))
            except OSError as error:
                raise InvalidInput(str(path), found=f"cannot be read: {error.strerror}") from None
        try:
            yield files
        except MergegateError:
            for entry in opened:
                require_unchanged(*entry)  # The change may explain why a read ended early.
            raise
        for entry in opened:
            require_unchanged(*entry)
    finally:
        for fd in files.values():
            os.close(fd)
