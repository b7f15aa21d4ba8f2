"""The recipes that a profile would release: its own, then the remedies, in the order in which they are tried.

``candidates.py`` reads them. ``clients.py`` makes the recipe of tonight's round out of the clients that are there.
``tuning.py`` says where the scale of a recipe is searched for.
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
from mergegate.flows.candidates.clients import ClientRound, client_digest, client_round, clients_document
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
    "clients_document",
    "has_searchable_scale",
    "recipe_of_documents",
    "scale_search",
    "searched_recipe",
]
