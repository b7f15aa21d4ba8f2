"""Merge models, gate the merge and release it.

The code is in three layers. Each is a folder at the top of the repository and is imported as a package of this one:
:mod:`mergegate.flows` orchestrates, :mod:`mergegate.tasks` implements one stage per package, and
:mod:`mergegate.merge_core` merges. Imports only point down.
"""
