"""The test double ``rounded`` is a variant format like any other, and each of its faults is visible."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import get_args

import pytest
import torch
from prefect import flow
from rounded_format import Fault, RoundedFormat, round_rows

from mergegate.flows.profile import parse_profile
from mergegate.merge_core.errors import InvalidInput, Refused
from mergegate.tasks.checkpoints import Model, QuantizedModel
from mergegate.tasks.store import Artifact, digest
from mergegate.tasks.variants import VariantFormat, VariantRecord

PROJECT = Path(__file__).resolve().parents[2]
REVERSER = PROJECT / "profiles" / "demo" / "models" / "reverser"
PROFILE: dict[str, object] = {"name": "demo", "recipe": "x.yaml", "perplexity": {"documents": "held-out.jsonl"}}


def rounded(**settings: object) -> VariantFormat:
    (variant,) = parse_profile({**PROFILE, "variants": [{"format": "rounded", "bits": 8, **settings}]}, "p").variants
    return variant


@pytest.mark.usefixtures("rounded_variants")
def test_a_profile_accepts_the_format_and_checks_its_settings() -> None:
    assert rounded() == RoundedFormat(format="rounded", bits=(8,))
    assert rounded(bits=[8, 4]).variant_types == ("R8", "R4")
    with pytest.raises(InvalidInput, match=r"p: variants\[0\]\.bit: unknown key 'bit'\n.*did you mean 'bits'"):
        rounded(bit=8)


def test_without_the_fixture_the_format_is_unknown() -> None:
    with pytest.raises(InvalidInput, match="gguf"):
        rounded()


@pytest.mark.story
@pytest.mark.usefixtures("rounded_variants")
def test_a_child_process_accepts_the_format_too() -> None:
    script = "from mergegate.flows.profile import parse_profile; "
    script += f"print(parse_profile({{**{PROFILE}, 'variants': [{{'format': 'rounded', 'bits': 8}}]}}, 'p').variants)"
    environment = {**os.environ, "PYTHONPATH": f"{os.environ['PYTHONPATH']}{os.pathsep}{PROJECT}"}
    printed = subprocess.run(
        [sys.executable, "-c", script], env=environment, check=True, capture_output=True, text=True
    ).stdout
    assert "RoundedFormat(" in printed


@pytest.mark.parametrize("bits", [2, 4, 8, 12])
def test_rounding_changes_a_weight_by_at_most_half_a_step(bits: int) -> None:
    weights = torch.randn(7, 33, generator=torch.Generator().manual_seed(bits))
    step = weights.abs().amax(dim=1, keepdim=True) / (2 ** (bits - 1) - 1)
    assert ((round_rows(weights, bits) - weights).abs() <= step * 0.5001).all()
    assert torch.equal(round_rows(weights[0], bits), weights[0])


@pytest.mark.story
@pytest.mark.usefixtures("rounded_variants", "prefect_api")
def test_building_twice_gives_the_same_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first, again = (built(rounded(), tmp_path / state, monkeypatch)[1] for state in ("first", "again"))
    assert first.directory != again.directory
    assert (first.digest, first.files) == (again.digest, again.files)
    assert set(first.value.files) == set(first.files) - {"value.json"}


@pytest.mark.story
@pytest.mark.usefixtures("rounded_variants", "prefect_api")
@pytest.mark.parametrize("fault", get_args(Fault))
def test_every_fault_is_visible(fault: Fault, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Faults of the files fail a check. Faults of the weights change them; only an evaluation can notice."""
    broken = rounded(fault=fault)
    if fault == "environment":
        with pytest.raises(InvalidInput, match="not installed"):
            broken.check(tmp_path)
        return
    if fault == "build":
        with pytest.raises(Refused, match="multiple of 32"):
            built(broken, tmp_path / "state", monkeypatch)
        return
    model, artifact, converted_right = built(broken, tmp_path / "state", monkeypatch)
    checks = (*broken.inspect(model), *broken.smoke(model, None, tmp_path))
    failed = [check.name for check in checks if check.outcome == "fail"]
    if fault in ("scales", "swapped"):
        healthy = built(rounded(), tmp_path / "healthy", monkeypatch)[1]
        assert artifact.files["model.safetensors"] != healthy.files["model.safetensors"]
        assert not failed
    else:
        expected = {"tokenizer": "tokenizer", "template": "chat template", "truncated": "weights", "answers": "text"}
        assert failed == ([expected[fault]] if fault in expected else [])
    assert converted_right == (fault != "conversion")


def built(
    variant: VariantFormat, state: Path, monkeypatch: pytest.MonkeyPatch
) -> tuple[QuantizedModel, Artifact[VariantRecord], bool]:
    """Build the only variant of ``variant``, and return whether its conversion agrees with the merge."""
    monkeypatch.setenv("MERGEGATE_HOME", str(state))
    model = Model(name="merge", digest=digest("reverser"), directory=REVERSER)
    (variant_type,) = variant.variant_types

    @flow
    def run() -> tuple[Artifact[VariantRecord], bool]:
        converted = variant.convert(model, lambda: ("the old pig",), REVERSER)
        assert converted is not None
        return variant.build(model, variant_type, REVERSER), not converted.value.refuses()

    artifact, right = run()
    return variant.open(model, variant_type, artifact), artifact, right
