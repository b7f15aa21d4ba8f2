"""Models of a recipe that are chosen by how far they are from each other, once that is known.

merge_method: geometric_median      # whose voices follow from distances
leave_out_beyond: 5                 # times the median length of a task vector; of any method, with a base
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from mergegate.merge_core.recipe.parameters import Condition, Parameters, Setting
from mergegate.merge_core.recipe.recipe import ModelPlace, Recipe, Source

_WEIGHT = "weight"


def select_models(recipe: Recipe, places: Mapping[str, ModelPlace], shares: Mapping[str, float] | None) -> Recipe:
    """``recipe`` without the models that are left out; the others with ``shares`` as their weights, if there are some.

    Args:
        places: Of each model, by reference.
        shares: By reference.
    """
    left_out = {model for model, place in places.items() if place.left_out}

    def kept(source: Source) -> Source:
        share = shares.get(str(source.model)) if shares else None
        if share is None:
            return source
        others = tuple(one for one in source.parameters.settings if one.name != _WEIGHT)
        weight = Setting(_WEIGHT, (Condition((share,), None, f"{recipe.where}: {source.model}"),))
        return replace(source, parameters=Parameters((*others, weight)))

    modules = tuple(
        replace(
            module,
            slices=tuple(
                replace(cut, sources=tuple(kept(one) for one in cut.sources if str(one.model) not in left_out))
                for cut in module.slices
            ),
        )
        for module in recipe.modules
    )
    return replace(recipe, modules=modules, places=dict(places))
