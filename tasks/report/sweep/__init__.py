"""Build the report of a sweep: a self-contained page, the table at the end of a run, and the progress line."""
