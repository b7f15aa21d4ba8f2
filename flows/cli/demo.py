"""``mergegate demo``: copy the demo models into a directory of the user's own, and release a merge of them.

The wheel installs ``profiles/`` below ``share/mergegate`` of the environment. In a clone, the directory is next to
``flows/``.
"""

from __future__ import annotations

import os
import shutil
from importlib.metadata import PackageNotFoundError, files
from pathlib import Path
from typing import Annotated

import typer

from mergegate.flows.cli.command import JsonOption, command_context
from mergegate.flows.cli.run import run_command
from mergegate.merge_core.errors import InvalidInput

PROFILE = Path("profiles", "demo.yaml")


def demo_command(
    directory: Annotated[Path, typer.Argument(help="Directory for the demo, its state and its release.")] = Path(
        "mergegate-demo"
    ),
    as_json: JsonOption = False,
) -> None:
    """Release a merge of the demo models in a new directory.

    mergegate first copies the models there. The demo takes about a minute, and needs neither a network nor an account.
    """
    with command_context(as_json) as console:
        is_new = copy_demo(directory)
        where = "copied the demo into" if is_new else "the demo is in"
        console.print(f"{where} {directory}; run other commands about it there (cd {directory})")
        # The state is in the demo, but the working directory stays, so that printed paths are relative to it.
        os.environ.setdefault("MERGEGATE_HOME", str((directory / ".mergegate").absolute()))
    run_command(directory / PROFILE, as_json=as_json)


def copy_demo(directory: Path) -> bool:
    """Copy the demo with its models, data and scripts into ``directory``. Return whether anything had to be copied.

    Raises:
        InvalidInput: The directory has other content, or this installation does not include the demo.
    """
    if (directory / PROFILE).is_file():
        return False
    if directory.exists() and any(directory.iterdir()):
        raise InvalidInput(
            str(directory),
            found="a directory with other content",
            expected="the demo, or an empty or new directory",
            remedy="choose another one: mergegate demo DIRECTORY",
        )
    source = Path(__file__).resolve().parents[2] / PROFILE
    if not source.is_file():
        try:
            installed = [file for file in files("mergegate") or () if file.parts[-2:] == PROFILE.parts]
        except PackageNotFoundError:
            installed = []
        paths = (Path(str(file.locate())).resolve() for file in installed)
        source = next((path for path in paths if path.is_file()), Path())
    if not source.is_file():
        raise InvalidInput(
            "the demo",
            found="this installation does not include it",
            expected="share/mergegate/profiles, which is part of the wheel",
            remedy="install mergegate with pip or pipx, or run profiles/demo.yaml in a clone",
        )
    directory.mkdir(parents=True, exist_ok=True)
    shutil.copytree(
        source.parent, directory / PROFILE.parent, ignore=shutil.ignore_patterns("__pycache__"), dirs_exist_ok=True
    )
    return True
