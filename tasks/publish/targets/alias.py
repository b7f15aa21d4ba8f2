"""A name that means one of the versions, like ``production``: what can be such a name, and what is said of others.

A version never changes; an alias is what moves. So that nobody takes one for the other, an alias is letters, ``-`` and
``_``, while versions nearly always have a digit; a version of such a name all the same is found by each target.
"""

from __future__ import annotations

import re
from collections.abc import Collection

from mergegate.merge_core.errors import InvalidInput, suggest

ALIAS_NAME = r"^[A-Za-z][A-Za-z_-]{0,63}$"
_WHERE = "shadow.alias"


def require_alias_name(name: str, taken: Collection[str]) -> None:
    """See that ``name`` can be an alias.

    Args:
        taken: Names that mean something else there, such as ``latest``.

    Raises:
        InvalidInput: when it cannot.
    """
    if name in taken:
        raise InvalidInput(
            _WHERE,
            found=f"{name!r}, which the target itself moves with every release",
            expected="a name of its own",
            remedy="say 'production'",
        )
    if not re.fullmatch(ALIAS_NAME, name):
        raise InvalidInput(
            _WHERE,
            found=repr(name),
            expected="letters, '-' and '_': what has digits is taken for a version",
            remedy="say 'production'",
        )


def is_a_version(name: str, where: str) -> InvalidInput:
    """What to say when ``name`` is a version at ``where``: it never changes, so it cannot be moved."""
    return InvalidInput(
        _WHERE,
        found=f"{name!r}, which is a version at {where}",
        expected="a name that no version has",
        remedy="name the alias otherwise",
    )


def no_such_version(version: str, where: str, known: Collection[str] = ()) -> InvalidInput:
    """What to say when there is no ``version`` at ``where`` that an alias could mean."""
    return InvalidInput(
        _WHERE,
        found=f"no version {version!r} at {where}",
        expected="one that was published there",
        remedy=suggest(version, known) if known else "check the spelling",
    )
