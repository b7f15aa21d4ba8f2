"""Validate aliases: names such as ``production`` that point to one of the published versions.

A version never changes; an alias moves. To keep the two apart, an alias consists of letters, ``-`` and ``_``, while
nearly every version contains a digit. Each target detects the rare version whose name looks like an alias.
"""

from __future__ import annotations

import re
from collections.abc import Collection

from mergegate.merge_core.errors import InvalidInput, suggest

ALIAS_NAME = r"^[A-Za-z][A-Za-z_-]{0,63}$"
_WHERE = "shadow.alias"


def require_alias_name(name: str, taken: Collection[str]) -> None:
    """Raise InvalidInput if ``name`` cannot be an alias.

    Args:
        taken: Names that the target reserves, such as ``latest``.

    Raises:
        InvalidInput: The name is reserved or contains anything but letters, ``-`` and ``_``.
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


def is_a_version(name: str, location: str) -> InvalidInput:
    """Return the error for an alias ``name`` that is already a version at ``location``. Versions never move."""
    return InvalidInput(
        _WHERE,
        found=f"{name!r}, which is a version at {location}",
        expected="a name that no version has",
        remedy="name the alias otherwise",
    )


def no_such_version(version: str, location: str, versions: Collection[str] = ()) -> InvalidInput:
    """Return the error for an alias of a ``version`` that does not exist at ``location``."""
    return InvalidInput(
        _WHERE,
        found=f"no version {version!r} at {location}",
        expected="one that was published there",
        remedy=suggest(version, versions) if versions else "check the spelling",
    )
