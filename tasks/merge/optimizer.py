"""What a server's optimizer keeps from one round to the next: models in shape, made by steps of the round's recipe.

A recipe says it by itself: what stands in the place of models and is none (``Recipe.states``) is kept where it is the
result of a step. It is an artifact of its own, all of a round together or none of it, beside the release that it
belongs to; the release's provenance has the digest of each. The next round names it as any model is named::

    .mergegate/store/optimizer/<key>/mean, .../squares

It is made once the merge has passed, of the same parents again: nothing is kept of what is refused.
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
    """What was kept: the artifact has a directory in Hugging Face layout for each of the names."""

    names: tuple[str, ...]
    bytes_written: int
    seconds: Annotated[float, NotInKey]
    weights: dict[str, str]  # sha256 of every file that was hashed while it was written

    def summary(self) -> str:
        return f"{', '.join(self.names)} for the next round · {format_bytes(self.bytes_written)}"


@stage(_NAME, version=1, hashes_of=lambda value: value.weights, resumable=True)
def optimizer_state(
    out: Path, pinned: PinnedRecipe, numerics: Numerics, about: tuple[tuple[str, str], ...]
) -> OptimizerState:
    """Carry out those steps of a recipe that an optimizer keeps.

    Args:
        about: Name and text of files that lie beside each, as beside any model: card and licences.

    Raises:
        InvalidInput, Refused: as ``merge``.
    """
    began, written, weights = time.monotonic(), 0, dict[str, str]()
    for name in optimizer_steps(pinned):
        recipe = pinned.recipe.ending_with(name)
        read = {str(ref) for ref in recipe.references()}
        parents = tuple(parent for parent in pinned.parents if parent.ref in read)
        made = merge.work(out / name, PinnedRecipe(recipe, parents), numerics)
        for file, text in about:
            (out / name / file).parent.mkdir(exist_ok=True)
            (out / name / file).write_text(text, encoding="utf-8")
        weights |= {f"{name}/{file}": sha256 for file, sha256 in made.weights.items()}
        written += made.bytes_written
    return OptimizerState(
        names=optimizer_steps(pinned), bytes_written=written, seconds=time.monotonic() - began, weights=weights
    )


def optimizer_steps(pinned: PinnedRecipe) -> tuple[str, ...]:
    """The steps of a recipe whose results an optimizer keeps."""
    made = {step.name for step in pinned.recipe.steps}
    return tuple(name for name in pinned.recipe.states if name in made)


def optimizer_state_paths(artifact: Artifact[OptimizerState]) -> dict[str, tuple[str, Path]]:
    """By name: how :func:`find_optimizer_state` is asked for it, and its directory."""
    own = f"{artifact.stage}/{artifact.key[:32]}"
    return {name: (f"{own}/{name}", artifact.directory / name) for name in artifact.value.names}


def find_optimizer_state(named: str) -> Path | None:
    """Where something lies that an optimizer has kept, if the store, here or shared, has it and it can be believed.

    Args:
        named: As of :func:`optimizer_state_paths`; whatever a provenance says.
    """
    if (found := _PLACE.fullmatch(named)) is None:
        return None
    record_stage(_NAME, found[1], "", in_run_only=True)
    artifacts = store().family(_NAME, found[1], OptimizerState)
    place = artifacts[0].directory / found[2] if artifacts else None
    return place if place and found[2] in artifacts[0].value.names else None
