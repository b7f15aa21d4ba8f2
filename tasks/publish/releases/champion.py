"""Load published releases for comparison: the champion (the current release) and the anchor (an earlier one)."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from mergegate.merge_core.files import HashMemo
from mergegate.tasks.checkpoints import Model, deciding_files
from mergegate.tasks.gate import ANCHOR, CHAMPION
from mergegate.tasks.publish import ABOUT
from mergegate.tasks.publish.targets import CurrentRelease, PublishTarget
from mergegate.tasks.store import MANIFEST, VALUE, NotInKey, merkle

# Files next to a checkpoint in the store or in a release that are not part of it.
_BOOKKEEPING = ABOUT | {MANIFEST, VALUE}


class ReleasedModel(Model):
    """A published release as a model, with its publication data.

    Attributes:
        head: State of the target, if it reports one. It prevents replacing another release by mistake.
        version: Version name.
        location: Published location, for people: a directory or an address.
        complete: Whether its publication is complete.
    """

    head: Annotated[str | None, NotInKey] = None
    version: Annotated[str, NotInKey] = ""
    location: Annotated[Path | str, NotInKey] = ""
    complete: Annotated[bool, NotInKey] = True


def find_champion(target: PublishTarget | None, root: Path, merge: Model, hashes: HashMemo) -> ReleasedModel | None:
    """Return the checkpoint of the current release at ``target``, or None before the first release.

    If the merge is byte-identical to the release, the champion has the identity of the merge. So a scheduled run with
    nothing new evaluates nothing.

    Args:
        root: Directory of the profile; the target's relative path starts there.

    Raises:
        Refused: The target is unavailable.
    """
    current = target.current(root) if target else None
    if current is None:
        return None
    return _released(current, CHAMPION, merge, hashes)


def find_anchor(
    target: PublishTarget | None, root: Path, version: str | None, merge: Model, hashes: HashMemo
) -> ReleasedModel | None:
    """Return the checkpoint of an earlier release. None: there is no release yet, or the profile has no anchor.

    Args:
        version: ``first``, or a version name.

    Raises:
        InvalidInput: There is no such version.
        Refused: The target is unavailable.
    """
    if target is None or version is None or (release := target.earlier(root, version)) is None:
        return None
    return _released(release, ANCHOR, merge, hashes)


def _released(current: CurrentRelease, name: str, merge: Model, hashes: HashMemo) -> ReleasedModel:
    released, merged = _checkpoint(current.directory, hashes), _checkpoint(merge.directory, hashes)
    digest = merge.digest if released == merged else merkle(released)
    # List every file that a library might load with the checkpoint, so that an added file is detected, too.
    files = {path: hashes.sha256(current.directory / path) for path in deciding_files(current.directory)}
    return ReleasedModel(
        name=name,
        digest=digest,
        directory=current.directory,
        head=current.head,
        version=current.name,
        location=current.location or current.directory,
        complete=current.complete,
        files=tuple(sorted(files.items())),
        runs_code=merge.runs_code and _code(released) == _code(merged),
    )


def _code(files: dict[str, tuple[int, str]]) -> dict[str, tuple[int, str]]:
    return {name: identity for name, identity in files.items() if name.endswith(".py")}


def _checkpoint(directory: Path, hashes: HashMemo) -> dict[str, tuple[int, str]]:
    """Return size and sha256 of every file that determines the behavior of the model, by name."""
    names = [name for name in deciding_files(directory) if name not in _BOOKKEEPING]
    return {name: ((directory / name).stat().st_size, hashes.sha256(directory / name)) for name in names}
