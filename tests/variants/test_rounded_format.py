"""The test double ``rounded`` is a variant format like any other."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from rounded_format import RoundedFormat, forget_formats, rounded_registered

from mergegate.flows.profile import parse_profile
from mergegate.merge_core.errors import InvalidInput
from mergegate.tasks.quality.variants import VariantFormat

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
