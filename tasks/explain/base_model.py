"""The base that models were made from, as their cards name it: where a recipe without one could begin."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from mergegate.tasks.preflight.licenses import CardSource, declared


def named_base(models: Iterable[Path], directory: Path) -> str | None:
    """What the cards of all models name as their base, as a recipe in ``directory`` would write it.

    None where a card names none or several, where they differ, or where the base is one of the models.

    Args:
        models: Their directories.
    """
    places = [place.resolve() for place in models]
    found = set()
    for place in places:
        bases = declared(CardSource(place)).base_model
        if len(bases) != 1:
            return None
        beside = place / bases[0]
        found.add(beside.resolve() if beside.is_dir() else bases[0])
    if len(found) != 1:
        return None
    (base,) = found
    if isinstance(base, str):  # a repository of the Hub
        return base
    return None if base in places else os.path.relpath(base, directory.resolve())
