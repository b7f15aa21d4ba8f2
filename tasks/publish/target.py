"""What a target needs, looked for before anything is merged: a token, a key, an environment that lets us out."""

from __future__ import annotations

from pathlib import Path

from tasks.hub.access import hub_access
from tasks.publish.settings import HubTarget, Target
from tasks.publish.signature import sign


def check_target(target: Target | None, root: Path) -> None:
    """See that publishing will not fail, hours later, for something that is missing now. Asks nobody outside.

    Args:
        root: Directory of the profile, to which the key's path may be relative.

    Raises:
        InvalidInput: when there is no token for the Hub, the environment forbids it, or there is no key to sign with.
    """
    if target is None:
        return
    if isinstance(target, HubTarget):
        hub_access(target.token_block, writing=True)
    if target.sign_key is not None:
        sign(b"", root / target.sign_key)
