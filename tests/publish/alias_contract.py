"""What an alias promises at every target, asked of each where its stand-in is."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from mergegate.merge_core.errors import InvalidInput
from mergegate.tasks.publish.targets import PublishTarget

ALIAS = "production"


def require_aliases(target: PublishTarget, held: Callable[[], object], writes: Callable[[], object]) -> None:
    """An alias moves between versions, and nothing else does.

    Args:
        target: Where ``v1``, ``spring`` and, last, ``v2`` were published, and no alias is.
        held: All that is there but the alias ``production``.
        writes: Grows with each request or change that writes.
    """
    root, before = Path(), held()
    assert target.aliased(root, ALIAS) is None
    for version in ("v1", "v2", "spring", "v1"):
        target.set_alias(root, version, ALIAS)
        assert target.aliased(root, ALIAS) == version
        written = writes()
        target.set_alias(root, version, ALIAS)
        assert writes() == written, "it was there already"
    with pytest.raises(InvalidInput, match="no version 'v3'"):
        target.set_alias(root, "v3", ALIAS)
    for name in ("spring", "v2", "main.1", "", "../v1", "latest" if target.to_name != "hub" else "main"):
        if (target.to_name, name) != ("mlflow", "spring"):  # a version is a number there, its alias another thing
            with pytest.raises(InvalidInput, match=r"shadow\.alias"):
                target.set_alias(root, "v1", name)
    assert target.aliased(root, ALIAS) == "v1"
    assert held() == before
