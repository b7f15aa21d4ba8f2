"""A profile whose parent is a hidden fine-tune of a restrictively licensed model is refused by check and run."""

from __future__ import annotations

import json
import shutil

import pytest
from demo_project import PROFILES, Project, expect

RECIPE = """\
merge_method: linear
models:
  - {model: ../models/hidden, parameters: {weight: 0.5}}
  - {model: ../models/base, parameters: {weight: 0.5}}
dtype: bfloat16
"""


@pytest.fixture
def hidden(project: Project) -> Project:
    """Return a project with a parent that is the demo's thinker under another card, and an index with the thinker."""
    for name, source in (("hidden", "thinker"), ("base", "base")):
        directory = project.root / "models" / name
        directory.mkdir(parents=True)
        for file in (PROFILES / "demo" / "models" / source).iterdir():
            if file.name not in ("README.md", "LICENSE"):
                shutil.copy(file, directory)
        (directory / "README.md").write_text(f"---\nlicense: {'mit' if name == 'hidden' else 'apache-2.0'}\n---\n")
    (project.root / "recipes").mkdir()
    (project.root / "recipes" / "hidden.yaml").write_text(RECIPE)
    thinker = str(PROFILES / "demo" / "models" / "thinker")
    result = project.mergegate("fingerprint", thinker, "--name", "corp/thinker", "--license", "cc-by-nc-4.0", "--json")
    assert json.loads(result.stdout)["status"] == "made"
    return project


def write_profile(project: Project, license: object) -> str:
    profile = {
        "name": "hidden",
        "recipe": "recipes/hidden.yaml",
        "checks": {"license": license},
        "perplexity": {"documents": str(PROFILES / "demo" / "data" / "held-out.jsonl")},
    }
    (project.root / "hidden.yaml").write_text(json.dumps(profile))
    return "hidden.yaml"


def findings(project: Project, profile: str) -> tuple[int, list[str]]:
    result = project.mergegate("check", profile, "--json")
    return result.exit_code, [remark["found"] for remark in json.loads(result.stdout)["remarks"]]


@pytest.mark.story
def test_check_and_run_refuse_a_hidden_copy_until_a_user_dismisses_it(hidden: Project) -> None:
    profile = write_profile(hidden, {"purpose": "commercial"})
    code, found = findings(hidden, profile)
    assert code == 3
    assert any("cc-by-nc-4.0 (of corp/thinker) forbids commercial use" in text for text in found)
    declared = "hidden declares mit, but its weights equal those of corp/thinker (cc-by-nc-4.0"
    assert any(declared in text for text in found)
    result = hidden.mergegate("run", profile, "--json")
    answer = json.loads(result.stdout)
    assert (result.exit_code, answer["status"]) == (3, "refused")
    assert "its weights equal those of corp/thinker" in answer["message"]
    assert not (hidden.home / "store" / "merge").exists()
    dismissed = {"purpose": "commercial", "unrelated": {"hidden": {"corp/thinker": "alice: the same seed"}}}
    code, found = findings(hidden, write_profile(hidden, dismissed))
    assert (code, [text for text in found if "corp/thinker" in text]) == (0, [])


@pytest.mark.story
def test_a_shared_index_is_named_by_the_profile(hidden: Project) -> None:
    shutil.move(hidden.home / "fingerprints.jsonl", hidden.root / "known.jsonl")
    assert findings(hidden, write_profile(hidden, {"purpose": "commercial"}))[0] == 0
    assert findings(hidden, write_profile(hidden, {"purpose": "commercial", "fingerprints": "known.jsonl"}))[0] == 3
    result = hidden.mergegate("check", write_profile(hidden, {"fingerprints": "gone.jsonl"}))
    expect(result, 2, "remedy:   create it with 'mergegate fingerprint MODEL --index")
