"""Parse recipes that build a mixture of experts from dense models, in mergekit's dialect.

    base_model: org/base              # attention, norms, embeddings, tokenizer
    gate_mode: hidden                 # or hidden_avg, hidden_last, cheap_embed, random, uniform_random
    experts_per_token: 2
    experts:
      - source_model: org/math        # its feed-forward layers
        positive_prompts: ["Solve the equation"]
        negative_prompts: ["Tell me a story"]
        noise_scale: 0.01             # standard deviation of the noise added to every weight of the expert
        residual_scale: 0.5           # factor of its last projection
        copies: 4                     # mergegate only: number of experts from this model, each with its own noise

A document with ``experts`` and without ``merge_method`` is a recipe of this kind.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from mergegate.merge_core.errors import FindingLog, InvalidInput, suggest
from mergegate.merge_core.recipe.keys import RECIPE_KEYS, Keys, RecipeBlock, is_text, is_whole, known_mapping, refuse
from mergegate.merge_core.recipe.reference import CheckpointRef, parse_reference

GateMode = Literal["hidden", "hidden_avg", "hidden_last", "cheap_embed", "random", "uniform_random"]

_MODES: tuple[GateMode, ...] = get_args(GateMode)
_DRAWN = ("random", "uniform_random")
_EXPERT = ("source_model", "positive_prompts", "negative_prompts", "noise_scale", "residual_scale", "copies")
# All top-level keys of a document that describes a mixture.
MIXTURE_KEYS: Keys = {
    **{key: RECIPE_KEYS[key] for key in ("base_model", "dtype", "out_dtype", "chat_template", "name")},
    "gate_mode": {"enum": list(_MODES), "description": "Source of the router rows. Default: hidden."},
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
# Servers allocate one row of every router per expert. The largest published models have 512 experts.
_MOST = 1024
_MOST_PROMPTS = 4096


@dataclass(frozen=True)
class Expert:
    """One expert: the model that provides its feed-forward layers, and example texts for the router."""

    model: CheckpointRef
    positive: tuple[str, ...]
    negative: tuple[str, ...]
    noise_scale: float
    residual_scale: float | None
    location: str

    def canonical(self) -> dict[str, Any]:
        return {
            "source_model": str(self.model),
            "positive_prompts": list(self.positive),
            "negative_prompts": list(self.negative),
            "noise_scale": self.noise_scale,
            "residual_scale": self.residual_scale,
        }


@dataclass(frozen=True)
class GateRows:
    """Router rows computed from prompts, as little-endian float32 ``[layers, rows, width]``.

    Each layer has one row per expert, followed by one per shared expert. The width is the hidden size of the base.
    """

    layers: int
    rows: int
    width: int
    data: bytes = field(repr=False)

    def of(self, layer: int, first: int, count: int) -> bytes:
        """Return ``count`` rows of a layer, starting at row ``first``."""
        start = 4 * self.width * (layer * self.rows + first)
        return self.data[start : start + 4 * self.width * count]


@dataclass(frozen=True)
class Mixture:
    """Description of a mixture of experts to build from dense models.

    Args:
        gate_mode: Source of the router rows.
        experts: Routed experts, in the order of the router's rows.
        shared: Experts that process every token.
        per_token: Number of routed experts that process each token, in addition to the shared ones.
        output: Prefix of the target family's name. None selects the first family that can represent the models.
        gates: Router rows, after they have been computed. Always None if the mode draws random rows.
        location: Location for messages.
    """

    gate_mode: GateMode
    experts: tuple[Expert, ...]
    shared: tuple[Expert, ...]
    per_token: int
    output: str | None
    gates: GateRows | None
    location: str

    @property
    def needs_prompts(self) -> bool:
        """Whether the router rows come from prompts and must be computed before the merge."""
        return self.gate_mode not in _DRAWN

    @property
    def all_experts(self) -> tuple[Expert, ...]:
        """Routed experts, followed by the shared ones."""
        return (*self.experts, *self.shared)

    def canonical(self) -> dict[str, Any]:
        """Return the fields that determine the result, including a hash of the router rows, as JSON-compatible data."""
        return {
            "gate_mode": self.gate_mode,
            "experts_per_token": self.per_token,
            "architecture": self.output,
            "experts": [expert.canonical() for expert in self.experts],
            "shared_experts": [expert.canonical() for expert in self.shared],
            "gates": hashlib.sha256(self.gates.data).hexdigest() if self.gates else None,
        }


def parse_mixture(document: RecipeBlock, log: FindingLog) -> Mixture:
    """Read a document that describes a mixture. Faults are added to ``log``, and the result is then incomplete."""
    mode = document.get("gate_mode", "hidden")
    if mode not in _MODES:
        document.fault("gate_mode", expected=f"one of {', '.join(_MODES)}", remedy=suggest(str(mode)[:60], _MODES))
    experts, count = _experts(document, "experts", log, most=_MOST)
    shared, _ = _experts(document, "shared_experts", log, most=1)
    if mode in _MODES and mode not in _DRAWN:
        for location in dict.fromkeys(expert.location for expert in experts if expert.positive == ()):
            log.fault(
                f"{location}.positive_prompts",
                found="no prompts",
                expected=f"texts for this expert, because gate_mode {mode} computes its router row from them",
                remedy="add positive_prompts, or set gate_mode: random",
            )
    per_token = document.get("experts_per_token", 2)
    if type(per_token) is not int or per_token < 1 or (count is not None and per_token > count):
        document.fault(
            "experts_per_token",
            found=f"{per_token!r:.20}" if "experts_per_token" in document else f"{per_token}, the default",
            expected=f"1 to {count}, the number of experts" if count else "a whole number of at least 1",
            remedy=f"set experts_per_token: {count}" if count else "",
        )
    output = document.get("architecture")
    if output is not None and not isinstance(output, str):
        document.fault("architecture", expected="the name of a family")
    return Mixture(mode, experts, shared, per_token, output, None, document.location)


def _experts(document: RecipeBlock, key: str, log: FindingLog, *, most: int) -> tuple[tuple[Expert, ...], int | None]:
    """Return the valid experts of a list, and the number of experts (None if a fault makes it unknown)."""
    value = document.get(key, [])
    if not isinstance(value, (list, tuple)) or (key == "experts" and not value):
        log.fault(document.location_of(key), found=f"{value!r:.60}", expected="a list with at least one entry")
        return (), None
    experts, is_sound = list[Expert](), True
    for number, item in enumerate(value):
        copies: list[Expert] = []
        with log.collect():
            copies = _expert(item, f"{document.location_of(key)}[{number}]", log)
        experts += copies
        is_sound = is_sound and bool(copies)
    if len(experts) > most:
        document.fault(key, found=f"{len(experts)} experts", expected=f"at most {most}")
    return tuple(experts), len(experts) if is_sound else None


def _expert(item: object, location: str, log: FindingLog) -> list[Expert]:
    """Return the expert that an entry describes, repeated ``copies`` times, or an empty list after a fault."""
    if not isinstance(item, Mapping):
        raise refuse(item, location, "{source_model: path or org/name}")
    block = known_mapping(item, location, _EXPERT, log)
    copies = block.get("copies", 1)
    if not is_whole(copies, 1, _MOST):
        block.fault("copies", found=f"{copies!r:.20}", expected=f"1 to {_MOST}")
        copies = 0
    if "source_model" not in block:
        log.fault(location, found="no 'source_model'", expected="the dense model that provides the expert")
    model = block.read("source_model", parse_reference, None, log)
    noise = block.read("noise_scale", _noise, 0.0)
    residual = block.read("residual_scale", _number, None)
    positive = block.read("positive_prompts", _prompts, None) if "positive_prompts" in block else ()
    negative = block.read("negative_prompts", _prompts, None) if "negative_prompts" in block else ()
    if model is None or positive is None or negative is None:
        return []
    return [Expert(model, positive, negative, noise, residual, location)] * copies


def _prompts(value: object, location: str) -> tuple[str, ...]:
    prompts = [value] if isinstance(value, str) else value
    if not isinstance(prompts, (list, tuple)) or not all(map(is_text, prompts)):
        remedy = "write texts for this expert, or set gate_mode: random and remove the prompts"
        raise refuse(value, location, "a list of non-empty texts", remedy)
    if len(prompts) > _MOST_PROMPTS:
        raise InvalidInput(location, found=f"{len(prompts)} prompts", expected=f"at most {_MOST_PROMPTS}")
    return tuple(prompts)


def _noise(value: object, location: str) -> float:
    noise = _number(value or 0.0, location)
    if noise < 0:
        raise InvalidInput(location, found=f"{noise:g}", expected="a standard deviation of at least 0")
    return noise


def _number(value: object, location: str) -> float:
    try:
        number = float(value) if isinstance(value, (int, float, str)) and not isinstance(value, bool) else math.nan
    except (ValueError, OverflowError):
        number = math.nan
    if not math.isfinite(number):
        raise refuse(value, location, "a number")
    return number
