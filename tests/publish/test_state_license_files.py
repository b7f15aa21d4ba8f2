"""Test the license of optimizer state: it has its own card, and its license is found like that of any parent."""

from __future__ import annotations

from pathlib import Path

import pytest
from release_samples import license_verdict, parents

from mergegate.tasks.checkpoints import ResolvedCheckpoint
from mergegate.tasks.preflight.licenses import load_table, read_licenses
from mergegate.tasks.publish import state_license_files


@pytest.mark.parametrize("licenses", [("apache-2.0",), ("mit", "apache-2.0")])
def test_the_license_of_the_state_is_read_from_its_own_card(tmp_path: Path, licenses: tuple[str, ...]) -> None:
    verdict = license_verdict(*licenses)
    for name, text in state_license_files((), verdict):
        (tmp_path / "mean" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "mean" / name).write_text(text)
    found = ResolvedCheckpoint(name="mean", ref="mean", directory=tmp_path / "mean")
    declared = read_licenses([found], load_table(), lambda name: (_ for _ in ()).throw(AssertionError(name)))
    assert declared.families["mean"][0].license.id == (verdict.combination.license_name or verdict.combination.license)


def test_the_same_release_gives_the_same_files(tmp_path: Path) -> None:
    verdict = license_verdict("apache-2.0", "mit")
    made = [state_license_files(parents(tmp_path / name), verdict) for name in ("one", "two")]
    assert made[0] == made[1]
    assert "Not a model" in dict(made[0])["README.md"]
