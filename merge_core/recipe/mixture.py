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
from mergegate.merge_core.recipe.keys import RECIPE_KEYS, Keys, collected, is_text, is_whole, known_mapping, refuse
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


def parse_mixture(content: Mapping[str, Any], location: str, log: FindingLog) -> Mixture:
    """Read a document that describes a mixture. Faults are added to ``log``, and the result is then incomplete."""
    mode = content.get("gate_mode", "hidden")
    if mode not in _MODES:
        expected, remedy = f"one of {', '.join(_MODES)}", suggest(str(mode)[:60], _MODES)
        log.fault(f"{location}: gate_mode", found=f"{mode!r:.60}", expected=expected, remedy=remedy)
    experts, count = _experts(content, "experts", location, log, most=_MOST)
    shared, _ = _experts(content, "shared_experts", location, log, most=1)
    if mode in _MODES and mode not in _DRAWN:
        for expert_location in dict.fromkeys(expert.location for expert in experts if expert.positive == ()):
            log.fault(
                f"{expert_location}.positive_prompts",
                found="no prompts",
                expected=f"texts for this expert, because gate_mode {mode} computes its router row from them",
                remedy="add positive_prompts, or set gate_mode: random",
            )
    per_token = content.get("experts_per_token", 2)
    if type(per_token) is not int or per_token < 1 or (count is not None and per_token > count):
        log.fault(
            f"{location}: experts_per_token",
            found=f"{per_token!r:.20}" if "experts_per_token" in content else f"{per_token}, the default",
            expected=f"1 to {count}, the number of experts" if count else "a whole number of at least 1",
            remedy=f"set experts_per_token: {count}" if count else "",
        )
    output = content.get("architecture")
    if output is not None and not isinstance(output, str):
        log.fault(f"{location}: architecture", found=f"{output!r:.60}", expected="the name of a family")
    return Mixture(mode, experts, shared, per_token, output, None, location)


def _experts(
    content: Mapping[str, Any], key: str, location: str, log: FindingLog, *, most: int
) -> tuple[tuple[Expert, ...], int | None]:
    """Return the valid experts of a list, and the number of experts (None if a fault makes it unknown)."""
    location, value = f"{location}: {key}", content.get(key, [])
    if not isinstance(value, (list, tuple)) or (key == "experts" and not value):
        log.fault(location, found=f"{value!r:.60}", expected="a list with at least one entry")
        return (), None
    read = [collected(log, None, _expert, item, f"{location}[{number}]", log) for number, item in enumerate(value)]
    experts = [expert for copies in read for expert in copies or ()]
    if len(experts) > most:
        log.fault(location, found=f"{len(experts)} experts", expected=f"at most {most}")
    return tuple(experts), None if None in read else len(experts)


def _expert(item: object, location: str, log: FindingLog) -> list[Expert] | None:
    """Return the expert that an entry describes, repeated ``copies`` times, or None after a fault."""
    if not isinstance(item, Mapping):
        raise refuse(item, location, "{source_model: path or org/name}")
    content = known_mapping(item, location, _EXPERT, log)
    copies = content.get("copies", 1)
    if not is_whole(copies, 1, _MOST):
        log.fault(f"{location}.copies", found=f"{copies!r:.20}", expected=f"1 to {_MOST}")
        copies = None
    model = None
    if "source_model" in content:
        model = collected(log, None, parse_reference, content["source_model"], f"{location}.source_model", log)
    else:
        log.fault(location, found="no 'source_model'", expected="the dense model that provides the expert")
    noise = collected(log, 0.0, _number, content.get("noise_scale") or 0.0, f"{location}.noise_scale")
    if noise < 0:
        expected = "a standard deviation of at least 0"
        log.fault(f"{location}.noise_scale", found=f"{noise:g}", expected=expected)
    residual = None
    if "residual_scale" in content:
        residual = collected(log, None, _number, content["residual_scale"], f"{location}.residual_scale")
    positive, negative = (
        collected(log, None, _prompts, content.get(key, ()), f"{location}.{key}")
        for key in ("positive_prompts", "negative_prompts")
    )
    if model is None or positive is None or negative is None or copies is None:
        return None
    return [Expert(model, positive, negative, noise, residual, location)] * copies


def _prompts(value: object, location: str) -> tuple[str, ...]:
    prompts = [value] if isinstance(value, str) else value
    if not isinstance(prompts, (list, tuple)) or not all(map(is_text, prompts)):
        raise refuse(
            value,
            location,
            "a list of non-empty texts",
            "write texts for this expert, or set gate_mode: random and remove the prompts",
        )
    if len(prompts) > _MOST_PROMPTS:
        raise InvalidInput(location, found=f"{len(prompts)} prompts", expected=f"at most {_MOST_PROMPTS}")
    return tuple(prompts)


def _number(value: object, location: str) -> float:
    try:
        number = float(value) if isinstance(value, (int, float, str)) and not isinstance(value, bool) else math.nan
    except (ValueError, OverflowError):
        number = math.nan
    if not math.isfinite(number):
        raise refuse(value, location, "a number")
    return number
