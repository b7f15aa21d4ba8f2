"""Build the candidate recipes of a profile: its own recipe, then the remedies in order.

* ``candidates`` reads the recipes.
* ``clients`` builds the recipe of a round from the available clients.
* ``run_expansion`` lists the checkpoints of a training run.
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
    recipe_of_file,
    searched_recipe,
)
from mergegate.flows.candidates.clients import client_digest, client_round
from mergegate.flows.candidates.run_expansion import ExpandedRecipe, expand_training_runs, names_training_run
from mergegate.flows.candidates.tuning import SCALE, TUNE, TuningSize, has_searchable_scale, scale_search
