"""``mergegate extract-lora``: an adapter from a fine-tune and its base, with the error that each factor leaves."""

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
    """Write the adapter that makes ``tuned`` of ``base`` to ``out``, and return what was made, as plain data.

    Raises:
        InvalidInput: for checkpoints that are not there or do not fit, or an ``out`` that exists.
        Refused: for one that the Hub does not give, or that is changed while it is read.
    """
    with new_directory(out) as place:
        made = _extract(tuned, base, place, settings, console)
    return _said(out, made, console)


def _extract(tuned: str, base: str, place: Path, settings: ExtractionSettings, console: Console) -> Extracted:
    found = [find_checkpoint(name) for name in (tuned, base)]
    if snapshots := [one for parent in found for one in parent.snapshots]:
        with console.status("fetching weights"):
            download_snapshots(snapshots, store().hashes)
    looked = identify_parents(found)
    with console.status("reading headers") as status:
        made = extract_adapter(
            open_parent(found[0]),
            open_parent(found[1]),
            base,
            settings,
            lambda done, total: status.update(f"factoring: {done / max(total, 1):.0%}"),
        )
    write_adapter(made.adapter, place)
    require_same_files(looked)
    return made


def _said(out: Path, made: Extracted, console: Console) -> dict[str, object]:
    worst = sorted(made.errors, key=lambda one: -one.error)
    for one in worst[:_SHOWN]:
        console.print(f"  {one.module}: rank {one.rank} leaves {one.error:.1%} of the change")
    if len(worst) > _SHOWN:
        console.print(f"  and {len(worst) - _SHOWN} modules with smaller errors")
    size = sum(file.stat().st_size for file in out.iterdir())
    console.print(
        f"{out}: {len(made.errors)} modules with factors, {len(made.adapter.whole)} saved whole,"
        f" {made.unchanged} tensors unchanged, {size / 1e6:,.1f} MB; {made.error:.2%} of the change is left out"
    )
    return {
        "out": str(out),
        "error": made.error,
        "unchanged": made.unchanged,
        "saved_whole": sorted(made.adapter.whole),
        "modules": {one.module: {"rank": one.rank, "error": one.error} for one in made.errors},
    }
