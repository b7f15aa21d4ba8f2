"""Profiles from ``mergegate init`` pass the check without edits for model families of transformers."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import yaml
from demo_project import PROFILES, Project
from model_families import FAMILIES, write_family
from samples import sampled

from mergegate.flows.cli.profile_draft import claimed_tasks
from mergegate.flows.cli.schema import generated_pages

FAMILY = PROFILES / "demo"


def with_a_token_of_its_own(model: Path) -> None:
    """Add a padding token, as some fine-tunes do: one more embedding row and a different tokenizer."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer, tuned = AutoTokenizer.from_pretrained(model), AutoModelForCausalLM.from_pretrained(model)
    tokenizer.add_special_tokens({"pad_token": "<|pad|>"})
    tuned.resize_token_embeddings(max(len(tokenizer), tuned.config.vocab_size), mean_resizing=False)
    tuned.save_pretrained(model)
    tokenizer.save_pretrained(model)


@pytest.mark.story
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("differs", [False, True], ids=["one tokenizer", "two tokenizers"])
def test_a_pair_made_by_transformers_passes_the_check_unedited(project: Project, family: str, differs: bool) -> None:
    base, *models = write_family(project.root / "models", FAMILIES[family])
    if differs:
        with_a_token_of_its_own(project.root / "models" / models[-1])
    places = [f"models/{name}" for name in (base, *models)]
    arguments = ("init", *places, "--yes", "--out", "nightly", "--name", "both")
    done = project.mergegate(*arguments)
    assert done.exit_code == 0, done.output
    assert "next     mergegate run nightly/both.yaml" in done.output
    checked = project.mergegate("check", "nightly/both.yaml", "--json")
    assert checked.exit_code == 0, checked.output
    findings = json.loads(checked.stdout)["findings"]
    warned = [one["where"] for one in findings if one["severity"] != "info"]
    assert [place for place in warned if "pad_token" not in place] == []
    profile = yaml.safe_load((project.root / "nightly" / "both.yaml").read_text())
    assert profile["checks"]["license"] == {"purpose": "commercial", "visibility": "public"}
    recipe = yaml.safe_load((project.root / "nightly" / "both.recipe.yaml").read_text())
    assert recipe["chat_template"] == "auto"  # the base has none
    assert recipe.get("tokenizer") == ({"source": "union"} if differs else None)
    again = project.mergegate(*arguments)
    assert again.exit_code == 2, again.output
    assert "it exists" in again.output


@pytest.mark.story
@pytest.mark.parametrize("family", sampled(FAMILIES, ["qwen2"], pytest.mark.proof))
def test_a_run_of_what_was_drafted_ends_in_a_verdict(project: Project, family: str) -> None:
    models = write_family(project.root / "models", FAMILIES[family], claims="openai/gsm8k")  # not available offline
    assert project.mergegate("init", *(f"models/{name}" for name in models), "--yes", "--name", "both").exit_code == 0
    told = json.loads(project.mergegate("run", "both.yaml", "--json").stdout)
    assert told["status"] in ("released", "refused"), told["message"]
    assert told["content"]["verdict"]["drift"]["outcome"] in ("pass", "fail", "inconclusive")  # not an error
    assert told["findings"] == []


def test_an_undeclared_license_needs_acceptance(project: Project) -> None:
    models = write_family(project.root / "models", FAMILIES["qwen2"])
    (project.root / "models" / models[-1] / "README.md").unlink()
    arguments = ("init", *(f"models/{name}" for name in models), "--json")
    doubted = project.mergegate(*arguments, "--out", "doubted")
    assert doubted.exit_code == 3, doubted.output
    assert models[-1] in " ".join(json.loads(doubted.stdout)["doubts"])
    accepted = project.mergegate(*arguments, "--out", "settled", "--accept", "alice: it is ours")
    assert accepted.exit_code == 0, accepted.output


@pytest.mark.story
def test_the_demo_family_ends_in_a_verdict(project: Project) -> None:
    models = [os.path.relpath(FAMILY / "models" / name, project.root) for name in ("base", "reverser", "shifter")]
    assert project.mergegate("init", *models, "--yes", "--name", "mine").exit_code == 0
    done = project.mergegate("run", "mine.yaml", "--json")
    assert json.loads(done.stdout)["status"] == "released", done.output


def test_tasks_are_those_of_which_the_card_speaks() -> None:
    index = [{"name": "m", "results": [{"dataset": {"type": "openai/gsm8k", "name": "Grade School Math"}}]}]
    assert claimed_tasks({"model-index": index, "datasets": ["allenai/ai2_arc"], "tags": ["math"]}) == (
        "gsm8k",
        "arc_challenge",
    )
    assert claimed_tasks({"model-index": "nonsense", "datasets": None}) == ()


def test_schemas_and_the_reference_are_those_of_the_types() -> None:
    docs = PROFILES.parent / "docs"
    stale = [name for name, text in generated_pages().items() if (docs / name).read_text(encoding="utf-8") != text]
    assert not stale, "stale: mergegate schema --write docs"


def test_every_shipped_profile_and_recipe_keeps_to_the_schema() -> None:
    jsonschema = pytest.importorskip("jsonschema")
    pages = generated_pages()
    for kind, files in (("profile", PROFILES.glob("*.yaml")), ("recipe", (FAMILY / "recipes").glob("*.yaml"))):
        validator = jsonschema.Draft202012Validator(json.loads(pages[f"schema/{kind}.json"]))
        for file in files:
            for document in yaml.safe_load_all(file.read_text()):
                faults = [
                    f"{file.name}: {'.'.join(map(str, one.path))}: {one.message}"
                    for one in validator.iter_errors(document)
                ]
                assert not faults
