"""The serve stage: the merge is served as production will serve it, and asked, before it is published.

A checkpoint that loads is not a model that answers. ``static_checks`` finds what headers and configuration give away;
``process`` starts a server in an environment of its own and ends it whatever happens; ``checks`` asks it;
``smoke`` puts them in order; ``stage`` makes that a cached stage of the release.
"""

from mergegate.tasks.serve.launch import find_server
from mergegate.tasks.serve.measurements import ServingCost
from mergegate.tasks.serve.settings import ServeSettings
from mergegate.tasks.serve.smoke import STEPS, smoke_checkpoint, smoke_url
from mergegate.tasks.serve.stage import check_server, serve_models
from mergegate.tasks.serve.verdict import SERVED_AS_LORA, ServedModels, ServeVerdict

__all__ = [
    "SERVED_AS_LORA",
    "STEPS",
    "ServeSettings",
    "ServeVerdict",
    "ServedModels",
    "ServingCost",
    "check_server",
    "find_server",
    "serve_models",
    "smoke_checkpoint",
    "smoke_url",
]
