"""``mergegate schema profile|recipe``: generate JSON Schemas for editors from the types that parse these files.

::

    mergegate schema profile > profile.json
    # yaml-language-server: $schema=profile.json      as the first line of a profile

``mergegate schema --write docs`` generates ``docs/schema/`` and the pages of profiles, recipes, commands and the Python
API in ``docs/reference/``.
"""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Annotated

import typer

from mergegate.flows.cli.command import command_context, local_path
from mergegate.flows.cli.reference_pages import api_page, cli_page, methods_page, profile_page, recipe_page
from mergegate.flows.profile import profile_schema
from mergegate.merge_core.errors import InvalidInput, suggest
from mergegate.merge_core.recipe import recipe_schema

_MARK = re.compile(rb'"title": "mergegate: |(Made|Generated) by `mergegate schema ')  # in every generated file
_KINDS = {"profile": profile_schema, "recipe": recipe_schema}


def schema_command(
    kind: Annotated[str, typer.Argument(help="Kind of file: profile or recipe.")] = "profile",
    write: Annotated[
        Path | None,
        typer.Option(
            parser=local_path, metavar="DOCS", help="Write all schemas and reference pages into this directory."
        ),
    ] = None,
) -> None:
    """Print the JSON Schema of a profile or a recipe.

    Editors use it to complete and check these files.
    """
    with command_context():
        if write is None:
            print(schema_text(kind), end="")
            return
        pages = generated_pages()
        for name in pages:
            file = write / name
            if os.path.lexists(file) and not (file.is_file() and _MARK.search(file.read_bytes())):
                raise InvalidInput(
                    str(file),
                    found="it exists, and mergegate did not write it",
                    expected="no file, or an older version of this page",
                    remedy="move it away, or choose another directory",
                )
        for name, text in pages.items():
            (write / name).parent.mkdir(parents=True, exist_ok=True)
            (write / name).write_text(text, encoding="utf-8")


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


def generated_pages() -> dict[str, str]:
    """Return the text of each generated file, by its path below ``docs/``."""
    # The --json output of every command.
    text = {"type": "string"}
    finding = {
        "type": "object",
        "required": ["severity", "where", "found"],
        "properties": {
            "severity": {"enum": ["block", "warn", "info"]},
            **dict.fromkeys(("where", "found", "expected", "remedy"), text),
        },
    }
    answer = {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "mergegate: what a command prints with --json",
        "type": "object",
        "required": ["status", "message", "findings"],
        "properties": {"status": text, "message": text, "findings": {"type": "array", "items": finding}},
    }

    return {
        "schema/profile.json": schema_text("profile"),
        "schema/recipe.json": schema_text("recipe"),
        "schema/answer.json": json.dumps(answer, indent=1) + "\n",
        "reference/profile.md": profile_page(),
        "reference/recipe.md": recipe_page(),
        "reference/methods.md": methods_page(),
        "reference/cli.md": cli_page(),
        "reference/python-api.md": api_page(),
    }
