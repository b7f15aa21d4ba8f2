"""What is pinned is what is read: every stage looks at the files of its inputs before and after it reads them.

A stage is given models and artifacts by their content, and reads them by their names. Between the two anybody may
write. So this is around the body of every stage, and nowhere else::

    value = read_pinned(arguments, hashes, lambda: work(...))

Before: each file has the hash that it was pinned with (from memory while nothing has been done to it since). After:
each is the same file with the same times (``FileIdentity``). A file that was only touched is hashed again, and goes on
to count; but as nobody knows what it was meanwhile, a stage that was reading then begins anew. Otherwise the run ends,
and nothing that was made of those bytes is kept.

Writing through a mapping changes no time until the system writes the page back; what is published is hashed again.
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

# How often a stage is begun before files that somebody keeps touching are too much.
_BEGINNINGS = 3


@runtime_checkable
class PinnedInput(Protocol):
    """An argument of a stage that stands for files."""

    @property
    def label(self) -> str:
        """What a person calls it: ``reverser``."""

    def pinned(self) -> Mapping[Path, str]:
        """sha256 of each of its files, as they were pinned."""

    def present(self) -> Iterable[Path]:
        """The files that would be read in its place now."""


class LostArtifact(ChangedInput):
    """An input is gone that the store had: whoever runs the flow again has it made again."""


_on_change: list[Callable[[], None]] = []


def on_input_change(forget: Callable[[], None]) -> None:
    """Have ``forget`` called when files were changed under a stage: by whoever keeps in memory what was read."""
    _on_change.append(forget)


def read_pinned(
    arguments: Mapping[str, object],
    hashes: HashMemo,
    work: Callable[[], T],
    begin_anew: Callable[[], None] = lambda: None,
) -> T:
    """What ``work`` returns, having read nothing but what is pinned in ``arguments``.

    Args:
        arguments: Of a stage. Pinned inputs may stand in tuples, and as the ``parents`` of one.
        hashes: Remembered ones.
        work: Reads them.
        begin_anew: Removes whatever ``work`` has made of them so far.

    Raises:
        ChangedInput: A file is another, or no longer there.
    """
    inputs = tuple(pinned_inputs(arguments.values()))
    _tell_files(inputs)
    for _ in range(_BEGINNINGS):
        before = require_pinned(inputs, hashes)
        failure: MergegateError | None = None
        try:
            value = work()
        except MergegateError as error:
            failure = error
        except Exception:
            if _identities(inputs) != before:
                _forget(begin_anew)
            raise
        if _identities(inputs) == before and not isinstance(failure, ChangedInput):
            if failure is not None:
                raise failure
            return value
        _forget(begin_anew)
        require_pinned(inputs, hashes)
        log.warning("files of %s were touched while they were read; once more", _labels(inputs))
    raise ChangedInput(
        _labels(inputs),
        found=f"files were touched in each of {_BEGINNINGS} tries to read them",
        expected="files that are left alone while they are read",
        remedy="find out what touches them (a backup, a synchronisation); then run again",
    )


def _tell_files(inputs: Sequence[PinnedInput]) -> None:
    for one in inputs if has_detail_listener() else ():
        by_place: dict[Path, list[str]] = {}
        for path in one.pinned():
            by_place.setdefault(path.parent, []).append(path.name)
        for place, names in by_place.items():
            detail("reads %s: %s", place, ", ".join(sorted(names)))


def require_pinned(inputs: Sequence[PinnedInput], hashes: HashMemo) -> Mapping[Path, FileIdentity | None]:
    """Identities of the files of ``inputs``, each of which has the hash that it was pinned with.

    Raises:
        ChangedInput: One has not, is gone, or there is one more.
    """
    identities = _identities(inputs)
    for one in inputs:
        pinned = one.pinned()
        if not pinned:
            continue
        for path, sha256 in pinned.items():
            if (found := _hash(path, hashes)) != sha256:
                raise _changed(one, path, f"sha256 {found[:12]}… now" if found else "cannot be read", sha256)
        for path in sorted(set(one.present()) - set(pinned)):
            raise _changed(one, path, "it was not there", "")
    if _identities(inputs) != identities:  # Changed while it was hashed: the hashes say nothing about it now.
        raise ChangedInput(_labels(inputs), found="files change while they are looked at", remedy="run again later")
    return identities


def pinned_inputs(values: Iterable[object]) -> Iterator[PinnedInput]:
    """Everything among ``values`` that stands for files, also inside of collections and recipes."""
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


def _changed(one: PinnedInput, path: Path, found: str, sha256: str) -> ChangedInput:
    lost = not os.path.lexists(path) and path.is_relative_to(home() / "store")
    return (LostArtifact if lost else ChangedInput)(
        f"{one.label}: {path}",
        found=f"changed since it was pinned: {found}",
        expected=f"{sha256[:12]}…, as it was pinned" if sha256 else "the files that were pinned, and no others",
        remedy="bring it back, or run again: then what is there now is pinned",
    )


def _hash(path: Path, hashes: HashMemo) -> str | None:
    try:
        return hashes.sha256(path)
    except OSError:
        return None


def _identities(inputs: Iterable[PinnedInput]) -> dict[Path, FileIdentity | None]:
    """Of every file that was pinned or would be read now; None where there is none."""
    found: dict[Path, FileIdentity | None] = {}
    for one in inputs:
        pinned = one.pinned()
        for path in {*pinned, *one.present()} if pinned else ():
            try:
                found[path] = file_identity(path)
            except OSError:
                found[path] = None
    return found


def _forget(begin_anew: Callable[[], None]) -> None:
    for forget in _on_change:
        forget()
    begin_anew()


def _labels(inputs: Iterable[PinnedInput]) -> str:
    return ", ".join(dict.fromkeys(one.label for one in inputs))


class _StoredInput:
    """An artifact of an earlier stage, as an input."""

    def __init__(self, artifact: Artifact[object]) -> None:  # type: ignore[type-var]  # of any value
        self._artifact = artifact
        self.label = f"{artifact.stage} {artifact.key[:12]}"

    def pinned(self) -> Mapping[Path, str]:
        return {self._artifact.directory / name: sha256 for name, sha256 in self._artifact.files.items()}

    def present(self) -> Iterable[Path]:
        return ()
