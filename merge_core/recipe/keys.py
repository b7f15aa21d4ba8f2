"""Declare the keys of a recipe with their JSON Schema, and read the mappings and values in a recipe.

The keys of training runs and mixtures are declared next to their parsers. Unknown keys cause warnings, and a key
without a value counts as absent.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any, TypeAlias, TypeVar

from mergegate.merge_core.checkpoint import RECIPE_NAMES
from mergegate.merge_core.errors import FindingLog, InvalidInput, suggest
from mergegate.merge_core.methods import Method

T = TypeVar("T")
Default = TypeVar("Default")
# Schema of each key, in the order in which messages list the keys.
Keys: TypeAlias = Mapping[str, Mapping[str, Any]]

_READABLE = 60  # characters of a quoted value
_FORMATS = sorted({name for dtype in RECIPE_NAMES for name in (dtype, f"torch.{dtype}")})
RECIPE_KEYS: Keys = {
    "merge_method": {"enum": [], "description": "Merge method. 'mergegate methods' explains all methods."},
    "models": {"type": "array", "items": {"$ref": "#/$defs/source"}, "description": "Models to merge layer by layer."},
    "slices": {"type": "array", "items": {"$ref": "#/$defs/slice"}, "description": "Layer ranges to stack."},
    "modules": {"type": "object", "description": "Parts of the network with their own layers, by name."},
    "base_model": {"$ref": "#/$defs/model", "description": "Model that the others were fine-tuned from."},
    "parameters": {"$ref": "#/$defs/parameters", "description": "Parameters of the method, for all models."},
    "dtype": {"enum": _FORMATS, "description": "Number format of the result."},
    "out_dtype": {"enum": _FORMATS, "description": "Number format of the result, instead of dtype."},
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
    "output": {
        "enum": ["model", "adapter"],
        "description": "Kind of the result: a model, or one LoRA adapter that combines adapters. Default: model.",
    },
    "rank": {"type": "integer", "minimum": 1, "description": "Rank of the combined adapter, with output: adapter."},
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
    "leave_out_beyond": {
        "type": "number",
        "description": "Largest length of a task vector, as a factor of the median. Longer ones are left out.",
    },
}
# Keys of a client round. A profile expands such a round into a recipe.
CLIENT_KEYS: Keys = {
    "clients": {
        "type": "array",
        "description": "In a profile: directories of models that were trained from the last release.",
    },
    "samples": {"type": "object", "description": "Number of training samples of each client."},
    "at_least": {"type": "integer", "description": "Smallest number of updated clients for a round."},
}


@dataclass(frozen=True)
class RecipeBlock:
    """A mapping in a recipe, reduced to its known keys with a value.

    Args:
        content: The entries.
        location: Location of the mapping for messages.
        log: Receives faults of the entries. None raises them.
        separator: Text between ``location`` and a key in messages.
    """

    content: Mapping[str, Any]
    location: str
    log: FindingLog | None
    separator: str = "."

    def __contains__(self, key: str) -> bool:
        return key in self.content

    def get(self, key: str, default: Any = None) -> Any:
        return self.content.get(key, default)

    def location_of(self, key: str) -> str:
        """Return the location of a key for messages."""
        return f"{self.location}{self.separator}{key}"

    def read(self, key: str, parse: Callable[..., T], default: Default, *arguments: Any) -> T | Default:
        """Return ``parse(value, location, *arguments)``, or ``default`` if the key is absent or its value is faulty."""
        if key in self.content:
            with self.log.collect() if self.log else nullcontext():
                return parse(self.content[key], self.location_of(key), *arguments)
        return default

    def fault(self, key: str, *, found: str = "", expected: str = "", remedy: str = "") -> None:
        """Record a fault of a key. Without ``found``, the message quotes the value."""
        found = found or f"{self.get(key)!r:.{_READABLE}}"
        with self.log.collect() if self.log else nullcontext():
            raise InvalidInput(self.location_of(key), found=found, expected=expected, remedy=remedy)


def known_mapping(
    value: object,
    location: str,
    known_keys: Collection[str],
    log: FindingLog | None = None,
    *,
    separator: str = ".",
    method: Method | None = None,
) -> RecipeBlock:
    """Return the entries of a mapping that have a known key and a value.

    Like mergekit, mergegate reads a key without a value (null) as absent and ignores unknown keys, but it warns about
    unknown keys. Without a log, it refuses them, for mappings that mergekit lacks. ``method`` is the method whose
    parameters an unknown key may be meant for. The other arguments are those of :class:`RecipeBlock`.
    """
    content = plain_mapping(value, location)
    for key in content:
        if key in known_keys:
            continue
        name = str(key)[:_READABLE]
        key_location, found = f"{location}{separator}{name}", f"unknown key {name!r}"
        expected = f"one of {', '.join(known_keys)}"
        if log is None:
            raise InvalidInput(key_location, found=found, expected=expected, remedy=suggest(name, known_keys))
        remedy = _remedy(name, content, known_keys, method)
        log.warn(
            key_location,
            found=f"{found}, which mergegate ignores, as mergekit does",
            expected=expected if remedy == "remove it" else "",
            remedy=remedy,
        )
    known = {key: inner for key, inner in content.items() if key in known_keys and inner is not None}
    return RecipeBlock(known, location, log, separator)


def _remedy(key: str, content: Mapping[str, Any], known_keys: Collection[str], method: Method | None) -> str:
    parameters = {parameter.name: parameter for parameter in method.parameters} if method else {}
    if key in parameters and "parameters" in known_keys:
        if isinstance(content.get("parameters"), Mapping) and key in content["parameters"]:
            return "remove it, because 'parameters' also sets it"
        is_elsewhere = "model" in known_keys and parameters[key].scope == "shared"
        return f"move it under {'the top-level ' if is_elsewhere else ''}'parameters'"
    if key == "revision" and isinstance(content.get("model"), str) and "@" not in content["model"]:
        return f"write 'model: {content['model']}@{content[key]}'"
    if key == "experts" and "models" in known_keys:
        return "remove it, or remove the models: a mixture has only experts"
    if near := get_close_matches(key, known_keys, n=1, cutoff=0.6):
        return f"did you mean {near[0]!r}?"
    if near := get_close_matches(key, parameters, n=1, cutoff=0.6):
        return f"did you mean {near[0]!r}? It belongs under 'parameters'"
    return "move it to the top level of the recipe" if key in RECIPE_KEYS else "remove it"


def plain_mapping(value: object, location: str) -> Mapping[str, Any]:
    """Return ``value``, or raise InvalidInput if it is not a mapping with at least one key."""
    if not isinstance(value, Mapping) or not value:
        raise refuse(value, location, "a mapping with at least one key")
    return value


def require_value(block: RecipeBlock, mapping: Mapping[str, Any], key: str) -> None:
    """Raise InvalidInput if ``key`` is present in the ``mapping`` that ``block`` was read from, but has no value."""
    if key in mapping and key not in block:
        raise InvalidInput(
            block.location_of(key), found="no value", expected="a value", remedy="remove the key, or add a value"
        )


def refuse(value: object, location: str, expected: str, remedy: str = "") -> InvalidInput:
    """Return the exception for an invalid value, which quotes it."""
    return InvalidInput(location, found=f"{value!r:.{_READABLE}}", expected=expected, remedy=remedy)


def is_whole(value: object, low: int, high: int) -> bool:
    """Return whether ``value`` is a whole number in the inclusive range."""
    return type(value) is int and low <= value <= high


def is_number(value: object, low: float, high: float) -> bool:
    """Return whether ``value`` is a number in the inclusive range."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and low <= value <= high


def is_text(value: object) -> bool:
    """Return whether ``value`` is text with more than white space."""
    return isinstance(value, str) and bool(value.strip())


def switch(value: object, location: str) -> bool:
    """Return ``value`` if it is true or false, or raise InvalidInput."""
    if not isinstance(value, bool):
        raise refuse(value, location, "true or false")
    return value
