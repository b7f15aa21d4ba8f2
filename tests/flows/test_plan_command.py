"""``mergegate plan`` as users and scripts run it."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from sparse_models import LLAMA_70B, llama, save_sparse
from typer.testing import CliRunner, Result

from mergegate.flows.cli.app import app
from mergegate.merge_core import load_recipe
from mergegate.tasks.models.checkpoints import resolve_all_parents
from mergegate.tasks.preflight import compatibility, header_digests, plan_cached

PROJECT = Path(__file__).resolve().parents[2]
MODEL = {"layers": 2, "hidden": 512, "wide": 2048, "keys": 128, "tokens": 4000}
RECIPE = """merge_method: ties
base_model: base
models:
  - {model: a, parameters: {weight: 0.5, density: 0.5}}
  - {model: b, parameters: {weight: 0.5, density: 0.5}}
  - {model: c, parameters: {weight: 0.3, density: [0.2, 0.8]}}
"""
Plan = Callable[..., Result]


@pytest.fixture
def plan(tmp_path: Path, home: Path) -> Plan:
    def run(*options: str, recipe: str = RECIPE, **sizes: int) -> Result:
        for name in ("base", "a", "b", "c"):
            if not (tmp_path / name).exists():
                save_sparse(tmp_path / name, llama(**{**MODEL, **sizes}), shards=30 if sizes else 2)
        (tmp_path / "recipe.yaml").write_text(recipe)
        return CliRunner().invoke(
            app, ["plan", str(tmp_path / "recipe.yaml"), "--output", str(tmp_path / "out"), *options]
        )

    return run


def answer(result: Result) -> dict[str, Any]:
    assert result.exit_code == 0, result.output
    content: dict[str, Any] = json.loads(result.stdout)
    return content


def test_it_says_what_a_merge_will_need(plan: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    result = plan("--price", "a-box=3.60")
    assert result.exit_code == 0
    for part in ("ties of 3 over base", "tensors", "read", "write", "memory", "disk", "time", "cost a-box", "free at"):
        assert part in result.stdout
    assert "measured just now" in result.stdout
    assert max(map(len, result.stdout.splitlines())) <= 80
    assert not (tmp_path / "out").exists()


def test_json_has_every_number(plan: Plan) -> None:
    content = answer(plan("--json", "--price", "a=3600", "--price", "b=$7200"))
    assert content["needs"]["tensors"] == 2 + 1 + 2 * 9
    least, most = content["time"]["at_least"], content["time"]["at_most"]
    assert 0 < least <= most
    assert content["cost"] == {"a": pytest.approx([least, most]), "b": pytest.approx([2 * least, 2 * most])}


@pytest.mark.story
def test_rates_are_measured_once_an_hour_and_without_a_probe_earlier_rates_still_count(plan: Plan, home: Path) -> None:
    content = answer(plan("--json", "--no-probe", "--price", "a=1"))
    assert (content["rates"], content["time"], content["cost"]) == (None, None, {"a": None})
    assert not home.exists()
    assert "this machine was not measured" in plan("--no-probe").stdout
    first, second = answer(plan("--json")), answer(plan("--json"))
    assert second["rates"] == first["rates"]
    assert answer(plan("--json", "--no-probe"))["rates"] == first["rates"]
    assert answer(plan("--json", "--probe"))["rates"]["measured_at"] > first["rates"]["measured_at"]


PRICE, DEVICE = "NAME=USD", "auto, cpu, cuda or cuda:N"


@pytest.mark.parametrize(
    ("option", "value", "expected"),
    [
        *(("--price", price, PRICE) for price in ("box", "=1", "box=-1", "box=nan")),
        *(("--device", device, DEVICE) for device in ("tpu", "cuda:one")),
    ],
)
def test_an_invalid_price_or_device_is_refused(plan: Plan, option: str, value: str, expected: str) -> None:
    result = plan("--no-probe", option, value)
    assert result.exit_code == 2
    assert expected in result.stderr


def test_a_recipe_that_cannot_be_merged_is_refused(plan: Plan) -> None:
    result = plan("--no-probe", recipe=RECIPE.replace("density: 0.5", "density: 5"))
    assert result.exit_code == 2
    assert "models[0].parameters.density: 5; expected 0 to 1 for density" in result.stderr


def test_plan_reports_a_disk_that_is_too_small(plan: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    import shutil

    real = shutil.disk_usage("/")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: type(real)(total=2_000_000, used=0, free=1_000_000))
    assert "more disk space needed at" in plan("--no-probe").stdout
    content = answer(plan("--no-probe", "--json"))
    assert content["disk_missing"] == content["needs"]["disk"] - 1_000_000


@pytest.mark.story
def test_a_70_b_checkpoint_is_planned_within_seconds(plan: Plan) -> None:
    plan("--no-probe", **LLAMA_70B)  # Writes the files and loads all imports.
    began = time.process_time()  # Not the wall clock, so other programs cannot fail this test.
    content = answer(plan("--no-probe", "--json", **LLAMA_70B))
    assert time.process_time() - began < 5
    assert content["needs"]["tensors"] == 723
    assert content["needs"]["bytes_read"] == 4 * 2 * content["needs"]["parameters"] == 564_429_651_968


def test_headers_are_read_and_planned_once_for_a_check_and_what_follows_it(monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = load_recipe(PROJECT / "profiles" / "demo" / "recipes" / "ties.yaml")
    (found,) = resolve_all_parents([recipe])
    headers = header_digests(found)
    first = plan_cached(recipe, found, headers)
    monkeypatch.setattr(compatibility, "plan_with_findings", lambda *_: pytest.fail("planned again"))
    assert plan_cached(recipe, found, headers) is first
    monkeypatch.undo()
    changed = (headers[0].model_copy(update={"digest": "0" * 64}), *headers[1:])
    assert plan_cached(recipe, found, changed) is not first
