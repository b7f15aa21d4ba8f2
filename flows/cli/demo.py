"""The demo family where there is no clone of this project: a copy in a directory of the user's own, to look into.

The wheel carries ``profiles/`` as data (``share/mergegate`` of the environment); in a clone it lies beside ``flows/``.
"""

from __future__ import annotations

import shutil
from importlib.metadata import PackageNotFoundError, files
from pathlib import Path

from mergegate.merge_core.errors import InvalidInput

PROFILE = Path("profiles", "demo.yaml")


def place_demo(directory: Path) -> bool:
    """Copy the demo's profiles, recipes, models and data into ``directory``, unless they are there already.

    Returns:
        Whether they were copied now.

    Raises:
        InvalidInput: when something else is there, or this installation has no demo.
    """
    if (directory / PROFILE).is_file():
        return False
    if directory.exists() and any(directory.iterdir()):
        raise InvalidInput(
            str(directory),
            found="a directory with something else in it",
            expected="the demo, or a place for it",
            remedy="name another: mergegate demo DIRECTORY",
        )
    source = _shipped()
    directory.mkdir(parents=True, exist_ok=True)
    shutil.copytree(
        source, directory / PROFILE.parent, ignore=shutil.ignore_patterns("__pycache__", "*.py"), dirs_exist_ok=True
    )
    return True


def _shipped() -> Path:
    """``profiles/`` of the clone or of the installed distribution."""
    beside = Path(__file__).resolve().parents[2] / PROFILE
    if beside.is_file():
        return beside.parent
    try:
        installed = [file for file in files("mergegate") or () if file.parts[-2:] == PROFILE.parts]
    except PackageNotFoundError:
        installed = []
    for file in installed:
        place = Path(str(file.locate())).resolve()
        if place.is_file():
            return place.parent
    raise InvalidInput(
        "the demo",
        found="not a part of this installation",
        expected="share/mergegate/profiles, which the wheel carries",
        remedy="install mergegate with pip or pipx, or run profiles/demo.yaml in a clone",
    )
