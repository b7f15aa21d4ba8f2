"""The recipes that a profile would release: its own, then the remedies, in the order in which they are tried.

``candidates.py`` reads them. ``clients.py`` makes the recipe of tonight's round out of the clients that are there.
"""

from flows.candidates.candidates import (
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
from flows.candidates.clients import ClientRound, client_round, clients_document

__all__ = [
    "AUTO",
    "MOST_PROPOSED",
    "Candidate",
    "ClientRound",
    "SearchedRecipe",
    "Written",
    "candidate_recipes",
    "changed_candidate",
    "client_round",
    "clients_document",
    "recipe_of_documents",
    "searched_recipe",
]
