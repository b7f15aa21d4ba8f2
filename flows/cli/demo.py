"""``mergegate demo``: copy the demo models into a directory of the user's own.

The wheel includes ``profiles/`` as data (``share/mergegate`` of the environment). In a clone, the directory is next to
``flows/``.
"""

from __future__ import annotations

import shutil
from importlib.metadata import PackageNotFoundError, files
from pathlib import Path

from mergegate.merge_core.errors import InvalidInput

PROFILE = Path("profiles", "demo.yaml")


def place_demo(directory: Path) -> bool:
    """Copy the demo's profiles, recipes, models and data into ``directory``, unless they already exist.

    Returns:
        Whether they were copied now.

    Raises:
        InvalidInput: The directory has other content, or this installation does not include the demo.
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
    source = _demo_source()
    directory.mkdir(parents=True, exist_ok=True)
    shutil.copytree(
        source, directory / PROFILE.parent, ignore=shutil.ignore_patterns("__pycache__", "*.py"), dirs_exist_ok=True
    )
    return True


def _demo_source() -> Path:
    """Return ``profiles/`` of the clone or of the installed distribution."""
    in_clone = Path(__file__).resolve().parents[2] / PROFILE
    if in_clone.is_file():
        return in_clone.parent
    try:
        installed = [file for file in files("mergegate") or () if file.parts[-2:] == PROFILE.parts]
    except PackageNotFoundError:
        installed = []
    for file in installed:
        path = Path(str(file.locate())).resolve()
        if path.is_file():
            return path.parent
    raise InvalidInput(
        "the demo",
        found="not a part of this installation",
        expected="share/mergegate/profiles, which the wheel carries",
        remedy="install mergegate with pip or pipx, or run profiles/demo.yaml in a clone",
    )
