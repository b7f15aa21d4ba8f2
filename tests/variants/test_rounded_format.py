"""The test double ``rounded`` is a variant format like any other."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from prefect import flow
from rounded_format import RoundedFormat, forget_formats, rounded_registered

from mergegate.flows.profile import parse_profile
from mergegate.merge_core.errors import InvalidInput
from mergegate.tasks.checkpoints import Model
from mergegate.tasks.store import Artifact, digest
from mergegate.tasks.variants import VariantFormat, VariantRecord

PROJECT = Path(__file__).resolve().parents[2]
REVERSER = PROJECT / "profiles" / "demo" / "models" / "reverser"
PROFILE: dict[str, object] = {"name": "demo", "recipe": "x.yaml", "perplexity": {"documents": "held-out.jsonl"}}


def rounded(**settings: object) -> VariantFormat:
    (variant,) = parse_profile({**PROFILE, "variants": [{"format": "rounded", "bits": 8, **settings}]}, "p").variants
    return variant


@pytest.fixture
def unregistered(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Hide the format, which a fixture of the session may have registered."""
    visible = [entry for entry in sys.path if not Path(entry, "mergegate_rounded-1.0.dist-info").exists()]
    monkeypatch.setattr(sys, "path", visible)
    forget_formats()
    yield
    monkeypatch.undo()
    forget_formats()


@pytest.mark.usefixtures("unregistered")
def test_a_profile_accepts_the_registered_format_and_checks_its_settings(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="gguf"):
        rounded()
    with rounded_registered(tmp_path / "site"):
        assert rounded() == RoundedFormat(format="rounded", bits=(8,))
        assert rounded(bits=[8, 4]).variant_types == ("R8", "R4")
        with pytest.raises(InvalidInput, match=r"p: variants\[0\]\.bit: unknown key 'bit'\n.*did you mean 'bits'"):
            rounded(bit=8)


@pytest.mark.proof
@pytest.mark.usefixtures("rounded_variants")
def test_a_child_process_accepts_the_format_too() -> None:
    script = "from mergegate.flows.profile import parse_profile; "
    script += f"print(parse_profile({{**{PROFILE}, 'variants': [{{'format': 'rounded', 'bits': 8}}]}}, 'p').variants)"
    environment = {**os.environ, "PYTHONPATH": f"{os.environ['PYTHONPATH']}{os.pathsep}{PROJECT}"}
    assert b"RoundedFormat(" in subprocess.check_output([sys.executable, "-c", script], env=environment)


@pytest.mark.story
@pytest.mark.usefixtures("rounded_variants", "prefect_api")
def test_building_twice_gives_the_same_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """``test_variants.py`` of the flows tests a release, and that a check notices every fault."""
    model = Model(name="merge", digest=digest("reverser"), directory=REVERSER)

    @flow
    def build(state: str) -> Artifact[VariantRecord]:
        monkeypatch.setenv("MERGEGATE_HOME", str(tmp_path / state))
        return rounded().build(model, "R8", REVERSER)

    first, again = build("first"), build("again")
    assert first.directory != again.directory
    assert (first.digest, first.files) == (again.digest, again.files)
    assert set(first.value.files) == set(first.files) - {"value.json"}
