"""If recipes name everything by absolute path, no byte of the release reveals those paths."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import yaml
from demo_project import PROFILES, Project, expect

from mergegate.tasks.preflight.licenses import quote_text

DEMO = PROFILES / "demo"


def edit_json(file: Path, **fields: str) -> None:
    file.write_text(json.dumps({**json.loads(file.read_text()), **fields}))


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Set up models, adapters and texts in different directories; two models have the same last path component."""
    targets = ("disk one/base", "disk one/tuned/model", "disk two/tuned/model", "lora/adapters", "texts/data")
    sources = ("models/base", "models/reverser", "models/shifter", "adapters", "data")
    for source, target in zip(sources, targets, strict=True):
        shutil.copytree(DEMO / source, tmp_path / target)
    for model in tmp_path.glob("disk */**/config.json"):
        edit_json(model, _name_or_path=str(model.parent))
        edit_json(model.with_name("tokenizer_config.json"), name_or_path=str(model.parent), tokenizer_file="/root/x")
    for model in tmp_path.glob("disk */tuned/model/README.md"):
        base = tmp_path / "disk one" / "base"
        license = "apache-2.0" if "disk one" in str(model) else "mit"
        model.write_text(f"---\nlicense: {license}\nbase_model:\n- {base}\n- {tmp_path}/gone\n---\n")
    for adapter in tmp_path.glob("lora/adapters/*/adapter_config.json"):
        edit_json(adapter, base_model_name_or_path=str(tmp_path / "disk one" / "base"))
    monkeypatch.setenv("HOME", str(tmp_path / "user"))
    (tmp_path / "user" / "project" / "recipes").mkdir(parents=True)
    return tmp_path


def release(machine: Path, recipe: dict[str, object], *, remedy: dict[str, object] | None = None) -> Path:
    """Run a profile in which every path is absolute, and return its release."""
    project = Project(machine / "user" / "project")
    texts = machine / "texts" / "data"
    ancestors = (f"{machine}/gone", f"{machine}/disk one/base", "../../models/base")
    (project.root / "recipes" / "r.yaml").write_text(f"# as in {machine}/user/notes\n" + yaml.safe_dump(recipe))
    profile: dict[str, object] = {
        "name": "paths",
        "recipe": "recipes/r.yaml",
        "checks": {
            "license": {
                "purpose": "research",
                "visibility": "private",
                "accepted": {quote_text(name): "alice: it is the demo's base" for name in ancestors},
            },
            "copies": {"accepted": ["base"]},
        },
        "perplexity": {"documents": "held.jsonl", "max_increase": "5%" if remedy else "99%"},
        "publish": {"to": "directory", "path": "releases"},
        "remedies": [remedy] if remedy else [],
    }
    (project.root / "p.yaml").write_text(yaml.safe_dump(profile))
    expect(project.mergegate("run", "p.yaml", "--set", f"perplexity.documents={texts}/held-out.jsonl"), 0)
    return (project.root / "releases" / "latest").resolve()


def require_no_trace(machine: Path, released: Path) -> None:
    traces = (str(machine), json.dumps(str(machine)).strip('"').replace("/", "\\/"), "disk%20one", "/root/x")
    files = [file for file in released.rglob("*") if file.is_file()]
    assert [(file.name, trace) for file in files for trace in traces if trace.encode() in file.read_bytes()] == []


def paths(machine: Path) -> tuple[str, str, str, str]:
    """Return the paths of the base, of both models and of an adapter."""
    places = ("disk one/base", "disk one/tuned/model/", "disk two/tuned/model", "lora/adapters/reverser-lora")
    base, one, two, lora = (f"{machine}/{place}" for place in places)
    return base, one, two, lora


def weighted(model: object, weight: float) -> dict[str, object]:
    return {"model": model, "parameters": {"weight": weight}}


@pytest.mark.proof
def test_models_adapter_base_tokenizer_and_a_remedy(machine: Path) -> None:
    base, one, two, lora = paths(machine)
    models = [weighted(one, 30.0), weighted(two, 30.0), weighted(f"{base}+{lora}", 0.1)]
    recipe = {"merge_method": "task_arithmetic", "base_model": base, "models": models, "tokenizer_source": two}
    remedied = [weighted(base, 1.0), weighted({"model": {"path": two}}, 0.0)]
    released = release(machine, recipe, remedy={"merge_method": "linear", "models": remedied})
    require_no_trace(machine, released)
    recipe = yaml.safe_load((released / "recipe.yaml").read_text())
    assert recipe["models"][0]["model"] == "base"
    project = Project(machine / "user" / "project")
    assert project.mergegate("verify", str(released)).exit_code == 0
    beside = project.root / "again"
    beside.mkdir()
    for name, path in {"base": base, "model": two}.items():
        (beside / name).symlink_to(path)
    expect(project.mergegate("reproduce", str(released), "--parents", str(beside)), 0)
    without = expect(project.mergegate("reproduce", str(released)), 2)
    assert "pass --parents DIR with the merged checkpoint at DIR/base" in " ".join(without.output.split())


@pytest.mark.proof
def test_calibration_texts_and_two_models_of_one_name(machine: Path) -> None:
    (_, one, two, _), texts = paths(machine), f"{machine}/texts/data/texts"
    models = [{"model": one, "text": f"{texts}/reverser.jsonl"}, {"model": two, "text": f"{texts}/shifter.jsonl"}]
    statistics = {"documents": 8, "max_length": 64}
    released = release(
        machine, {"merge_method": "regmean", "models": models, "statistics": statistics, "dtype": "bfloat16"}
    )
    require_no_trace(machine, released)
    recipe = yaml.safe_load((released / "recipe.yaml").read_text())
    assert [entry["model"] for entry in recipe["models"]] == ["disk one/tuned/model", "disk two/tuned/model"]
    assert [entry["text"] for entry in recipe["models"]] == ["reverser.jsonl", "shifter.jsonl"]


@pytest.mark.story
def test_a_path_that_slips_through_is_refused_with_file_and_text(machine: Path) -> None:
    (machine / "disk one" / "base" / "chat_template.jinja").write_text(f"{{# from {machine}/user/template #}}")
    project = Project(machine / "user" / "project")
    recipe: dict[str, object] = {"merge_method": "linear", "models": [weighted(paths(machine)[0], 1.0)]}
    with pytest.raises(AssertionError) as refusal:
        release(machine, recipe)
    printed = str(refusal.value)
    assert "chat_template.jinja" in printed
    assert "a path of this machine" in printed
    assert not (project.root / "releases").exists()
