"""``mergegate methods``, ``families`` and ``schema``: list what mergegate knows, without reading a checkpoint."""

from __future__ import annotations

import json
from difflib import get_close_matches
from typing import Annotated

import typer
from rich.text import Text

from mergegate.flows.cli.command import JsonOption, command_context
from mergegate.flows.operations.console import print_answer
from mergegate.merge_core import merge_methods
from mergegate.merge_core.errors import InvalidInput, suggest
from mergegate.merge_core.methods import REQUIRED, Method
from mergegate.merge_core.wording import format_count

_SCOPES = {"shared": "for the merge", "input": "per model", "non_base": "per model except the base"}
_BASES = {
    "required": "base_model required",
    "optional": "base_model optional",
    "ordinary": "base_model is merged like any other model",
    "donor": "base_model provides configuration and tokenizer",
}


def methods_command(as_json: JsonOption = False) -> None:
    """List the merge methods and their parameters.

    The list includes methods of other installed packages.
    """
    with command_context(as_json) as console:
        methods = dict(sorted(merge_methods().items()))
        if as_json:
            print_answer(
                "listed",
                f"{len(methods)} methods",
                {"methods": {name: _plain(method) for name, method in methods.items()}},
            )
            return
        for name, method in methods.items():
            fewest, most = method.models
            more = "" if fewest == most else f" to {most}" if most else " or more"
            console.print(Text(name, style="bold"), Text(f"  {method.summary}"), sep="")
            models = f"{fewest}{more} models" if more else format_count(fewest, "model")
            needs = f"{models}, {_BASES[method.base]}"
            console.print(Text(f"  {needs} · {method.paper}", style="dim"))
            for parameter in method.parameters:
                value = parameter.default
                text = f"{value:g}" if isinstance(value, float) else str(value)
                text = text.lower() if isinstance(value, bool) else text
                default = "required" if value is REQUIRED else f"default {text}"
                facts = ", ".join(part for part in (_SCOPES[parameter.scope], parameter.range, default) if part)
                console.print(f"    {parameter.name:<18}{parameter.summary} ({facts})")
            console.print()


def _plain(method: Method) -> dict[str, object]:
    return {
        "summary": method.summary,
        "paper": method.paper,
        "base_model": method.base,
        "models": list(method.models),
        "parameters": {
            parameter.name: {
                "summary": parameter.summary,
                "kind": parameter.kind,
                "scope": parameter.scope,
                "range": parameter.range,
                "required": parameter.default is REQUIRED,
                "default": None if parameter.default is REQUIRED else parameter.default,
            }
            for parameter in method.parameters
        },
    }


_WIDTH = 17  # Characters of the longest name of a trial.
_LOADING = {"float32": "kept in float32", "ignored": "not loaded", "tied": "shared tensors"}


def families_command(
    name: Annotated[
        str, typer.Argument(help="Family (model_type), class, or a part of either.", show_default="all")
    ] = "",
    as_json: JsonOption = False,
) -> None:
    """Show which merges of a family of models work.

    A family is a model_type of transformers. Tiny random models of each were merged, and the result was compared bit
    by bit with merging in memory. For one family, the tensors are listed that transformers treats in a special way.
    """
    with command_context(as_json) as console:
        from mergegate.merge_core.architecture import family_trials, loading_of

        families = family_trials()
        wanted = name.casefold()
        found = {
            family: trial
            for family, trial in families.items()
            if wanted in family.casefold() or wanted in trial["class"].casefold()
        }
        if name in families:
            found = {name: families[name]}
        if not found:
            raise InvalidInput(
                name,
                found="no family or class has this name",
                expected="a model_type, such as qwen3, or a class, such as Qwen3ForCausalLM",
                remedy=suggest(name, get_close_matches(name, families)) or "list all families: mergegate families",
            )
        if len(found) == 1:
            ((family, trial),) = found.items()
            facts = loading_of(family, trial["class"])
            special = {_LOADING[key]: ", ".join(values) for key, values in facts.items() if values}
            found = {family: {**trial, **special}}
        if as_json:
            print_answer("listed", f"{len(found)} families", {"families": found})
            return
        for family, trial in found.items():
            console.print(Text(family, style="bold"), Text(f"  {trial['kind']} · {trial['class']}"), sep="")
            cells = {key: cell for key, cell in trial.items() if key not in ("kind", "class")}
            if len(found) > 1:
                console.print(Text("  " + " · ".join(f"{key} {cell}" for key, cell in cells.items()), style="dim"))
            else:
                for key, cell in cells.items():
                    console.print(Text(f"  {key:<{_WIDTH}} {cell}"))


def schema_command(
    kind: Annotated[str, typer.Argument(help="Kind of file: profile or recipe.")] = "profile",
) -> None:
    """Print the JSON Schema of a profile or a recipe.

    Editors use it to complete and check these files.
    """
    with command_context():
        print(schema_text(kind), end="")


def schema_text(kind: str) -> str:
    """Return the schema of ``profile`` or ``recipe`` as JSON text. Any other kind raises InvalidInput."""
    from mergegate.flows.profile import profile_schema
    from mergegate.merge_core.recipe import recipe_schema

    schemas = {"profile": profile_schema, "recipe": recipe_schema}
    if kind not in schemas:
        raise InvalidInput(
            "mergegate schema",
            found=f"unknown kind {kind!r}",
            expected="profile or recipe",
            remedy=suggest(kind, schemas),
        )
    return json.dumps(schemas[kind](), indent=1, ensure_ascii=False) + "\n"
