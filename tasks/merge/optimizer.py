"""Store the state of a server optimizer from one round to the next.

The state consists of tensors in the shape of a model, which steps of the round's recipe compute. There is no setting
for it: a source that the recipe uses as a state instead of a model (``Recipe.states``) is stored if a step computes it.
All states of a round form one artifact next to the release, and the provenance of the release has the digest of each
state. The recipe of the next round refers to them as it does to models::

    .mergegate/store/optimizer/<key>/mean, .../squares

The states are computed from the same parents after the merge has passed, so a refused merge leaves no states.
"""

from __future__ import annotations

import re
import time
from pathlib import Path
from typing import Annotated

from mergegate.merge_core.wording import format_bytes
from mergegate.tasks.checkpoints import PinnedRecipe
from mergegate.tasks.merge.stage import Numerics, merge
from mergegate.tasks.stage import StageValue, record_stage, stage, store
from mergegate.tasks.store import Artifact, NotInKey

_NAME = "optimizer"
_PLACE = re.compile(rf"{_NAME}/([0-9a-f]{{32}})/([A-Za-z0-9_-]+)")


class OptimizerState(StageValue):
    """Summary of the stored optimizer states. The artifact has one directory in Hugging Face layout per state."""

    names: tuple[str, ...]
    bytes_written: int
    seconds: Annotated[float, NotInKey]
    weights: dict[str, str]  # sha256 of each file that was hashed during writing

    def summary(self) -> str:
        return f"{', '.join(self.names)} for the next round · {format_bytes(self.bytes_written)}"


@stage(_NAME, version=1, hashes_of=lambda value: value.weights, resumable=True)
def optimizer_state(
    out: Path, pinned: PinnedRecipe, numerics: Numerics, about: tuple[tuple[str, str], ...]
) -> OptimizerState:
    """Execute the steps of a recipe that compute optimizer states.

    ``about`` holds the card and licenses to write next to each state, as pairs of file name and text.

    Raises:
        InvalidInput: A parent contains NaN or infinity.
        Refused: A result is not healthy; see :func:`mergegate.tasks.merge.merge`.
    """
    began, written, weights = time.monotonic(), 0, dict[str, str]()
    for name in optimizer_steps(pinned):
        recipe = pinned.recipe.ending_with(name)
        refs = {str(ref) for ref in recipe.references()}
        parents = tuple(parent for parent in pinned.parents if parent.ref in refs)
        merged = merge.work(out / name, PinnedRecipe(recipe, parents), numerics)
        for file, text in about:
            (out / name / file).parent.mkdir(exist_ok=True)
            (out / name / file).write_text(text, encoding="utf-8")
        weights |= {f"{name}/{file}": sha256 for file, sha256 in merged.weights.items()}
        written += merged.bytes_written
    return OptimizerState(
        names=optimizer_steps(pinned), bytes_written=written, seconds=time.monotonic() - began, weights=weights
    )


def optimizer_steps(pinned_recipe: PinnedRecipe) -> tuple[str, ...]:
    """Return the names of the steps whose results are optimizer states."""
    steps = {step.name for step in pinned_recipe.recipe.steps}
    return tuple(name for name in pinned_recipe.recipe.states if name in steps)


def optimizer_state_paths(artifact: Artifact[OptimizerState]) -> dict[str, tuple[str, Path]]:
    """Return the lookup name (for :func:`find_optimizer_state`) and the directory of each state, by name."""
    prefix = f"{artifact.stage}/{artifact.key[:32]}"
    return {name: (f"{prefix}/{name}", artifact.directory / name) for name in artifact.value.names}


def find_optimizer_state(name: str) -> Path | None:
    """Return the directory of an optimizer state, or None if no store, local or shared, has an intact copy.

    ``name`` is a lookup name from :func:`optimizer_state_paths`. It may come from an untrusted provenance.
    """
    if (match := _PLACE.fullmatch(name)) is None:
        return None
    record_stage(_NAME, match[1], "", in_run_only=True)
    artifacts = store().family(_NAME, match[1], OptimizerState)
    directory = artifacts[0].directory / match[2] if artifacts else None
    return directory if directory and match[2] in artifacts[0].value.names else None
