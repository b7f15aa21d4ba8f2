"""``mergegate extract-lora``: extract an adapter from a fine-tune and its base, and print the error of each factor."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console

from mergegate.merge_core.adapters import Extracted, ExtractionSettings, extract_adapter, write_adapter
from mergegate.merge_core.files import new_directory
from mergegate.tasks.checkpoints import find_checkpoint, identify_parents, open_parent, require_same_files
from mergegate.tasks.checkpoints.hub import download_snapshots
from mergegate.tasks.stage import store

_SHOWN = 5


def extract_to(
    tuned: str, base: str, out: Path, settings: ExtractionSettings, *, console: Console
) -> dict[str, object]:
    """Write the adapter that turns ``base`` into ``tuned`` to ``out``, and return the result as plain data.

    Raises:
        InvalidInput: A checkpoint does not exist, the two do not fit, or ``out`` exists.
        Refused: The Hub denies access to a checkpoint, or one changed while it was read.
    """
    with new_directory(out) as directory:
        extracted = _extract(tuned, base, directory, settings, console)
    return _print_extracted(out, extracted, console)


def _extract(tuned: str, base: str, directory: Path, settings: ExtractionSettings, console: Console) -> Extracted:
    checkpoints = [find_checkpoint(name) for name in (tuned, base)]
    if snapshots := [snapshot for parent in checkpoints for snapshot in parent.snapshots]:
        with console.status("fetching weights"):
            download_snapshots(snapshots, store().hashes)
    identities = identify_parents(checkpoints)
    with console.status("reading headers") as status:
        extracted = extract_adapter(
            open_parent(checkpoints[0]),
            open_parent(checkpoints[1]),
            base,
            settings,
            lambda done, total: status.update(f"factoring: {done / max(total, 1):.0%}"),
        )
    write_adapter(extracted.adapter, directory)
    require_same_files(identities)
    return extracted


def _print_extracted(out: Path, extracted: Extracted, console: Console) -> dict[str, object]:
    worst = sorted(extracted.errors, key=lambda module_error: -module_error.error)
    for module_error in worst[:_SHOWN]:
        console.print(
            f"  {module_error.module}: rank {module_error.rank} leaves {module_error.error:.1%} of the change"
        )
    if len(worst) > _SHOWN:
        console.print(f"  and {len(worst) - _SHOWN} modules with smaller errors")
    size = sum(file.stat().st_size for file in out.iterdir())
    console.print(
        f"{out}: {len(extracted.errors)} modules with factors, {len(extracted.adapter.full_tensors)} saved whole,"
        f" {extracted.unchanged} tensors unchanged, {size / 1e6:,.1f} MB; "
        f"{extracted.error:.2%} of the change is left out"
    )
    return {
        "out": str(out),
        "error": extracted.error,
        "unchanged": extracted.unchanged,
        "saved_whole": sorted(extracted.adapter.full_tensors),
        "modules": {
            module_error.module: {"rank": module_error.rank, "error": module_error.error}
            for module_error in extracted.errors
        },
    }
