"""Generate the JSON Schema of a recipe for editors, from the same keys, methods and parameters that the parser uses.

Editors use it for completion and for marking errors. ``load_recipe`` is authoritative: it also checks rules that span
several keys.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from mergegate.merge_core.checkpoint import RECIPE_NAMES
from mergegate.merge_core.methods import Parameter, merge_methods
from mergegate.merge_core.recipe.keys import RECIPE_KEYS
from mergegate.merge_core.recipe.mixture import MIXTURE_KEYS
from mergegate.merge_core.recipe.recipe import CLIENT_KEYS

_TYPES: dict[str, dict[str, Any]] = {
    "merge_method": {"enum": None, "description": "What is computed: 'mergegate methods' explains each."},
    "base_model": {"$ref": "#/$defs/model", "description": "What the models were fine-tuned from."},
    "models": {"type": "array", "items": {"$ref": "#/$defs/source"}, "description": "What is merged, layer by layer."},
    "slices": {"type": "array", "items": {"$ref": "#/$defs/slice"}, "description": "Runs of layers, put together."},
    "modules": {"type": "object", "description": "Parts of a network with layers of their own, by name."},
    "parameters": {"$ref": "#/$defs/parameters"},
    "tokenizer_source": {"description": "Whose vocabulary the result has: base, union, or a model."},
    "tokenizer": {"type": "object", "description": "The same with rows of single tokens: {source: union}."},
    "chat_template": {"type": "string", "description": "auto, or the template itself."},
    "name": {"type": "string", "description": "By which other documents of this recipe refer to this one."},
    "align_experts": {"type": "boolean", "description": "Renumber experts of mixtures so that they correspond."},
    "statistics": {"type": "object", "description": "How the texts of models are read, for methods that read some."},
    "clients": {
        "type": "array",
        "description": "In a profile: directories of models that train from the last release.",
    },
    "samples": {"type": "object", "description": "How much each client has seen."},
    "momentum": {
        "type": "number",
        "minimum": 0,
        "exclusiveMaximum": 1,
        "description": "How much of the last round's step is taken again.",
    },
    "adam": {
        "type": "object",
        "additionalProperties": False,
        "required": ["rate"],
        "description": "The server's step by Adam, in place of momentum: {rate: 0.01}; what it keeps is in the store.",
        "properties": {
            "rate": {"type": "number", "exclusiveMinimum": 0, "description": "About how far a weight goes in a round."},
            "beta1": {"type": "number", "minimum": 0, "exclusiveMaximum": 1, "description": "Of the mean (0.9)."},
            "beta2": {"type": "number", "minimum": 0, "exclusiveMaximum": 1, "description": "Of squares (0.99)."},
            "tau": {"type": "number", "exclusiveMinimum": 0, "description": "Added to their root (0.001)."},
        },
    },
    "at_least": {"type": "integer", "description": "Clients with something new, for a round to take place."},
    "leave_out_beyond": {
        "type": "number",
        "description": "Times the median length: models that changed more stay out.",
    },
    "experts": {"type": "array", "description": "Dense models that become the experts of a mixture."},
}
_TEXT = {"type": "string", "description": "A text of the model's own, for methods that read some: jsonl or plain text."}


def recipe_schema() -> dict[str, Any]:
    """Return the JSON Schema (draft 2020-12) of one recipe document, as plain data."""
    properties = {key: dict(_TYPES.get(key, {})) for key in dict.fromkeys((*RECIPE_KEYS, *MIXTURE_KEYS, *CLIENT_KEYS))}
    properties["merge_method"]["enum"] = sorted(merge_methods())
    formats = sorted({name for known in RECIPE_NAMES for name in (known, f"torch.{known}")})
    for key, description in (("dtype", "Number format of the result."), ("out_dtype", "Wins over dtype.")):
        properties[key] = {"enum": formats, "description": description}
    parameters = {"$ref": "#/$defs/parameters"}
    model = {"$ref": "#/$defs/model"}
    layers = {"type": "array", "items": {"type": "integer"}, "minItems": 2, "maxItems": 2}
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "mergegate: a recipe (mergekit's dialect)",
        "type": "object",
        "additionalProperties": False,
        "properties": properties,
        "anyOf": [{"required": ["merge_method"]}, {"required": ["experts"]}],
        "$defs": {
            "model": {
                "description": "A directory, or org/name@revision; +adapter applies a LoRA adapter.",
                "type": ["string", "object"],
            },
            "parameters": {
                "type": "object",
                "additionalProperties": False,
                "properties": _parameters(
                    parameter for method in merge_methods().values() for parameter in method.parameters
                ),
            },
            "source": _closed(["model"], model=model, parameters=parameters, text=_TEXT),
            "layers": _closed(["model"], model=model, layer_range=layers, parameters=parameters, text=_TEXT),
            "slice": _closed(
                ["sources"],
                sources={"type": "array", "items": {"$ref": "#/$defs/layers"}},
                base_model=model,
                parameters=parameters,
            ),
        },
    }


def _closed(required: list[str], **properties: Any) -> dict[str, Any]:
    return {"type": "object", "additionalProperties": False, "required": required, "properties": properties}


def _parameters(parameters: Iterable[Parameter]) -> dict[str, Any]:
    """Return one schema per parameter name. A value may be a scalar, a gradient, or depend on the tensor's name."""
    descriptions: dict[str, list[str]] = {}
    for parameter in parameters:
        description = f"{parameter.summary} ({parameter.range})" if parameter.range else parameter.summary
        descriptions.setdefault(parameter.name, []).append(description)
    return {
        name: {
            "description": " / ".join(dict.fromkeys(variants)),
            "type": ["number", "boolean", "string", "array", "object"],
        }
        for name, variants in sorted(descriptions.items())
    }
