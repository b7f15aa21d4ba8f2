"""``mergegate schema profile|recipe``: print JSON Schemas for editors, from the types that parse these files.

::

    mergegate schema profile > profile.json
    # yaml-language-server: $schema=profile.json      as the first line of a profile
"""

from __future__ import annotations

import json
from typing import Annotated

import typer

from mergegate.flows.cli.command import command_context
from mergegate.flows.profile import profile_schema
from mergegate.merge_core.errors import InvalidInput, suggest
from mergegate.merge_core.recipe import recipe_schema

_KINDS = {"profile": profile_schema, "recipe": recipe_schema}


def schema_command(kind: Annotated[str, typer.Argument(help="Kind of file: profile or recipe.")] = "profile") -> None:
    """Print the JSON Schema of a profile or a recipe.

    Editors use it to complete and check these files.
    """
    with command_context():
        print(schema_text(kind), end="")


def schema_text(kind: str) -> str:
    """Return the schema of ``profile`` or ``recipe`` as JSON text. Any other kind raises InvalidInput."""
    if kind not in _KINDS:
        raise InvalidInput(
            "mergegate schema",
            found=f"unknown kind {kind!r}",
            expected="profile or recipe",
            remedy=suggest(kind, _KINDS),
        )
    return json.dumps(_KINDS[kind](), indent=1, ensure_ascii=False) + "\n"
