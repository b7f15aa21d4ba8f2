"""A full release of Hub parents: they are fetched once, pinned to commits, and merged again when a branch moves."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from hub_family import go_offline, mergegate
from hub_look_alike import LookAlike

DEMO = Path(__file__).resolve().parents[2] / "profiles" / "demo"
PARENTS = ("base", "reverser", "shifter")

pytestmark = pytest.mark.story


@dataclass(frozen=True)
class Project:
    """A profile whose parents are on a stand-in Hub, released to a directory."""

    root: Path
    stand_in: LookAlike

    def write(self, revision: Callable[[str], str] = lambda repo: "") -> Path:
        """Write the profile with every parent at ``revision(repo)``, and return its path."""
        recipe = (DEMO / "recipes" / "ties.yaml").read_text()
        for name in PARENTS:
            recipe = re.sub(rf"\.\./models/{name}\b", f"acme/{name}{revision(f'acme/{name}')}", recipe)
        (self.root / "recipe.yaml").write_text(recipe)
        documents = {"documents": str(DEMO / "data" / "held-out.jsonl"), "max_documents": 100, "max_increase": "5%"}
        publish = {"path": str(self.root / "releases")}
        profile = {"name": "demo", "recipe": "recipe.yaml", "perplexity": documents, "publish": publish}
        (self.root / "demo.yaml").write_text(json.dumps(profile))
        return self.root / "demo.yaml"

    def run(self, profile: Path) -> tuple[int, str, dict[str, Any]]:
        """Run the profile; return the exit code, status, and latest provenance (without a release, the JSON output)."""
        result = mergegate("run", str(profile), "--json")
        answer = json.loads(result.stdout)
        file = self.root / "releases" / "latest" / "provenance.json"
        return result.exit_code, answer["status"], json.loads(file.read_text()) if file.exists() else answer

    def commits(self) -> dict[str, str]:
        return {repo: repository.branches["main"] for repo, repository in self.stand_in.repositories.items()}


@pytest.fixture
def project(online: LookAlike, tmp_path: Path, prefect_api: None) -> Project:
    online.repositories.clear()
    for name in PARENTS:
        place = tmp_path / "uploaded" / name
        shutil.copytree(DEMO / "models" / name, place)
        card = (place / "README.md").read_text()
        (place / "README.md").write_text(card.replace("../base", "acme/base"))
        online.add_model(f"acme/{name}", place)
    return Project(tmp_path, online)


def merges_of(project: Project) -> int:
    return len(list((project.root / "state" / "store" / "merge").iterdir()))


@pytest.mark.proof
def test_hub_parents_are_fetched_once_and_named_by_commit(project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    profile = project.write()
    code, status, provenance = project.run(profile)
    assert (code, status) == (0, "released"), provenance
    parents = provenance["predicate"]["buildDefinition"]["resolvedDependencies"]
    assert {parent["name"]: parent["digest"]["gitCommit"] for parent in parents} == project.commits()

    project.stand_in.log.clear()
    assert project.run(profile)[:2] == (0, "nothing new")
    assert not [entry for entry in project.stand_in.log if "/resolve/" in entry.path or "/_storage" in entry.path]

    pinned = project.write(lambda repo: f"@{project.commits()[repo]}")
    go_offline(monkeypatch)
    project.stand_in.log.clear()
    assert project.run(pinned)[0] == 0
    assert project.stand_in.log == []
    assert merges_of(project) == 1, "names and revisions are no part of a merge, content is"
