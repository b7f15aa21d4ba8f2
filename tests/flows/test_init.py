"""``mergegate init``: what it writes passes the check as it stands, for families that transformers knows."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from demo_project import PROFILES, Project

from flows.cli.draft import claimed_tasks
from flows.cli.schema import generated_pages

FAMILY = PROFILES / "demo"
SMALL = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}
CARD = "---\nlicense: apache-2.0\ntags: [math]\n---\n\n# A model\n"


def qwen2(vocabulary: int) -> Any:
    from transformers import Qwen2Config, Qwen2ForCausalLM

    return Qwen2ForCausalLM(Qwen2Config(vocab_size=vocabulary, **SMALL))


def gemma2(vocabulary: int) -> Any:
    from transformers import Gemma2Config, Gemma2ForCausalLM

    return Gemma2ForCausalLM(Gemma2Config(vocab_size=vocabulary, head_dim=8, **SMALL))


def write_family(root: Path, make: Callable[[int], Any]) -> None:
    """A base and two models that went from it into random directions, with the demo's small tokenizer."""
    import torch
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(FAMILY / "models" / "base")
    torch.manual_seed(7)
    base = make(len(tokenizer))
    start = {name: value.clone() for name, value in base.state_dict().items()}
    for name in ("base", "first", "second"):
        place = root / name
        if name != "base":
            base.load_state_dict({key: value + 0.01 * torch.randn_like(value) for key, value in start.items()})
        base.save_pretrained(place)
        tokenizer.save_pretrained(place)
        (place / "README.md").write_text(CARD)


@pytest.mark.parametrize("make", [qwen2, gemma2])
def test_a_pair_made_by_transformers_passes_the_check_unedited(project: Project, make: Callable[[int], Any]) -> None:
    write_family(project.root / "models", make)
    arguments = ("models/base", "models/first", "models/second", "--yes", "--out", "nightly", "--name", "both")
    done = project.mergegate("init", *arguments)
    assert done.exit_code == 0, done.output
    assert "next     mergegate run nightly/both.yaml" in done.output
    checked = project.mergegate("check", "nightly/both.yaml", "--json")
    assert checked.exit_code == 0, checked.output
    profile = yaml.safe_load((project.root / "nightly" / "both.yaml").read_text())
    assert profile["checks"]["license"] == {"purpose": "commercial", "visibility": "public"}
    again = project.mergegate("init", *arguments)
    assert again.exit_code == 2, again.output
    assert "it exists" in again.output


def test_a_licence_that_no_card_names_is_a_doubt_until_somebody_accepts_it(project: Project) -> None:
    write_family(project.root / "models", qwen2)
    (project.root / "models" / "second" / "README.md").unlink()
    arguments = ("init", "models/base", "models/first", "models/second", "--json")
    doubted = project.mergegate(*arguments, "--out", "doubted")
    assert doubted.exit_code == 3, doubted.output
    assert "second" in " ".join(json.loads(doubted.stdout)["doubts"])
    accepted = project.mergegate(*arguments, "--out", "settled", "--accept", "alice: it is ours")
    assert accepted.exit_code == 0, accepted.output


@pytest.mark.slow
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
