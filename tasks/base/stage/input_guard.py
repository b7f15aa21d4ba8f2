"""Guard the input files of every stage: check before and after the stage that they are the pinned files.

A stage identifies its input files by their hashes but reads them by their names. Another process may change the files
in between, so the body of every stage runs inside ``read_pinned``::

    value = read_pinned(arguments, hashes, lambda: work(...))

Before the body runs, each file must have its pinned hash (from the cache if the file is unchanged). Afterward, each
file must still be the same file with the same timestamps (``FileIdentity``). If a timestamp changed but the content did
not, the body runs again, because it may have read other content. If the content changed, the output is discarded and
the run ends.

A write through a memory map changes the timestamps only when the system writes the page back. Files that are published
are therefore hashed again.
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
from mergegate.tasks.base.stage.project import home
from mergegate.tasks.base.store import Artifact

log = logging.getLogger(__name__)

T = TypeVar("T")

# Number of attempts to run a stage while another process keeps touching its files.
_ATTEMPTS = 3


@runtime_checkable
class PinnedInput(Protocol):
    """Argument of a stage that stands for files with pinned hashes, such as a checkpoint."""

    @property
    def label(self) -> str:
        """Name for messages, such as ``reverser``."""

    def pinned_files(self) -> Mapping[Path, str]:
        """Return the pinned sha256 digest of each file. Empty if the content is not pinned."""

    def present(self) -> Iterable[Path]:
        """Return the existing files that a stage would read, pinned or not."""


class LostArtifact(ChangedInput):
    """An input artifact has disappeared from the store. The next run of the flow builds it again."""


_change_callbacks: list[Callable[[], None]] = []


def on_input_change(clear_cache: Callable[[], None]) -> None:
    """Register a function that clears a cache of file content when input files change during a stage."""
    _change_callbacks.append(clear_cache)


def read_pinned(
    arguments: Mapping[str, object],
    hashes: HashMemo,
    work: Callable[[], T],
    discard_output: Callable[[], None] = lambda: None,
) -> T:
    """Call ``work``, and return its result if the files in ``arguments`` had their pinned content all the time.

    Args:
        arguments: Arguments of the stage. Pinned inputs may be in collections or in the ``parents`` of an argument.
        hashes: Cache of file hashes.
        work: Function that reads the files.
        discard_output: Function that removes the output of a call of ``work`` that is not valid. Default: do nothing.

    Raises:
        ChangedInput: A file was changed or removed, or was touched during each of three attempts.
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
    """Check that all input files have their pinned hashes, and return the files' identities.

    Raises:
        ChangedInput: A file has a different hash, is missing, or is not pinned.
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
    """Yield every pinned input in ``values``, in collections among them, and in the ``parents`` of a value."""
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
    """Return the identity of every pinned or present file, or None for a missing one."""
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
