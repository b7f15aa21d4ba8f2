"""Define the recipe that measures each method: typical parameters, and checkpoints by name."""

from __future__ import annotations

from dataclasses import dataclass

from checkpoints import BASE, FINE_TUNES

# Method → number of fine-tunes, whether the base takes part, parameters.
_RECIPES: dict[str, tuple[int, bool, str]] = {
    "linear": (2, False, "weight: 0.5"),
    "slerp": (2, False, "t: 0.5"),
    "nuslerp": (2, False, "weight: 0.5"),
    "multislerp": (3, True, "weight: 0.33"),
    "karcher": (3, False, ""),
    "task_arithmetic": (3, True, "weight: 0.4"),
    "ties": (3, True, "weight: 0.5, density: 0.5"),
    "dare_linear": (3, True, "weight: 0.4, density: 0.5"),
    "dare_ties": (3, True, "weight: 0.4, density: 0.5"),
    "della": (3, True, "weight: 0.4, density: 0.5, epsilon: 0.1"),
    "della_linear": (3, True, "weight: 0.4, density: 0.5, epsilon: 0.1"),
    "breadcrumbs": (3, True, "weight: 0.4, density: 0.9, gamma: 0.01"),
    "breadcrumbs_ties": (3, True, "weight: 0.4, density: 0.9, gamma: 0.01"),
    "localize_and_stitch": (3, True, "weight: 0.5, density: 0.1"),
    "consensus_ta": (3, True, "weight: 0.4"),
    "median": (3, True, ""),
    "trimmed_mean": (3, True, ""),
    "model_stock": (3, True, ""),
    "sce": (3, True, "select_topk: 0.5"),
    "ram": (3, True, ""),
    "ramplus_tl": (3, True, ""),
    "nearswap": (1, True, "t: 0.001"),
    "arcee_fusion": (1, True, ""),
    "passthrough": (1, False, ""),
}
METHODS = tuple(_RECIPES)


@dataclass(frozen=True)
class Case:
    """One method on one family.

    Args:
        method: Name of the method.
        models: Names of the checkpoints that it reads.
        recipe: YAML with models relative to the family's directory.
    """

    method: str
    models: tuple[str, ...]
    recipe: str


def case(method: str, available: int) -> Case:
    """Return the case of ``method`` in a family of ``available`` fine-tunes."""
    count, with_base, parameters = _RECIPES[method]
    tunes = FINE_TUNES[: min(count, available)]
    lines = [f"merge_method: {method}"]
    if with_base:
        lines.append(f"base_model: {BASE}")
    elif method == "slerp":
        lines.append(f"base_model: {tunes[0]}")
    lines.append(f"models: [{', '.join(f'{{model: {tune}}}' for tune in tunes)}]")
    if parameters:
        lines.append(f"parameters: {{{parameters}}}")
    # Both tools use bfloat16 anyway, but the peer stores some results in float32 without these lines.
    lines.append("dtype: bfloat16\nout_dtype: bfloat16")
    return Case(method, ((BASE, *tunes) if with_base else tunes), "\n".join(lines) + "\n")
