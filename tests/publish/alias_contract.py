"""Check the alias contract that every target must fulfill. Each target's tests call it with their own stand-in."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from mergegate.merge_core.errors import InvalidInput
from mergegate.tasks.publish.targets import PublishTarget

ALIAS = "production"


def require_aliases(target: PublishTarget, held: Callable[[], object], writes: Callable[[], object]) -> None:
    """Assert that an alias moves between versions and that nothing else changes.

    Args:
        target: Target where ``v1``, ``spring`` and ``v2`` were published in this order, without any alias.
        held: Function that returns everything at the target except the alias ``production``.
        writes: Function whose result changes with each request that writes.
    """
    root, before = Path(), held()
    assert target.resolve_alias(root, ALIAS) is None
    for version in ("v1", "v2", "spring", "v1"):
        target.set_alias(root, version, ALIAS)
        assert target.resolve_alias(root, ALIAS) == version
        written = writes()
        target.set_alias(root, version, ALIAS)
        assert writes() == written, "it was there already"
    with pytest.raises(InvalidInput, match="no version 'v3'"):
        target.set_alias(root, "v3", ALIAS)
    for name in ("spring", "v2", "main.1", "", "../v1", "latest" if target.target_name != "hub" else "main"):
        if (target.target_name, name) != (
            "mlflow",
            "spring",
        ):  # in MLflow a version is a number, and `spring` is an alias
            with pytest.raises(InvalidInput, match=r"shadow\.alias"):
                target.set_alias(root, "v1", name)
    assert target.resolve_alias(root, ALIAS) == "v1"
    assert held() == before
