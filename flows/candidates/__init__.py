"""Build the candidate recipes of a profile: its own recipe, then the remedies in order.

* ``candidates`` reads the recipes.
* ``clients`` builds the recipe of a round from the available clients.
* ``tuning`` sets up the search for the scale of a recipe.
"""

from mergegate.flows.candidates.candidates import (
    AUTO,
    MOST_PROPOSED,
    Candidate,
    SearchedRecipe,
    Written,
    candidate_recipes,
    changed_candidate,
    recipe_of_documents,
    searched_recipe,
)
from mergegate.flows.candidates.clients import ClientRound, client_digest, client_round
from mergegate.flows.candidates.tuning import SCALE, TUNE, TuningSize, has_searchable_scale, scale_search

__all__ = [
    "AUTO",
    "MOST_PROPOSED",
    "SCALE",
    "TUNE",
    "Candidate",
    "ClientRound",
    "SearchedRecipe",
    "TuningSize",
    "Written",
    "candidate_recipes",
    "changed_candidate",
    "client_digest",
    "client_round",
    "has_searchable_scale",
    "recipe_of_documents",
    "scale_search",
    "searched_recipe",
]
