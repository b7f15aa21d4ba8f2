"""Recipes whose result is an adapter: adapters on one base become one adapter on it.

::

    merge_method: ties
    base_model: BASE
    models:
      - {model: BASE+ADAPTER, parameters: {weight: 0.5, density: 0.5}}
      - {model: BASE+OTHER, parameters: {weight: 0.5, density: 0.5}}
    output: adapter
    rank: 16

Without its last two lines the recipe makes the model that the adapter makes of the base. So a method fits if it adds
something to the base that depends on the differences to it alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mergegate.merge_core.errors import InvalidInput
from mergegate.merge_core.methods import Method, merge_methods
from mergegate.merge_core.recipe.reference import CheckpointRef

_MOST_RANK = 4096
_NOT_WITH = ("slices", "modules", "tokenizer", "tokenizer_source", "chat_template", "name")


@dataclass(frozen=True)
class AdapterOutput:
    """What is asked of the adapter.

    Args:
        rank: Of its factors; None: as many as all adapters have together, without loss.
        is_sum: Whether it is a sum of the adapters' products.
    """

    rank: int | None
    is_sum: bool

    def canonical(self) -> dict[str, Any]:
        """JSON-able form of what decides the result."""
        return {"kind": "adapter", "rank": self.rank}


def parse_output(
    content: Mapping[str, Any], method: Method, base: CheckpointRef | None, models: Sequence[CheckpointRef], where: str
) -> AdapterOutput | None:
    """What a recipe says of its output; None: a model.

    Args:
        content: The recipe.
        method: Its method.
        base: Its ``base_model``.
        models: Everything that it merges, the base among them where the method has it there.
        where: Prefix for messages.

    Raises:
        InvalidInput: An output that is not known, or a recipe that cannot have an adapter for its result.
    """
    output, rank = content.get("output"), content.get("rank")
    if output in (None, "model"):
        if rank is not None:
            raise InvalidInput(f"{where}rank", found="it is set", expected="only with output: adapter")
        return None
    if output != "adapter":
        raise InvalidInput(f"{where}output", found=f"{output!r:.60}", expected="model or adapter")
    if method.traits.adapters is None:
        fitting = [name for name, other in merge_methods().items() if other.traits.adapters]
        raise InvalidInput(
            f"{where}output",
            found=f"adapter, of {method.name}",
            expected=f"one of {', '.join(fitting)}: what they add to the base is a change of low rank",
        )
    for key in _NOT_WITH:
        if content.get(key) is not None:
            raise InvalidInput(f"{where}{key}", found="it is set", expected="nothing: an adapter has no such part")
    if rank is not None and not (type(rank) is int and 1 <= rank <= _MOST_RANK):
        raise InvalidInput(f"{where}rank", found=f"{rank!r:.60}", expected=f"a whole number from 1 to {_MOST_RANK}")
    if rank is None and method.traits.adapters != "sum":
        raise InvalidInput(
            f"{where}rank",
            found="not set",
            expected=f"the rank of the result: what {method.name} makes of products has none of its own",
        )
    adapted = [model for model in models if model != base or model.adapter]
    bases = dict.fromkeys(CheckpointRef(model.path, model.revision) for model in adapted)
    plain = [model for model in adapted if not model.adapter]
    if plain or len(bases) != 1 or (base is not None and [base] != list(bases)):
        named = ", ".join(map(str, plain or [*bases, *([base] if base else [])]))
        raise InvalidInput(
            f"{where}models",
            found=f"{named}",
            expected="adapters on one base, each written base+adapter" + (f", the base {base}" if base else ""),
        )
    return AdapterOutput(rank, is_sum=method.traits.adapters == "sum")
