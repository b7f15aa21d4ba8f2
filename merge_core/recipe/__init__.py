"""Recipes: from YAML in mergekit's dialect to one frozen value, to the parameters of each tensor, to variations of it.

A recipe is parsed once, strictly; after that nothing is validated again.
"""

from mergegate.merge_core.recipe.adapter_output import AdapterOutput
from mergegate.merge_core.recipe.chosen import chosen_models
from mergegate.merge_core.recipe.mixture import Expert, GateRows, Mixture
from mergegate.merge_core.recipe.overrides import apply_overrides, fit_to_method
from mergegate.merge_core.recipe.own_texts import AskedText, MeasuredInputs, ReadingOfTexts
from mergegate.merge_core.recipe.parameters import Condition, Parameters, value_for
from mergegate.merge_core.recipe.recipe import CLIENT_KEYS, ModelPlace, Module, Recipe, Slice, Source, load_recipe
from mergegate.merge_core.recipe.reference import (
    CheckpointRef,
    expanded,
    is_foreign_path,
    name_in_path,
    parse_reference,
    resolve_local,
)
from mergegate.merge_core.recipe.schema import recipe_schema
from mergegate.merge_core.recipe.tokenizer_choice import RowOrigin, TokenizerChoice, TokenRow

__all__ = [
    "CLIENT_KEYS",
    "AdapterOutput",
    "AskedText",
    "CheckpointRef",
    "Condition",
    "Expert",
    "GateRows",
    "MeasuredInputs",
    "Mixture",
    "ModelPlace",
    "Module",
    "Parameters",
    "ReadingOfTexts",
    "Recipe",
    "RowOrigin",
    "Slice",
    "Source",
    "TokenRow",
    "TokenizerChoice",
    "apply_overrides",
    "chosen_models",
    "expanded",
    "fit_to_method",
    "is_foreign_path",
    "load_recipe",
    "name_in_path",
    "parse_reference",
    "recipe_schema",
    "resolve_local",
    "value_for",
]
