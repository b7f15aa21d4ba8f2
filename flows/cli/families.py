"""``mergegate families``: show which merges of a family of models work, from trials with tiny models."""

from __future__ import annotations

from difflib import get_close_matches
from typing import Annotated

import typer
from rich.text import Text

from mergegate.flows.cli.command import JsonOption, command_context
from mergegate.flows.cli.output import print_answer
from mergegate.merge_core.architecture import family_trials, loading_of
from mergegate.merge_core.errors import InvalidInput, suggest

_WIDTH = 17  # Characters of the longest name of a trial.
_LOADING = {"float32": "kept in float32", "ignored": "not loaded", "tied": "shared tensors"}


def families_command(
    name: Annotated[
        str, typer.Argument(help="Family (model_type), class, or a part of either. Default: all.", show_default=False)
    ] = "",
    as_json: JsonOption = False,
) -> None:
    """Show which merges of a family of models work.

    A family is a model_type of transformers. Tiny random models of each were merged, and the result was compared bit
    by bit with merging in memory. For one family, the tensors are listed that transformers treats in a special way.
    """
    with command_context(as_json) as console:
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
            found = {family: {**trial, **_loading(family, trial["class"])} for family, trial in found.items()}
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


def _loading(family: str, class_name: str) -> dict[str, str]:
    facts = loading_of(family, class_name)
    return {_LOADING[key]: ", ".join(values) for key, values in facts.items() if values}
