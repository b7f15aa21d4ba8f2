"""``mergegate doctor``: what this project's state is like, and what may be done about it.

A run needs no doctor: damage is a miss, and is made again. This says what was found, set aside and left over, and how
large everything is; ``--mend`` sets aside what is damaged and removes what nobody reads.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from rich.console import Console

from mergegate.flows.cli.output import print_answer
from mergegate.merge_core.files import ASIDE
from mergegate.merge_core.wording import format_bytes
from mergegate.tasks.gate import anchor_faults
from mergegate.tasks.report import HISTORY, mend_history, read_history
from mergegate.tasks.stage import home
from mergegate.tasks.store import (
    StateFinding,
    directory_bytes,
    examine_database,
    examine_store,
    is_leftover,
    mend_state,
    set_aside_count,
)

_FOLDERS = ("anchors", "logs", "prefect", "reports", "runs", "store", "sweeps")


def examine_project(console: Console, as_json: bool, *, mend: bool) -> int:
    """Print what is found; the exit code: 3 where something is damaged and stays so, else 0.

    Raises:
        OSError: when the state cannot be read, or not be mended.
    """
    place = home()
    found = list(_examine(place))
    done = [_mended(one) if mend else "" for one in found]
    sick = any(one.kind == "damaged" and not what for one, what in zip(found, done, strict=True))
    sizes = {name: directory_bytes(place / name) for name in _FOLDERS if (place / name).exists()}
    if as_json:
        told = [
            {"kind": one.kind, "path": str(one.path), "what": one.what, "bytes": one.bytes, "done": what}
            for one, what in zip(found, done, strict=True)
        ]
        more = {"home": str(place), "sizes": sizes, "found": told}
        print_answer("damaged" if sick else "sound", f"{len(told)} things found", more)
        return 3 if sick else 0
    listed = ", ".join(f"{name} {format_bytes(size)}" for name, size in sizes.items())
    console.print(f"{place}: {listed or 'nothing here yet'}")
    for one, what in zip(found, done, strict=True):
        ending = f" → {what}" if what else ""
        console.print(f"  {one.kind:<10}  {one.path} ({format_bytes(one.bytes)}): {one.what}{ending}", markup=False)
    if not found:
        console.print("  nothing is damaged, nothing is left over")
    elif sick:
        console.print("  the next run makes again what it needs of it; mergegate doctor --mend tidies up now")
    return 3 if sick else 0


def _mended(found: StateFinding) -> str:
    """What was done about it. Of the history only the lines that are damaged go."""
    if found.path.name != HISTORY or not found.path.is_file():
        return mend_state(found)
    mend_history(found.path.parent)
    return "set aside; its whole lines are kept"


def _examine(place: Path) -> Iterator[StateFinding]:
    if not place.is_dir():
        return
    for entry in sorted(place.iterdir()):
        if ASIDE not in entry.name and entry.name in _FOLDERS and not entry.is_dir():
            yield set_aside_count(entry, "no directory")
        elif (passed := is_leftover(entry)) is not None:
            yield passed
    yield from examine_store(place / "store")
    yield from examine_database(place / "prefect" / "prefect.db")
    for damage in anchor_faults():
        yield set_aside_count(damage.path, damage.why)
    for folder in ("anchors", "prefect", "reports", "runs"):
        if (place / folder).is_dir():
            for entry in sorted((place / folder).iterdir()):
                if (passed := is_leftover(entry)) is not None:
                    yield passed
                elif entry.suffix == ".html" and (entry.is_symlink() or not entry.is_file()):
                    yield set_aside_count(entry, "no file")
    yield from _of_the_reports(place / "reports")


def _of_the_reports(reports: Path) -> Iterator[StateFinding]:
    if not reports.is_dir():
        return
    if damage := read_history(reports).said_of_damage():
        yield set_aside_count(reports / HISTORY, damage.rstrip("."))
    for page in sorted(reports.glob("*/*")):
        if (passed := is_leftover(page)) is not None:
            yield passed
        elif page.is_symlink() or not page.is_file():
            yield set_aside_count(page, "no file")
