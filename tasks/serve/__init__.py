"""The serve stage: the merge is served as production will serve it, and asked, before it is published.

A checkpoint that loads is not a model that answers. ``static_checks`` finds what headers and configuration give away;
``process`` starts a server in an environment of its own and ends it whatever happens; ``checks`` asks it;
``smoke`` puts them in order; ``stage`` makes that a cached stage of the release.
"""
