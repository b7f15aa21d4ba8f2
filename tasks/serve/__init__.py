"""Serve a merge as in production, and check the server's answers before the merge is published.

A checkpoint that loads is not necessarily a model that answers. ``static_checks`` finds the problems that headers and
configuration reveal. ``process`` starts a server, and always ends it. ``checks`` sends requests to the server.
``smoke`` runs all steps in order, and ``stage`` turns them into a cached stage of the release.
"""

from mergegate.tasks.serve.checks import is_loop
from mergegate.tasks.serve.launch import find_server
from mergegate.tasks.serve.measurements import ServingCost
from mergegate.tasks.serve.reference import Chat, Reference, ReferenceRequest, make_reference, render_chat
from mergegate.tasks.serve.settings import ServeSettings
from mergegate.tasks.serve.smoke import STEPS, RunningServer, SmokeSetup, smoke_checkpoint, smoke_url
from mergegate.tasks.serve.stage import serve_models, server_of
from mergegate.tasks.serve.verdict import SERVED_AS_LORA, Check, ServedModels, ServeVerdict
