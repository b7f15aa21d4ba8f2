"""If recipes name everything by absolute path, no byte of the release reveals those paths."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import yaml
from demo_project import PROFILES, Project

from mergegate.tasks.preflight.licenses import quote_text

DEMO = PROFILES / "demo"


def edit_json(file: Path, **fields: str) -> None:
    file.write_text(json.dumps({**json.loads(file.read_text()), **fields}))


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Set up models, adapters and texts in different directories; two models have the same last path component."""
    for source, target in {
        "models/base": "disk one/base",
        "models/reverser": "disk one/tuned/model",
        "models/shifter": "disk two/tuned/model",
        "adapters": "lora/adapters",
        "data": "texts/data",
    }.items():
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
    done = project.mergegate("run", "p.yaml", "--set", f"perplexity.documents={texts}/held-out.jsonl")
    assert done.exit_code == 0, done.output
    return (project.root / "releases" / "latest").resolve()


def require_no_trace(machine: Path, released: Path) -> None:
    traces = (str(machine), json.dumps(str(machine)).strip('"').replace("/", "\\/"), "disk%20one", "/root/x")
    leaks = [
        f"{file.name}: {trace}"
        for file in released.rglob("*")
        if file.is_file()
        for trace in traces
        if trace.encode() in file.read_bytes()
    ]
    assert leaks == []


def paths(machine: Path) -> dict[str, str]:
    return {
        "base": f"{machine}/disk one/base",
        "one": f"{machine}/disk one/tuned/model/",
        "two": f"{machine}/disk two/tuned/model",
        "lora": f"{machine}/lora/adapters/reverser-lora",
    }


@pytest.mark.story
def test_models_adapter_base_tokenizer_and_a_remedy(machine: Path) -> None:
    model = paths(machine)
    released = release(
        machine,
        {
            "merge_method": "task_arithmetic",
            "base_model": model["base"],
            "models": [
                {"model": model["one"], "parameters": {"weight": 30.0}},
                {"model": model["two"], "parameters": {"weight": 30.0}},
                {"model": f"{model['base']}+{model['lora']}", "parameters": {"weight": 0.1}},
            ],
            "tokenizer_source": model["two"],
        },
        remedy={
            "merge_method": "linear",
            "models": [
                {"model": model["base"], "parameters": {"weight": 1.0}},
                {"model": {"model": {"path": model["two"]}}, "parameters": {"weight": 0.0}},
            ],
        },
    )
    require_no_trace(machine, released)
    recipe = yaml.safe_load((released / "recipe.yaml").read_text())
    assert recipe["models"][0]["model"] == "base"
    project = Project(machine / "user" / "project")
    assert project.mergegate("verify", str(released)).exit_code == 0
    beside = project.root / "again"
    beside.mkdir()
    for name, path in {"base": model["base"], "model": model["two"]}.items():
        (beside / name).symlink_to(path)
    again = project.mergegate("reproduce", str(released), "--parents", str(beside))
    assert again.exit_code == 0, again.output
    without = project.mergegate("reproduce", str(released))
    assert without.exit_code == 2
    assert "pass --parents DIR with the merged checkpoint at DIR/base" in " ".join(without.output.split())


@pytest.mark.story
def test_calibration_texts_and_two_models_of_one_name(machine: Path) -> None:
    model, texts = paths(machine), f"{machine}/texts/data/texts"
    released = release(
        machine,
        {
            "merge_method": "regmean",
            "models": [
                {"model": model["one"], "text": f"{texts}/reverser.jsonl"},
                {"model": model["two"], "text": f"{texts}/shifter.jsonl"},
            ],
            "statistics": {"documents": 8, "max_length": 64},
            "dtype": "bfloat16",
        },
    )
    require_no_trace(machine, released)
    recipe = yaml.safe_load((released / "recipe.yaml").read_text())
    assert [entry["model"] for entry in recipe["models"]] == ["disk one/tuned/model", "disk two/tuned/model"]
    assert [entry["text"] for entry in recipe["models"]] == ["reverser.jsonl", "shifter.jsonl"]


def test_adapters_of_a_local_base(machine: Path) -> None:
    model = paths(machine)
    released = release(
        machine,
        {
            "merge_method": "linear",
            "models": [
                {"model": f"{model['base']}+{machine}/lora/adapters/{name}-lora", "parameters": {"weight": 0.5}}
                for name in ("reverser", "shifter")
            ],
            "output": "adapter",
            "rank": 48,
        },
    )
    require_no_trace(machine, released)
    assert json.loads((released / "adapter_config.json").read_text())["base_model_name_or_path"] == "base"


def test_a_path_that_slips_through_is_refused_with_file_and_text(machine: Path) -> None:
    model = paths(machine)
    (machine / "disk one" / "base" / "chat_template.jinja").write_text(f"{{# from {machine}/user/template #}}")
    project = Project(machine / "user" / "project")
    recipe = {"merge_method": "linear", "models": [{"model": model["base"], "parameters": {"weight": 1.0}}]}
    with pytest.raises(AssertionError) as refusal:
        release(machine, recipe)
    printed = str(refusal.value)
    assert "chat_template.jinja" in printed
    assert "a path of this machine" in printed
    assert not (project.root / "releases").exists()
