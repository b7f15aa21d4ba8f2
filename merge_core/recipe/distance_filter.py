"""Drop or reweight models of a recipe by the distances between them, once these are measured.

merge_method: geometric_median      # derives the weights from the distances
leave_out_beyond: 5                 # drops models whose task vector is longer than 5 medians; any method with a base
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from mergegate.merge_core.recipe.parameters import Condition, Parameters, Setting
from mergegate.merge_core.recipe.recipe import ModelPlace, Recipe, Source

_WEIGHT = "weight"


def select_models(recipe: Recipe, places: Mapping[str, ModelPlace], shares: Mapping[str, float] | None) -> Recipe:
    """Return ``recipe`` without the models that are left out, and with ``shares`` as the weights of the others.

    Args:
        recipe: The recipe to change.
        places: Distances of each model, by reference.
        shares: New weights by reference. None keeps the weights of the recipe.
    """
    left_out = {model for model, place in places.items() if place.left_out}

    def reweight(source: Source) -> Source:
        share = shares.get(str(source.model)) if shares else None
        if share is None:
            return source
        others = tuple(setting for setting in source.parameters.settings if setting.name != _WEIGHT)
        weight = Setting(_WEIGHT, (Condition((share,), None, f"{recipe.location}: {source.model}"),))
        return replace(source, parameters=Parameters((*others, weight)))

    modules = tuple(
        replace(
            module,
            slices=tuple(
                replace(
                    cut, sources=tuple(reweight(source) for source in cut.sources if str(source.model) not in left_out)
                )
                for cut in module.slices
            ),
        )
        for module in recipe.modules
    )
    return replace(recipe, modules=modules, places=dict(places))
