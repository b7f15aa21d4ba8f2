"""``mergegate schema profile|recipe``: JSON Schemas for editors, made from the types that read those files.

::

    mergegate schema profile > profile.json
    # yaml-language-server: $schema=profile.json      as the first line of a profile

``docs/schema/`` and ``docs/profile.md`` are made by ``mergegate schema --write docs``.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from mergegate.flows.cli.output import answer_schema
from mergegate.flows.profile import profile_schema
from mergegate.merge_core.errors import InvalidInput, suggest
from mergegate.merge_core.recipe import recipe_schema

_MARK = re.compile(rb'"title": "mergegate: |Made by `mergegate schema ')  # in everything that is generated
_KINDS = {"profile": profile_schema, "recipe": recipe_schema}


def schema_text(kind: str) -> str:
    """The schema as JSON.

    Raises:
        InvalidInput: for another kind than ``profile`` and ``recipe``.
    """
    if kind not in _KINDS:
        raise InvalidInput(
            "mergegate schema", found=repr(kind), expected="profile or recipe", remedy=suggest(kind, _KINDS)
        )
    return json.dumps(_KINDS[kind](), indent=1, ensure_ascii=False) + "\n"


def generated_pages() -> dict[str, str]:
    """What ``docs/`` has of this, by name below it."""
    return {
        "schema/profile.json": schema_text("profile"),
        "schema/recipe.json": schema_text("recipe"),
        "schema/answer.json": json.dumps(answer_schema(), indent=1) + "\n",
        "profile.md": reference_page(profile_schema()),
    }


def write_pages(docs: Path) -> None:
    """Write the schemas and the reference page into ``docs``.

    Raises:
        InvalidInput: A file of that name exists that mergegate did not generate. Nothing is written then.
    """
    pages = generated_pages()
    for name in pages:
        file = docs / name
        if os.path.lexists(file) and not (file.is_file() and _MARK.search(file.read_bytes())):
            raise InvalidInput(
                str(file),
                found="it exists, and mergegate did not write it",
                expected="no file, or an older version of this page",
                remedy="move it away, or name another directory",
            )
    for name, text in pages.items():
        (docs / name).parent.mkdir(parents=True, exist_ok=True)
        (docs / name).write_text(text, encoding="utf-8")


def reference_page(schema: Mapping[str, Any]) -> str:
    """The keys of a profile, section by section, as Markdown."""
    lines = [
        "# Profile: all keys",
        "",
        "Made by `mergegate schema --write docs` from the types that read a profile; a test says when it is stale.",
        "Editors complete and check profiles with `docs/schema/profile.json`. A required key has no default.",
        "",
        *_section("profile", schema, schema["$defs"]),
    ]
    for name, section in schema["$defs"].items():
        lines += _section(name, section, schema["$defs"])
    return "\n".join(lines).rstrip() + "\n"


def _section(name: str, section: Mapping[str, Any], known: Mapping[str, Any]) -> Iterator[str]:
    if "properties" not in section:
        return
    yield f"## {name}"
    yield ""
    if name in known and section.get("description"):
        yield " ".join(str(section["description"]).partition("\n\n")[0].split())
        yield ""
    yield "| key | type | default | what it is for |"
    yield "| --- | --- | --- | --- |"
    for key, value in section["properties"].items():
        default = "required" if key in section.get("required", ()) else _default(value)
        words = " ".join(str(value.get("description", "")).split()).replace("|", "\\|")
        yield f"| `{key}` | {_type(value)} | {default} | {words} |"
    yield ""


def _default(value: Mapping[str, Any]) -> str:
    default = value.get("default", value.get("const"))
    if default is None:
        return "none"
    if isinstance(default, dict):
        return "see there" if default else "none"
    return f"`{json.dumps(default)}`" if default != [] else "none"


def _type(value: Mapping[str, Any]) -> str:
    """The type in words: ``number``, ``list of Guard``; sections as links."""
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
