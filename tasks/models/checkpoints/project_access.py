"""Give a confined process what it needs of a project: the files that its inputs name, and a home directory of its own.

Third-party code reads only the files of models, tasks and texts, and the store (see ``sandbox``). Everything else
of a project, such as its keys, is unreadable. Libraries keep their caches in ``sandbox`` in the project's home.
"""

from __future__ import annotations

import dataclasses
import os
import shutil
import site
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

from pydantic import BaseModel

from mergegate.merge_core.adapters import CONFIG_FILE, Adapter
from mergegate.merge_core.checkpoint import Checkpoint
from mergegate.merge_core.errors import MergegateError
from mergegate.merge_core.files import state_directory
from mergegate.tasks.base.sandbox import Confinement, environment_of_child
from mergegate.tasks.base.stage import PinnedInput, home, store
from mergegate.tasks.models.checkpoints.model import deciding_files

_OWN = "MERGEGATE_SANDBOX"
_LIBRARIES = frozenset({"site-packages", "dist-packages", "archive-v0"})  # The last is in uv's cache.
expected_files: set[str] = set()
"""Files and directories that every model process may read (see :func:`expect_inputs`)."""


def sandbox_directory(*names: str) -> Path:
    """Return a directory that all confined processes of the project may write to, and create it if necessary."""
    root = os.environ.get(_OWN)  # of a confined process that starts another one
    return state_directory(Path(root or home() / "sandbox").joinpath(*names), private=True)


def child_environment() -> dict[str, str]:
    """Return the environment of a confined process, whose home directory and caches are those of the sandbox.

    It finds the user's Python packages and data of NLTK and, if the user works offline, the datasets in the user's
    caches of the Hub.
    """
    own, user = sandbox_directory(), Path.home()
    caches = {f"HF_{name}_CACHE": str(own / name.lower()) for name in ("ASSETS", "DATASETS", "HUB", "MODULES", "XET")}
    if _is_offline():
        for name, (cache, pattern) in _offline_caches().items():
            for entry in cache.glob(pattern):
                link = sandbox_directory(name) / entry.name
                with suppress(OSError):  # Another process makes the same link.
                    if link.is_symlink():
                        link.unlink()
                    link.symlink_to(entry)
    places = {"HOME": str(own), "HF_HOME": str(own), _OWN: str(own), "MERGEGATE_HOME": str(home())}
    places["PYTHONUSERBASE"] = site.getuserbase()
    return {"NLTK_DATA": str(user / "nltk_data")} | environment_of_child() | places | caches


def confinement(
    *inputs: object,
    read: Iterable[str] = (),
    write: Path | None = None,
    network: bool = False,
    memory: int | None = None,
) -> Confinement:
    """Return the confinement of a process that works on ``inputs``, which may be nested, and may read the store.

    It may read the files that :func:`named_files` finds in ``inputs`` and the paths in ``read``, and write to ``write``
    and the sandbox. ``memory`` limits its own memory, in bytes.
    """
    shared = (
        state_directory(store().root, private=True),
        *([cache for cache, _ in _offline_caches().values()] if _is_offline() else []),
    )
    return Confinement(
        read=(*map(str, shared), *sorted({*map(str, named_files(inputs)), *read})),
        write=(str(sandbox_directory()), *([str(write)] if write else [])),
        network=network,
        memory=memory,
    )


def expect_inputs(*values: object) -> None:
    """Let processes that start later read the files that ``values`` name.

    A process that lacks a file is started again. This avoids it for a run, which pins its inputs before it needs one.
    """
    expected_files.update(map(str, named_files(values)))


def imported_packages() -> set[str]:
    """Return the libraries, or else packages and modules, that are imported from elsewhere than the installation."""
    places: set[str] = set()
    for name, module in sys.modules.copy().items():  # A copy is atomic; other threads import modules.
        if "." not in name:
            for place in (*(getattr(module, "__path__", None) or ()), getattr(module, "__file__", None) or sys.prefix):
                real = Path(place).resolve()  # An installation can consist of links, for example those of uv.
                library = next((above for above in real.parents if above.name in _LIBRARIES), None)
                places.add(str(library or place))
    return {place for place in places if not Path(place).is_relative_to(sys.prefix)}


@contextmanager
def writable_directory(out: Path) -> Iterator[Path]:
    """Yield a directory of the sandbox for results, and move its files to ``out``, the directory of an artifact.

    If the block raises an exception, the files stay for the next try.
    """
    place = sandbox_directory(out.parent.name, out.name)
    yield place
    for path in place.iterdir():
        if path.is_file() and not path.is_symlink():  # third-party code may have written anything
            shutil.move(path, out / path.name)
    shutil.rmtree(place)


def _is_offline() -> bool:
    variables = (os.environ.get(f"HF_{name}_OFFLINE", "") for name in ("HUB", "DATASETS"))
    return any(value.upper() in ("1", "ON", "YES", "TRUE") for value in variables)


def _offline_caches() -> dict[str, tuple[Path, str]]:
    """Return the user's caches with datasets of the Hub and the pattern of their entries, by name in the sandbox."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser()
    root = Path(os.environ.get("HF_HOME") or cache / "huggingface")
    patterns = {"hub": "datasets--*", "datasets": "*"}
    places = {name: Path(os.environ.get(f"HF_{name.upper()}_CACHE") or root / name) for name in patterns}
    return {name: (places[name], pattern) for name, pattern in patterns.items()}


def named_files(values: Iterable[object]) -> Iterator[Path]:
    """Yield every path in ``values`` and in the collections and data classes among them.

    For a model, these are the files that a reader would read, and not everything in its directory.
    """
    for value in values:
        if isinstance(value, PinnedInput):
            yield from {*value.pinned_files(), *value.present()}
            yield from named_files([getattr(value, "python", None)])
        elif isinstance(value, (Checkpoint, Adapter)):
            tensors = value.stored_tensors() if isinstance(value, Checkpoint) else value.stored_tensors
            yield from {tensor.file for tensor in tensors}
            yield from (Path(value.companions.location(name)) for name in value.companions)
            yield value.directory / ("config.json" if isinstance(value, Checkpoint) else CONFIG_FILE)
        elif isinstance(value, Path):
            is_model = any((value / name).exists() for name in ("config.json", CONFIG_FILE))
            with suppress(OSError, MergegateError):  # Whoever reads the model reports what is wrong with it.
                yield from (value / name for name in deciding_files(value)) if is_model else (value,)
            if (value.parent.parent / "pyvenv.cfg").is_file():  # an interpreter, which needs its environment
                yield value.parent.parent
        elif isinstance(value, Mapping):
            yield from named_files(value.values())
        elif isinstance(value, (list, tuple, set, frozenset)):
            yield from named_files(value)
        elif isinstance(value, BaseModel):
            yield from named_files(dict(value).values())
        elif dataclasses.is_dataclass(value) and not isinstance(value, type):
            yield from named_files(getattr(value, field.name) for field in dataclasses.fields(value))
