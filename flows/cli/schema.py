"""``mergegate schema profile|recipe``: generate JSON Schemas for editors from the types that parse these files.

::

    mergegate schema profile > profile.json
    # yaml-language-server: $schema=profile.json      as the first line of a profile

``mergegate schema --write docs`` generates ``docs/schema/``, ``docs/profile.md`` and ``docs/reference/python-api.md``.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from mergegate.flows.cli.api_reference import api_page
from mergegate.flows.cli.command import command_context, local_path
from mergegate.flows.profile import profile_schema
from mergegate.merge_core.errors import InvalidInput, suggest
from mergegate.merge_core.recipe import recipe_schema

_MARK = re.compile(rb'"title": "mergegate: |Made by `mergegate schema ')  # in every generated file
_KINDS = {"profile": profile_schema, "recipe": recipe_schema}


def schema_command(
    kind: Annotated[str, typer.Argument(help="Kind of file: profile or recipe.")] = "profile",
    write: Annotated[
        Path | None,
        typer.Option(
            parser=local_path, metavar="DOCS", help="Write all schemas and the reference page into a directory."
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
            "mergegate schema", found=repr(kind), expected="profile or recipe", remedy=suggest(kind, _KINDS)
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

    # The keys of a profile as Markdown, section by section.
    profile = profile_schema()
    lines = [
        "# Profile: all keys",
        "",
        "Made by `mergegate schema --write docs` from the types that read a profile; a test says when it is stale.",
        "Editors complete and check profiles with `docs/schema/profile.json`. A required key has no default.",
        "",
        *_section("profile", profile, profile["$defs"]),
    ]
    for name, section in profile["$defs"].items():
        lines += _section(name, section, profile["$defs"])

    return {
        "schema/profile.json": schema_text("profile"),
        "schema/recipe.json": schema_text("recipe"),
        "schema/answer.json": json.dumps(answer, indent=1) + "\n",
        "profile.md": "\n".join(lines).rstrip() + "\n",
        "reference/python-api.md": api_page().rstrip() + "\n",
    }


def _section(name: str, section: Mapping[str, Any], definitions: Mapping[str, Any]) -> Iterator[str]:
    if "properties" not in section:
        return
    yield f"## {name}"
    yield ""
    if name in definitions and section.get("description"):
        yield " ".join(str(section["description"]).partition("\n\n")[0].split())
        yield ""
    yield "| key | type | default | what it is for |"
    yield "| --- | --- | --- | --- |"
    for key, value in section["properties"].items():
        raw = value.get("default", value.get("const"))
        default = (
            "none" if raw in (None, [], {}) else "see its section" if isinstance(raw, dict) else f"`{json.dumps(raw)}`"
        )
        default = "required" if key in section.get("required", ()) else default
        words = " ".join(str(value.get("description", "")).split()).replace("|", "\\|")
        yield f"| `{key}` | {_type(value)} | {default} | {words} |"
    yield ""


def _type(value: Mapping[str, Any]) -> str:
    """Return a type in words, such as ``number`` or ``list of Guard``, with links to sections."""
    if "$ref" in value:
        name = str(value["$ref"]).rpartition("/")[2]
        return f"[{name}](#{name.lower()})"
    for key in ("anyOf", "oneOf"):
        if key in value:
            parts = dict.fromkeys(_type(part) for part in value[key] if part.get("type") != "null")
            return " or ".join(parts)
    if "enum" in value:
        return ", ".join(f"`{word}`" for word in value["enum"])
    if "const" in value:
        return f"`{value['const']}`"
    if value.get("type") == "array":
        inner = value.get("items") or (value.get("prefixItems") or [{}])[0]
        return f"list of {_type(inner)}"
    words = {"string": "text", "object": "mapping", "integer": "whole number", "boolean": "true or false"}
    kind = str(value.get("type", "any"))
    return "path" if value.get("format") == "path" else words.get(kind, kind)
