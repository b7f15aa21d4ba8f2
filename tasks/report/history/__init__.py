"""Keep the history of all runs of a project: a line per run in ``history.jsonl``, a page per run, and an index page."""
