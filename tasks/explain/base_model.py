"""Find the base that models were made from by their cards, for recipes that declare no base."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from mergegate.tasks.preflight.licenses import CardSource, read_declaration


def named_base(models: Iterable[Path], directory: Path) -> str | None:
    """Return the base that the cards of all models name, in the form that a recipe in ``directory`` would use.

    Returns None if a card names no base or several, if the cards differ, or if the base is one of the models.

    Args:
        models: Directories of the models.
    """
    directories = [model_directory.resolve() for model_directory in models]
    candidates = set()
    for model_directory in directories:
        bases = read_declaration(CardSource(model_directory)).base_model
        if len(bases) != 1:
            return None
        local_path = model_directory / bases[0]
        candidates.add(local_path.resolve() if local_path.is_dir() else bases[0])
    if len(candidates) != 1:
        return None
    (base,) = candidates
    if isinstance(base, str):  # a repository of the Hub
        return base
    return None if base in directories else os.path.relpath(base, directory.resolve())
