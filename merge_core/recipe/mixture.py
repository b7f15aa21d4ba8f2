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
from mergegate.merge_core.recipe.keys import known_mapping
from mergegate.merge_core.recipe.reference import CheckpointRef, parse_reference

GateMode = Literal["hidden", "hidden_avg", "hidden_last", "cheap_embed", "random", "uniform_random"]

_MODES: tuple[GateMode, ...] = get_args(GateMode)
_DRAWN = ("random", "uniform_random")
_EXPERT = ("source_model", "positive_prompts", "negative_prompts", "noise_scale", "residual_scale", "copies")
_KEYS = ("gate_mode", "experts_per_token", "architecture", "experts", "shared_experts")
# All top-level keys of a document that describes a mixture.
MIXTURE_KEYS = ("base_model", "dtype", "out_dtype", "chat_template", "name", *_KEYS)
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
        """Return the fields that determine the result, as JSON-compatible data."""
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
        log.fault(
            f"{location}: gate_mode",
            found=f"{mode!r:.60}",
            expected=f"one of {', '.join(_MODES)}",
            remedy=suggest(str(mode)[:60], _MODES),
        )
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
    location, experts, is_sound = f"{location}: {key}", list[Expert](), True
    value = content.get(key, [])
    if not isinstance(value, (list, tuple)) or (key == "experts" and not value):
        log.fault(location, found=f"{value!r:.60}", expected="a list with at least one entry")
        return (), None
    for number, item in enumerate(value):
        copies: list[Expert] | None = None
        with log.collect():
            copies = _expert(item, f"{location}[{number}]", log)
        experts += copies or []
        is_sound = is_sound and copies is not None
    if len(experts) > most:
        log.fault(location, found=f"{len(experts)} experts", expected=f"at most {most}")
    return tuple(experts), len(experts) if is_sound else None


def _expert(item: object, location: str, log: FindingLog) -> list[Expert] | None:
    """Return the expert that an entry describes, repeated ``copies`` times, or None after a fault."""
    if not isinstance(item, Mapping):
        raise InvalidInput(location, found=f"{item!r:.60}", expected="{source_model: path or org/name}")
    content = known_mapping(item, location, _EXPERT, log)
    model, residual, noise = None, None, 0.0
    positive: tuple[str, ...] | None = None
    negative: tuple[str, ...] | None = None
    copies = content.get("copies", 1)
    is_number = type(copies) is int and 1 <= copies <= _MOST
    if not is_number:
        log.fault(f"{location}.copies", found=f"{copies!r:.20}", expected=f"1 to {_MOST}")
    if "source_model" not in content:
        log.fault(location, found="no 'source_model'", expected="the dense model that provides the expert")
    with log.collect():
        if "source_model" in content:
            model = parse_reference(content["source_model"], f"{location}.source_model", log)
    with log.collect():
        noise = _number(content.get("noise_scale") or 0.0, f"{location}.noise_scale")
        if noise < 0:
            raise InvalidInput(
                f"{location}.noise_scale", found=f"{noise:g}", expected="a standard deviation of at least 0"
            )
    with log.collect():
        if "residual_scale" in content:
            residual = _number(content["residual_scale"], f"{location}.residual_scale")
    with log.collect():
        positive = _prompts(content.get("positive_prompts"), f"{location}.positive_prompts")
    with log.collect():
        negative = _prompts(content.get("negative_prompts"), f"{location}.negative_prompts")
    if model is None or positive is None or negative is None or not is_number:
        return None
    return [Expert(model, positive, negative, noise, residual, location)] * copies


def _prompts(value: object, location: str) -> tuple[str, ...]:
    if value is None:
        return ()
    prompts = [value] if isinstance(value, str) else value
    if not isinstance(prompts, (list, tuple)) or not all(isinstance(text, str) and text.strip() for text in prompts):
        raise InvalidInput(
            location,
            found=f"{value!r:.60}",
            expected="a list of non-empty texts",
            remedy="write texts for this expert, or set gate_mode: random and remove the prompts",
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
        raise InvalidInput(location, found=f"{value!r:.60}", expected="a number")
    return number
