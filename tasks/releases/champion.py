"""The champion: the release that is published today, as a model to hold a merge against."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from merge_core.store import MANIFEST, VALUE, HashMemo, NotInKey, merkle
from tasks.checkpoints import Model, deciding_files
from tasks.gate import CHAMPION
from tasks.publish import ABOUT
from tasks.publish.targets import LATEST, HubTarget, Target, current_release

# Beside a checkpoint in the store or in a release, not part of it.
_BOOKKEEPING = ABOUT | {MANIFEST, VALUE}


class ReleasedModel(Model):
    """The champion; on the Hub with the commit at which it stands, so that nothing else is replaced by mistake."""

    commit: Annotated[str | None, NotInKey] = None


def find_champion(target: Target | None, root: Path, merge: Model, hashes: HashMemo) -> ReleasedModel | None:
    """The checkpoint of the latest version at ``target``, or None when nothing has been released there yet.

    A merge that is byte for byte what was released has its identity, so that a night with nothing new evaluates
    nothing.

    Args:
        root: Directory of the profile, to which the target's path may be relative.
    """
    if (found := _released(target, root)) is None:
        return None
    directory, commit = found
    released, ours = _checkpoint(directory, hashes), _checkpoint(merge.directory, hashes)
    digest = merge.digest if released == ours else merkle(released)
    return ReleasedModel(name=CHAMPION, digest=digest, directory=directory, commit=commit)


def _released(target: Target | None, root: Path) -> tuple[Path, str | None] | None:
    """The files of the release that is published now, and the Hub's commit."""
    if target is None:
        return None
    if isinstance(target, HubTarget):
        current = current_release(target)
        return (current.directory, current.commit) if current else None
    latest = root / target.path / LATEST
    return (latest.resolve(), None) if latest.is_dir() else None


def _checkpoint(directory: Path, hashes: HashMemo) -> dict[str, tuple[int, str]]:
    """Size and sha256 of every file that decides what the model does, by name."""
    names = [name for name in deciding_files(directory) if name not in _BOOKKEEPING]
    return {name: ((directory / name).stat().st_size, hashes.sha256(directory / name)) for name in names}
