"""``mergegate methods``: list all merge methods with parameters, ranges and defaults."""

from __future__ import annotations

from rich.text import Text

from mergegate.flows.cli.command import JsonOption, command_context
from mergegate.flows.cli.output import print_answer
from mergegate.merge_core import merge_methods
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
