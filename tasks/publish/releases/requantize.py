"""Quantize the variants of a release again from the release of their merge, and compare them byte by byte.

The tools must be installed in this project, and their versions decide the bytes. mergegate verifies both releases, and
gives the quantizer a directory with the files of the merge only, because some tools read the card of a model.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from mergegate.merge_core.adapters import CONFIG_FILE
from mergegate.merge_core.errors import InvalidInput, Refused
from mergegate.tasks.checkpoints import Model, checkpoint_digest, deciding_files
from mergegate.tasks.publish.content import DESCRIPTION_FILES, PROVENANCE
from mergegate.tasks.publish.releases.origin import MergeLink, find_merge
from mergegate.tasks.publish.releases.reproduce import ReproducedRelease, explain_difference
from mergegate.tasks.publish.releases.verify import VerifiedRelease
from mergegate.tasks.publish.releases.weights import require_equal_files
from mergegate.tasks.publish.targets import PublishedRelease
from mergegate.tasks.stage import separate_store, store
from mergegate.tasks.variants import Variant, VariantFormat


def rebuild_variants(
    release: PublishedRelease,
    verified_release: VerifiedRelease,
    scratch: Path,
    *,
    merge: str | None = None,
    directory: Path | None = None,
) -> ReproducedRelease:
    """Quantize again in the empty directory ``scratch``, and compare every file with the release.

    Args:
        release: Release of quantized variants.
        verified_release: Result of verifying ``release``, with the release of its merge.
        scratch: Directory on a disk with space for the merge, its unquantized form and the variants.
        merge: Reference to the release of the merge. None: the one next to ``release``.
        directory: Directory at which relative paths start: environments of tools, and calibration texts. None: the
            working directory.

    Raises:
        InvalidInput: The merge's release, a tool or a calibration text is missing.
        Refused: The merge cannot be quantized, or the rebuilt files differ from the release.
    """
    link = verified_release.merge
    found = find_merge(release, link, merge) if link else None
    if link is None or found is None or isinstance(found, MergeLink):
        raise InvalidInput(
            release.reference,
            found=str(link or "a release without a merge"),
            expected="the release of the merge, from which the variants are quantized again",
            remedy="pass its directory or address with --merge",
        )
    settings, published = _read_build(release, verified_release.statement)
    root = directory or Path.cwd()
    settings.check(root)
    with separate_store(scratch / "home"):
        model = _merge_model(found, scratch / "merge")
        started = time.monotonic()
        rebuilt: dict[str, Path] = {}
        original: dict[str, str] = {}
        installed: dict[str, str] = {}
        for variant_type, facts in published.items():
            artifact = settings.build(model, variant_type, root)
            rebuilt |= settings.release_files(link.name, artifact)
            original |= facts["versions"]
            installed |= dict.fromkeys(facts["versions"], "") | artifact.value.versions
            calibration = facts.get("calibration", "")
            if artifact.value.calibration != calibration:
                raise InvalidInput(
                    f"{release.reference}: calibration text",
                    found=f"a text with the sha256 {artifact.value.calibration[:12] or 'of none'}",
                    expected=f"the text with the sha256 {calibration[:12]} that the release was calibrated with",
                    remedy="pass the directory of that text with --parents",
                )
        seconds = time.monotonic() - started
        reason = explain_difference(original, installed, "merge")
        total = require_equal_files(release, verified_release.listing, rebuilt, reason)
    return ReproducedRelease(release.reference, tuple(sorted(rebuilt)), total, seconds, "cpu")


def _read_build(
    release: PublishedRelease, statement: Mapping[str, Any]
) -> tuple[VariantFormat, Mapping[str, Mapping[str, Any]]]:
    """Return the settings of the variants, and the facts about each published variant by its type."""
    try:
        definition = statement["predicate"]["buildDefinition"]
        entry, published = definition["externalParameters"]["variant"], definition["internalParameters"]["variants"]
        settings: VariantFormat = TypeAdapter(Variant).validate_python(entry)
        if unknown := set(published) - set(settings.variant_types):
            raise ValueError(f"{min(unknown)} is not a variant of its settings")
        TypeAdapter(dict[str, dict[str, Any]]).validate_python(published)
        for facts in published.values():
            TypeAdapter(dict[str, str]).validate_python(facts["versions"])
        return settings, published
    except (LookupError, TypeError, ValueError) as error:
        first = error.errors()[0] if isinstance(error, ValidationError) else None
        raise Refused(
            f"{release.reference}: {PROVENANCE}",
            found=f"{'.'.join(map(str, first['loc']))}: {first['msg']}" if first else f"no valid {error}",
            expected="provenance that this version of mergegate can read",
            remedy="reproduce the release with the version of mergegate that built it",
        ) from None


def _merge_model(merge: PublishedRelease, directory: Path) -> Model:
    """Return the merge in a new ``directory`` with the files of the checkpoint only, which have the listed sha256."""
    source, listing, hashes = merge.download(), merge.files(), store().hashes
    names = [name for name in deciding_files(source) if name not in DESCRIPTION_FILES]
    if CONFIG_FILE in names:
        raise InvalidInput(
            merge.reference,
            found="an adapter, which the release does not contain a base model for",
            expected="a complete model",
            remedy="reproduce the release of the merge instead",
        )
    for name in names:
        path = directory / name
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            os.link((source / name).resolve(), path)
        except OSError:  # another disk
            shutil.copyfile(source / name, path)
        if (actual := hashes.sha256(path, trust=False)) != listing.get(name, (0, ""))[1]:
            raise Refused(
                f"{merge.reference}: {name}",
                found=f"sha256 {actual[:12]}…",
                expected="the file that was verified",
                remedy="run again; the file changed, or its download is damaged",
            )
    files = tuple((name, listing[name][1]) for name in sorted(names))
    return Model(name="merge", digest=checkpoint_digest(directory, hashes), directory=directory, files=files)
