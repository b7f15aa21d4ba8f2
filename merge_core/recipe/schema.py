"""Generate the JSON Schema of a recipe from the same keys, methods and parameters that the parser uses.

Editors use it to complete keys and mark errors. ``load_recipe`` also checks rules that span several keys.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, get_args

from mergegate.merge_core.checkpoint import RECIPE_NAMES
from mergegate.merge_core.methods import Parameter, merge_methods
from mergegate.merge_core.recipe.keys import RECIPE_KEYS
from mergegate.merge_core.recipe.mixture import MIXTURE_KEYS, GateMode
from mergegate.merge_core.recipe.recipe import CLIENT_KEYS
from mergegate.merge_core.recipe.training_run import RUN_KEYS, SCHEDULES

_TYPES: dict[str, dict[str, Any]] = {
    "merge_method": {"enum": None, "description": "Merge method. 'mergegate methods' explains all methods."},
    "base_model": {"$ref": "#/$defs/model", "description": "Model that the others were fine-tuned from."},
    "models": {"type": "array", "items": {"$ref": "#/$defs/source"}, "description": "Models to merge layer by layer."},
    "slices": {"type": "array", "items": {"$ref": "#/$defs/slice"}, "description": "Layer ranges to stack."},
    "modules": {"type": "object", "description": "Parts of the network with their own layers, by name."},
    "parameters": {"$ref": "#/$defs/parameters", "description": "Parameters of the method, for all models."},
    "tokenizer_source": {"description": "Vocabulary of the result: base, union, or a model."},
    "tokenizer": {
        "type": "object",
        "description": "Vocabulary of the result with settings for single tokens, for example {source: union}.",
    },
    "chat_template": {
        "type": "string",
        "description": "Chat template of the result: auto, a known name, or the template.",
    },
    "name": {"type": "string", "description": "Name by which other documents refer to this one, without slashes."},
    "align_experts": {
        "type": "boolean",
        "description": "Whether to reorder the experts of mixtures so that they correspond. Default: false.",
    },
    "drop_prediction_layers": {
        "type": "boolean",
        "description": "Whether to leave out the base's layers for multi-token prediction. Default: false.",
    },
    "statistics": {
        "type": "object",
        "description": "Settings for reading calibration texts, for recipes that use them.",
    },
    "router_repair": {
        "anyOf": [
            {"type": "boolean"},
            {
                "type": "object",
                "additionalProperties": False,
                "properties": {
                    "off_diagonals": {
                        "type": "number",
                        "minimum": 0,
                        "maximum": 1,
                        "description": "Factor of the off-diagonal elements of each curvature matrix. Default: 0.9.",
                    }
                },
            },
        ],
        "description": "Whether to refit the routers of merged mixtures to the parents' texts (HARC). Default: false.",
    },
    "clients": {
        "type": "array",
        "description": "In a profile: directories of models that were trained from the last release.",
    },
    "samples": {"type": "object", "description": "Number of training samples of each client."},
    "at_least": {"type": "integer", "description": "Smallest number of updated clients for a round."},
    "run": {
        "type": ["string", "array"],
        "items": {"type": "string"},
        "description": "Training run whose checkpoints are merged: a directory, a pattern, or org/name@step-* on the "
        "Hub. Replaces 'models'.",
    },
    "steps": {
        "type": "string",
        "description": "File with the step of each checkpoint of the run. Default: from trainer_state.json or names.",
    },
    "window": {
        "type": ["integer", "string", "object"],
        "description": "Size of the window: a number of checkpoints, {steps: N}, {tokens: 50B}, or all. Default: 8.",
    },
    "every": {
        "type": ["integer", "object"],
        "description": "Use every Nth checkpoint, counted from the newest, or {steps: N}: only multiples of N.",
    },
    "schedule": {
        "anyOf": [
            {"enum": list(SCHEDULES)},
            {
                "type": "object",
                "additionalProperties": False,
                "maxProperties": 1,
                "properties": {
                    "exponential": {"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": 1},
                    "ema": {"type": "number", "minimum": 0, "exclusiveMaximum": 1},
                },
            },
        ],
        "description": "Weights of the checkpoints: equal, or those that imitate a decay of the learning rate. "
        "Default: mean.",
    },
    "leave_out_beyond": {
        "type": "number",
        "description": "Largest length of a task vector, as a factor of the median. Longer ones are left out.",
    },
    "output": {
        "enum": ["model", "adapter"],
        "description": "Kind of the result: a model, or one LoRA adapter that combines adapters. Default: model.",
    },
    "rank": {"type": "integer", "minimum": 1, "description": "Rank of the combined adapter, with output: adapter."},
    "gate_mode": {"enum": list(get_args(GateMode)), "description": "Source of the router rows. Default: hidden."},
    "experts_per_token": {
        "type": "integer",
        "minimum": 1,
        "description": "Number of experts that the router selects for each token. Default: 2.",
    },
    "architecture": {
        "type": "string",
        "description": "Family of the mixture. Default: the first family that can represent the models.",
    },
    "experts": {"type": "array", "description": "Dense models that become the experts of a mixture."},
    "shared_experts": {
        "type": "array",
        "maxItems": 1,
        "description": "Dense model that becomes the expert that every token uses.",
    },
}
_TEXT = {
    "type": "string",
    "description": "Calibration text of the model (JSON Lines or plain text), for methods and repairs that use one.",
}


def recipe_schema() -> dict[str, Any]:
    """Return the JSON Schema (draft 2020-12) of one recipe document, as plain data."""
    keys = dict.fromkeys((*RECIPE_KEYS, *MIXTURE_KEYS, *CLIENT_KEYS, *RUN_KEYS))
    properties = {key: dict(_TYPES.get(key, {})) for key in keys}
    properties["merge_method"]["enum"] = sorted(merge_methods())
    formats = sorted({name for dtype in RECIPE_NAMES for name in (dtype, f"torch.{dtype}")})
    for key, description in (
        ("dtype", "Number format of the result."),
        ("out_dtype", "Number format of the result, instead of dtype."),
    ):
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
        "anyOf": [{"required": ["merge_method"]}, {"required": ["experts"]}, {"required": ["run"]}],
        "$defs": {
            "model": {
                "description": "Directory or org/name@revision. Append +adapter to apply a LoRA adapter.",
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


def _closed(required_keys: list[str], **properties: Any) -> dict[str, Any]:
    return {"type": "object", "additionalProperties": False, "required": required_keys, "properties": properties}


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
