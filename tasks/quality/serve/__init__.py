"""Serve a merge as in production, and check the server's answers before the merge is published.

A checkpoint that loads is not necessarily a model that answers. ``static_checks`` finds the problems that headers and
configuration reveal. ``launch`` builds a server's command line, and ``process`` starts it and always ends it.
``checks`` sends requests to the server, and ``stage`` runs all steps in order as a cached stage of the release.
"""

from mergegate.tasks.quality.serve.answers import Chat, Reference, ReferenceRequest, make_reference, render_chat
from mergegate.tasks.quality.serve.checks import is_loop
from mergegate.tasks.quality.serve.launch import find_server
from mergegate.tasks.quality.serve.settings import ServeSettings
from mergegate.tasks.quality.serve.stage import (
    STEPS,
    RunningServer,
    SmokeSetup,
    serve_models,
    smoke_checkpoint,
    smoke_url,
)
from mergegate.tasks.quality.serve.verdict import SERVED_AS_LORA, Check, ServedModels, ServeVerdict, ServingCost
