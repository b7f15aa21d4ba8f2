"""Lean imports hide unused packages, and no package sees an optional one in only some of its modules."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from mergegate.tasks.checkpoints import import_lean, model_cache

# Like transformers: search for the package once, remember the result, and import it much later.
PACKAGE = "from importlib.util import find_spec\nSEEN = find_spec('unasked') is not None\n"
PART = "from looking import SEEN\nif SEEN:\n    import unasked\n"


@pytest.fixture(autouse=True)
def a_package_that_looks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    (tmp_path / "looking").mkdir()
    (tmp_path / "looking" / "__init__.py").write_text(PACKAGE)
    (tmp_path / "looking" / "part.py").write_text(PART)
    (tmp_path / "unasked.py").touch()
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(model_cache, "_UNUSED_PACKAGES", ("unasked",))
    yield
    for name in ("looking", "looking.part", "unasked"):
        sys.modules.pop(name, None)


def test_unused_packages_are_hidden_only_during_the_import() -> None:
    import_lean("looking.part")
    assert "unasked" not in sys.modules
    __import__("unasked")


def test_a_package_that_found_an_optional_one_can_import_it() -> None:
    __import__("looking")
    import_lean("looking.part")
    assert "unasked" in sys.modules


def test_garbage_collection_is_restored(tmp_path: Path) -> None:
    (tmp_path / "looking" / "part.py").write_text("import gc\nassert not gc.isenabled()\nraise ImportError\n")
    with pytest.raises(ImportError):
        import_lean("looking.part")
    assert gc.isenabled()
    assert "unasked" not in sys.modules
