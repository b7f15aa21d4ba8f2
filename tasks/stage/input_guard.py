"""Guard the input files of every stage: check before and after the stage that they are the pinned files.

A stage identifies its models and artifacts by content but reads them by name, and another process may change the files
in between. Therefore, only this function runs the body of a stage::

    value = read_pinned(arguments, hashes, lambda: work(...))

Before the stage, each file must have its pinned hash, which comes from the cache if the file is unchanged. After the
stage, each file must still be the same file with the same timestamps (``FileIdentity``). A file that was only touched
is hashed again and stays valid. Because its content during the stage is uncertain, the stage starts over. If the
content changed, the run ends and the output is discarded.

A write through a memory map does not change the timestamps until the system writes the page back. Published files are
therefore hashed again.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Protocol, TypeVar, runtime_checkable

from mergegate.merge_core.errors import ChangedInput, MergegateError
from mergegate.merge_core.files import FileIdentity, HashMemo, file_identity
from mergegate.merge_core.wording import detail, has_detail_listener
from mergegate.tasks.stage.project import home
from mergegate.tasks.store import Artifact

log = logging.getLogger(__name__)

T = TypeVar("T")

# Number of attempts to run a stage while another process keeps touching its files.
_ATTEMPTS = 3


@runtime_checkable
class PinnedInput(Protocol):
    """Argument of a stage that represents files."""

    @property
    def label(self) -> str:
        """Name to display, such as ``reverser``."""

    def pinned_files(self) -> Mapping[Path, str]:
        """Return the pinned sha256 of each file."""

    def present(self) -> Iterable[Path]:
        """Return the files that a stage would read now."""


class LostArtifact(ChangedInput):
    """An input artifact has disappeared from the store. Running the flow again builds it again."""


_change_callbacks: list[Callable[[], None]] = []


def on_input_change(clear_cache: Callable[[], None]) -> None:
    """Register a function to call when input files change during a stage.

    Modules that cache file content in memory use this to clear their caches.
    """
    _change_callbacks.append(clear_cache)


def read_pinned(
    arguments: Mapping[str, object],
    hashes: HashMemo,
    work: Callable[[], T],
    discard_output: Callable[[], None] = lambda: None,
) -> T:
    """Return the result of ``work`` after ensuring that it read only the files pinned in ``arguments``.

    Args:
        arguments: Arguments of a stage. Pinned inputs may be in tuples or in the ``parents`` of an argument.
        hashes: Cache of file hashes.
        work: Function that reads the files.
        discard_output: Function that removes the output of an attempt before the next one. Default: do nothing.

    Raises:
        ChangedInput: A file was changed or removed.
    """
    inputs = tuple(pinned_inputs(arguments.values()))
    for pinned_input in inputs if has_detail_listener() else ():
        by_directory: dict[Path, list[str]] = {}
        for path in pinned_input.pinned_files():
            by_directory.setdefault(path.parent, []).append(path.name)
        for directory, names in by_directory.items():
            detail("reads %s: %s", directory, ", ".join(sorted(names)))
    for _ in range(_ATTEMPTS):
        identities = require_pinned(inputs, hashes)
        failure: MergegateError | None = None
        try:
            value = work()
        except MergegateError as error:
            failure = error
        except Exception:
            if _identities(inputs) != identities:
                _discard(discard_output)
            raise
        if _identities(inputs) == identities and not isinstance(failure, ChangedInput):
            if failure is not None:
                raise failure
            return value
        _discard(discard_output)
        require_pinned(inputs, hashes)
        log.warning("the files of %s were touched while they were read; reading them again", _labels(inputs))
    raise ChangedInput(
        _labels(inputs),
        found=f"the files were touched during all {_ATTEMPTS} attempts to read them",
        expected="files that no process touches while they are read",
        remedy="stop the process that touches them (a backup, a synchronization), then run again",
    )


def require_pinned(inputs: Sequence[PinnedInput], hashes: HashMemo) -> Mapping[Path, FileIdentity | None]:
    """Require that all input files have their pinned hashes, and return their identities.

    Raises:
        ChangedInput: A file has another hash, is missing, or was added.
    """
    identities = _identities(inputs)
    for pinned_input in inputs:
        pinned = pinned_input.pinned_files()
        if not pinned:
            continue
        for path, sha256 in pinned.items():
            if (actual := _hash(path, hashes)) != sha256:
                problem = f"its sha256 is {actual[:12]}… now" if actual else "it cannot be read"
                raise _changed(pinned_input, path, problem, sha256)
        for path in sorted(set(pinned_input.present()) - set(pinned)):
            raise _changed(pinned_input, path, "it did not exist then", "")
    if _identities(inputs) != identities:  # A file changed while it was hashed, so its hash may be wrong.
        raise ChangedInput(_labels(inputs), found="the files change while they are hashed", remedy="run again later")
    return identities


def pinned_inputs(values: Iterable[object]) -> Iterator[PinnedInput]:
    """Yield every input in ``values`` that represents files, including those inside collections and recipes."""
    for value in values:
        if isinstance(value, PinnedInput):
            yield value
        elif isinstance(value, Artifact):
            yield _StoredInput(value)
        elif isinstance(value, Mapping):
            yield from pinned_inputs(value.values())
        elif isinstance(value, (list, tuple)):
            yield from pinned_inputs(value)
        else:
            parents = getattr(value, "parents", ())
            yield from pinned_inputs(parents) if isinstance(parents, tuple) else ()


def _changed(pinned_input: PinnedInput, path: Path, problem: str, sha256: str) -> ChangedInput:
    is_lost = not os.path.lexists(path) and path.is_relative_to(home() / "store")
    return (LostArtifact if is_lost else ChangedInput)(
        f"{pinned_input.label}: {path}",
        found=f"changed since it was pinned: {problem}",
        expected=f"sha256 {sha256[:12]}…, as pinned" if sha256 else "only the files that were pinned",
        remedy="restore the pinned content, or run again to pin the current content",
    )


def _hash(path: Path, hashes: HashMemo) -> str | None:
    try:
        return hashes.sha256(path)
    except OSError:
        return None


def _identities(inputs: Iterable[PinnedInput]) -> dict[Path, FileIdentity | None]:
    """Return the identity of every file that was pinned or would be read now, with None for a missing file."""
    identities: dict[Path, FileIdentity | None] = {}
    for pinned_input in inputs:
        pinned = pinned_input.pinned_files()
        for path in {*pinned, *pinned_input.present()} if pinned else ():
            try:
                identities[path] = file_identity(path)
            except OSError:
                identities[path] = None
    return identities


def _discard(discard_output: Callable[[], None]) -> None:
    for clear_cache in _change_callbacks:
        clear_cache()
    discard_output()


def _labels(inputs: Iterable[PinnedInput]) -> str:
    return ", ".join(dict.fromkeys(pinned_input.label for pinned_input in inputs))


class _StoredInput:
    """Artifact of an earlier stage as a pinned input."""

    def __init__(self, artifact: Artifact[object]) -> None:  # type: ignore[type-var]  # Any value type.
        self._artifact = artifact
        self.label = f"{artifact.stage} {artifact.key[:12]}"

    def pinned_files(self) -> Mapping[Path, str]:
        return {self._artifact.directory / name: sha256 for name, sha256 in self._artifact.files.items()}

    def present(self) -> Iterable[Path]:
        return ()
