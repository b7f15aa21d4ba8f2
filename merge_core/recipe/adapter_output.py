"""Parse ``output: adapter``: a recipe that combines adapters on one base into one adapter on that base.

::

    merge_method: ties
    base_model: BASE
    models:
    - {model: BASE+ADAPTER, parameters: {weight: 0.5, density: 0.5}}
    - {model: BASE+OTHER, parameters: {weight: 0.5, density: 0.5}}
    output: adapter
    rank: 16

Without its last two lines, the same recipe produces a merged model: the base with the combined adapter applied. A
method can therefore produce an adapter only if its result is the base plus a term that depends only on the task
vectors.
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
    """Settings of the adapter that a recipe produces.

    Args:
        rank: Rank of the adapter's factors. None means the sum of the ranks of all inputs, which loses nothing.
        is_sum: Whether the result is a weighted sum of the adapters' products.
    """

    rank: int | None
    is_sum: bool

    def canonical(self) -> dict[str, Any]:
        """Return the settings that determine the result, as JSON-compatible data."""
        return {"kind": "adapter", "rank": self.rank}


def parse_output(
    content: Mapping[str, Any],
    method: Method,
    base: CheckpointRef | None,
    models: Sequence[CheckpointRef],
    location: str,
) -> AdapterOutput | None:
    """Return the settings in ``output`` and ``rank`` of a recipe, or None if its result is a model.

    Raises:
        InvalidInput: The output is unknown, or the recipe cannot produce an adapter.
    """
    output, rank = content.get("output"), content.get("rank")
    if output in (None, "model"):
        if rank is not None:
            raise InvalidInput(f"{location}rank", found="rank without output: adapter", expected="output: adapter")
        return None
    if output != "adapter":
        raise InvalidInput(f"{location}output", found=f"{output!r:.60}", expected="model or adapter")
    if method.traits.adapters is None:
        fitting = [name for name, candidate in merge_methods().items() if candidate.traits.adapters]
        raise InvalidInput(
            f"{location}output",
            found=f"{method.name} cannot produce an adapter",
            expected=f"one of {', '.join(fitting)}, which add a change of low rank to the base",
        )
    for key in _NOT_WITH:
        if content.get(key) is not None:
            raise InvalidInput(f"{location}{key}", found="it is set", expected="no such key for an adapter")
    if rank is not None and not (type(rank) is int and 1 <= rank <= _MOST_RANK):
        raise InvalidInput(f"{location}rank", found=f"{rank!r:.60}", expected=f"a whole number from 1 to {_MOST_RANK}")
    if rank is None and method.traits.adapters != "sum":
        raise InvalidInput(
            f"{location}rank",
            found="not set",
            expected=f"a rank, because the result of {method.name} has no rank of its own",
        )
    adapted = [model for model in models if model != base or model.adapter]
    bases = dict.fromkeys(CheckpointRef(model.path, model.revision) for model in adapted)
    plain = [model for model in adapted if not model.adapter]
    if plain or len(bases) != 1 or (base is not None and [base] != list(bases)):
        raise InvalidInput(
            f"{location}models",
            found=", ".join(map(str, plain or [*bases, *([base] if base else [])])),
            expected="adapters on one base, each written as base+adapter" + (f", with the base {base}" if base else ""),
        )
    return AdapterOutput(rank, is_sum=method.traits.adapters == "sum")
