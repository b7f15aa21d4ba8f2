"""What a target needs, looked for before anything is merged: a token that may write, a key, a directory with room."""

from __future__ import annotations

import os
from pathlib import Path

from merge_core.errors import Refused
from tasks.checkpoints.hub import hub_access, require_writing
from tasks.publish.signature import private_key
from tasks.publish.targets.settings import DirectoryTarget, HubTarget, Target


def check_target(target: Target | None, root: Path) -> None:
    """See that publishing will not fail, hours later, for something that is wrong now. Asks the Hub of a Hub target.

    Args:
        root: Directory of the profile, to which paths may be relative.

    Raises:
        InvalidInput: when there is no token for the Hub, or none that it knows; when the environment forbids it; when
            there is no key to sign with.
        Refused: when the token may not write to the repository, the Hub cannot be asked, or the directory cannot be
            written.
    """
    if target is None:
        return
    if target.sign_key is not None:
        private_key(root / target.sign_key)
    if isinstance(target, HubTarget):
        require_writing(target.repo, hub_access(target.token_block, writing=True))
    else:
        _require_writable(target, root)


def _require_writable(target: DirectoryTarget, root: Path) -> None:
    place = (root / target.path).absolute()
    above = next(parent for parent in (place, *place.parents) if parent.exists())
    # Asked, not tried: a run with nothing new leaves no trace, not even a time on a directory.
    if above.is_dir() and os.access(above, os.W_OK | os.X_OK):
        return
    raise Refused(
        f"publish.path: {place}",
        found=f"{above} {'may not be written' if above.is_dir() else 'is no directory'}",
        expected="a directory that can be made and written",
        remedy="name another, or have its permissions changed",
    )
