"""Releases as models to compare a merge with: the champion, which is published today, and an anchor, an earlier one."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from mergegate.merge_core.files import HashMemo
from mergegate.tasks.checkpoints import Model, deciding_files
from mergegate.tasks.gate import ANCHOR, CHAMPION
from mergegate.tasks.publish import ABOUT
from mergegate.tasks.publish.targets import CurrentRelease, PublishTarget
from mergegate.tasks.store import MANIFEST, VALUE, NotInKey, merkle

# Beside a checkpoint in the store or in a release, not part of it.
_BOOKKEEPING = ABOUT | {MANIFEST, VALUE}


class ReleasedModel(Model):
    """A release as a model, and what its target says of it.

    Attributes:
        head: Of the target, where it has one, so that nothing else is replaced by mistake.
        version: What people call it.
        location: Where it stands, for people: a directory or an address.
        complete: Whether its publication is finished.
    """

    head: Annotated[str | None, NotInKey] = None
    version: Annotated[str, NotInKey] = ""
    location: Annotated[Path | str, NotInKey] = ""
    complete: Annotated[bool, NotInKey] = True


def find_champion(target: PublishTarget | None, root: Path, merge: Model, hashes: HashMemo) -> ReleasedModel | None:
    """The checkpoint of the latest version at ``target``, or None when nothing has been released there yet.

    A merge that is byte for byte what was released has its identity, so that a night with nothing new evaluates
    nothing.

    Args:
        root: Directory of the profile, to which the target's path may be relative.

    Raises:
        Refused: when the target cannot tell what is released there.
    """
    current = target.current(root) if target else None
    if current is None:
        return None
    return _released(current, CHAMPION, merge, hashes)


def find_anchor(
    target: PublishTarget | None, root: Path, named: str | None, merge: Model, hashes: HashMemo
) -> ReleasedModel | None:
    """The checkpoint of an earlier release, or None where nothing has been released yet, or no anchor is asked for.

    Args:
        named: ``first``, or a version.

    Raises:
        InvalidInput: when there is no such version.
        Refused: when the target cannot tell.
    """
    if target is None or named is None or (found := target.earlier(root, named)) is None:
        return None
    return _released(found, ANCHOR, merge, hashes)


def _released(current: CurrentRelease, name: str, merge: Model, hashes: HashMemo) -> ReleasedModel:
    released, ours = _checkpoint(current.directory, hashes), _checkpoint(merge.directory, hashes)
    digest = merge.digest if released == ours else merkle(released)
    # All that a reader may take for a part of it, so that nothing can be added either.
    files = {place: hashes.sha256(current.directory / place) for place in deciding_files(current.directory)}
    return ReleasedModel(
        name=name,
        digest=digest,
        directory=current.directory,
        head=current.head,
        version=current.name,
        location=current.location or current.directory,
        complete=current.complete,
        files=tuple(sorted(files.items())),
        runs_code=merge.runs_code and _code(released) == _code(ours),
    )


def _code(files: dict[str, tuple[int, str]]) -> dict[str, tuple[int, str]]:
    return {name: what for name, what in files.items() if name.endswith(".py")}


def _checkpoint(directory: Path, hashes: HashMemo) -> dict[str, tuple[int, str]]:
    """Size and sha256 of every file that decides what the model does, by name."""
    names = [name for name in deciding_files(directory) if name not in _BOOKKEEPING]
    return {name: ((directory / name).stat().st_size, hashes.sha256(directory / name)) for name in names}
