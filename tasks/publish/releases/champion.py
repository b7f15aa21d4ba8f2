"""Load published releases for comparison: the champion (the current release) and the anchor (an earlier one)."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from pydantic import Field

from mergegate.merge_core.errors import MergegateError
from mergegate.merge_core.files import HashMemo
from mergegate.merge_core.parsing import read_plain
from mergegate.tasks.checkpoints import Model, deciding_files
from mergegate.tasks.gate import ANCHOR, CHAMPION, SelectingSample
from mergegate.tasks.publish.content import DESCRIPTION_FILES, MAX_METADATA_BYTES, PROVENANCE, read_document
from mergegate.tasks.publish.targets import PublishTarget
from mergegate.tasks.store import MANIFEST, VALUE, NotInKey, merkle


class ReleasedModel(Model):
    """A published release as a model."""

    # State of the target (see ``CurrentRelease``), if it reports one. It prevents replacing another release by mistake.
    head: Annotated[str | None, NotInKey] = None
    version: Annotated[str, NotInKey] = ""  # version name
    location: Annotated[Path | str, NotInKey] = ""  # directory or address of the release, for display
    complete: Annotated[bool, NotInKey] = True  # whether the publication was completed
    # Documents that selected the release, by task; empty if its provenance does not name them
    samples: Annotated[dict[str, SelectingSample], NotInKey] = Field(default_factory=dict)


def load_released_model(
    target: PublishTarget | None, root: Path, merge: Model, hashes: HashMemo, version: str | None = None
) -> ReleasedModel | None:
    """Return the model of the current release (the champion) or of an earlier one (the anchor), or None without one.

    If the merge is byte-identical to the release, the result has the digest of the merge, so that cached evaluations
    apply and a scheduled run with nothing new evaluates nothing.

    ``root`` is the directory of the profile, where relative paths of the target start. ``version`` is ``first`` or a
    version name for the anchor, and None for the champion.

    Raises:
        InvalidInput: There is no such version.
        Refused: The target is unavailable.
    """
    if target is None:
        return None
    release = target.earlier_release(root, version) if version else target.current_release(root)
    if release is None:
        return None
    # Size and sha256 of every file that determines the behavior of each model, without files that only describe it.
    released_files, merged_files = (
        {
            name: ((directory / name).stat().st_size, hashes.sha256(directory / name))
            for name in deciding_files(directory)
            if name not in DESCRIPTION_FILES | {MANIFEST, VALUE}
        }
        for directory in (release.directory, merge.directory)
    )
    # List every file that a library might load with the checkpoint, so that an added file is detected, too.
    files = {path: hashes.sha256(release.directory / path) for path in deciding_files(release.directory)}
    has_same_code = all(
        released_files.get(name) == merged_files.get(name)
        for name in released_files.keys() | merged_files.keys()
        if name.endswith(".py")
    )
    return ReleasedModel(
        name=ANCHOR if version else CHAMPION,
        digest=merge.digest if released_files == merged_files else merkle(released_files),
        directory=release.directory,
        head=release.head,
        version=release.name,
        location=release.location or release.directory,
        complete=release.complete,
        files=tuple(sorted(files.items())),
        runs_code=merge.runs_code and has_same_code,
        samples=selecting_samples(release.directory),
    )


def selecting_samples(directory: Path) -> dict[str, SelectingSample]:
    """Return the documents of each task that selected the release in ``directory``, according to its provenance.

    The provenance of an older release, which does not name the start of a sample, means the beginning of the order. If
    there is no readable provenance, the result is empty, so that the next sample starts at the beginning.
    """
    try:
        statement = read_document(read_plain(directory / PROVENANCE, MAX_METADATA_BYTES, within=directory), PROVENANCE)
        guards = statement["predicate"]["mergegate_verdict"]["guards"]
        return {
            str(guard["task"]): SelectingSample(
                start=guard.get("sample_start", 0),
                documents=guard.get("documents_asked") or guard["n"],
                score=guard.get("merge_score"),
            )
            for guard in guards
        }
    except (MergegateError, LookupError, TypeError, AttributeError, ValueError):
        return {}
