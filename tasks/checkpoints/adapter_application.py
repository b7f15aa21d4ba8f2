"""A parent with an adapter made a plain directory, once, for whoever has to load it: evaluation, perplexity, a server.

The merge does without: it applies the adapter while it streams. Both give the same bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated

from mergegate.merge_core import load_recipe, merge_weights, plan_merge
from mergegate.merge_core.engine import start_or_resume
from mergegate.merge_core.methods import PASSTHROUGH
from mergegate.merge_core.wording import format_bytes
from mergegate.tasks.checkpoints.pin import PinnedCheckpoint
from mergegate.tasks.stage import StageValue, advance, stage, versions
from mergegate.tasks.store import Artifact, NotInKey

_MODEL = "model"


class AppliedAdapter(StageValue):
    """What was made: the artifact is the model with its adapter applied, in Hugging Face layout."""

    tensors: int
    bytes_written: int
    seconds: Annotated[float, NotInKey]
    weights: dict[str, str]  # sha256 of every file that was hashed while it was written

    def summary(self) -> str:
        rate = self.bytes_written / max(self.seconds, 1e-6)
        return f"{format_bytes(self.bytes_written)} · {format_bytes(rate)}/s · {self.tensors} tensors"


@stage("apply", version=2, subject="parent", hashes_of=lambda value: value.weights, resumable=True)
def apply_to_directory(out: Path, parent: PinnedCheckpoint, libraries: dict[str, str]) -> AppliedAdapter:
    """Write ``parent`` with its adapter applied; goes on from the journal of a killed run.

    Args:
        libraries: Versions of those that decide the last place of a number.

    Raises:
        InvalidInput: when model or adapter hold NaN or infinity, or do not fit.
    """
    recipe = load_recipe({"merge_method": PASSTHROUGH.name, "models": [{"model": _MODEL}]}, where=parent.name)
    plan = plan_merge(recipe, {_MODEL: parent.open()})
    start_or_resume(out, plan)
    record = merge_weights(plan, out, device="cpu", on_progress=lambda done, total: advance(done, total, "B"))
    return AppliedAdapter(
        tensors=record.tensors,
        bytes_written=record.bytes_written,
        seconds=record.seconds,
        weights=dict(record.files),
    )


def apply_adapters(parents: Sequence[PinnedCheckpoint]) -> tuple[PinnedCheckpoint, ...]:
    """The same parents under the same names, each as a directory that any library can load. Call inside a flow."""
    return _made(parents, apply_to_directory)


def apply_adapters_outside_flow(parents: Sequence[PinnedCheckpoint]) -> tuple[PinnedCheckpoint, ...]:
    """As :func:`apply_adapters`, for commands that run no flow."""
    return _made(parents, apply_to_directory.build)


def find_applied_adapters(parents: Sequence[PinnedCheckpoint]) -> tuple[PinnedCheckpoint, ...]:
    """Those of the parents that could be loaded now: nothing is written for it."""
    found = []
    for parent in parents:
        if not parent.adapter:
            found.append(parent)
        elif made := apply_to_directory.find(parent, versions("torch")):
            found.append(_placed(parent, made))
    return tuple(found)


def _made(
    parents: Sequence[PinnedCheckpoint], make: Callable[[PinnedCheckpoint, dict[str, str]], Artifact[AppliedAdapter]]
) -> tuple[PinnedCheckpoint, ...]:
    return tuple(_placed(parent, make(parent, versions("torch"))) if parent.adapter else parent for parent in parents)


def _placed(parent: PinnedCheckpoint, made: Artifact[AppliedAdapter]) -> PinnedCheckpoint:
    plain = {"digest": made.digest, "directory": made.directory, "files": tuple(sorted(made.files.items()))}
    return parent.model_copy(update={**plain, "adapter": None})
