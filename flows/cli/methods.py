"""``mergegate methods``: list all merge methods with parameters, ranges and defaults."""

from __future__ import annotations

from rich.console import Console
from rich.text import Text

from mergegate.flows.cli.output import print_answer
from mergegate.merge_core import merge_methods
from mergegate.merge_core.methods import REQUIRED, Method, Parameter


def print_methods(console: Console, as_json: bool) -> None:
    """Print every registered method, including those of other packages."""
    if as_json:
        methods = {name: _plain(method) for name, method in sorted(merge_methods().items())}
        print_answer("listed", f"{len(methods)} methods", {"methods": methods})
        return
    for name, method in sorted(merge_methods().items()):
        console.print(Text(name, style="bold"), Text(f"  {method.summary}"), sep="")
        console.print(Text(f"  {_needs(method)} · {method.paper}", style="dim"))
        for parameter in method.parameters:
            default = "required" if parameter.default is REQUIRED else f"default {_format_default(parameter.default)}"
            facts = ", ".join(part for part in (_SCOPES[parameter.scope], parameter.range, default) if part)
            console.print(f"    {parameter.name:<18}{parameter.summary} ({facts})")
        console.print()


_SCOPES = {"shared": "for the merge", "input": "per model", "non_base": "per model but the base"}
_BASES = {
    "required": "needs a base_model",
    "optional": "base_model optional",
    "ordinary": "a base_model is one more model",
    "donor": "base_model gives configuration and tokenizer",
}


def _needs(method: Method) -> str:
    fewest, most = method.models
    more = "" if fewest == most else f" to {most}" if most else " or more"
    return f"{fewest}{more} models, {_BASES[method.base]}"


def _format_default(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else f"{value:g}" if isinstance(value, float) else str(value)


def _plain(method: Method) -> dict[str, object]:
    return {
        "summary": method.summary,
        "paper": method.paper,
        "base_model": method.base,
        "models": list(method.models),
        "parameters": {parameter.name: _plain_parameter(parameter) for parameter in method.parameters},
    }


def _plain_parameter(parameter: Parameter) -> dict[str, object]:
    required = parameter.default is REQUIRED
    return {
        "summary": parameter.summary,
        "kind": parameter.kind,
        "scope": parameter.scope,
        "range": parameter.range,
        "required": required,
        "default": None if required else parameter.default,
    }
