"""Rounds of clients: who takes part, what the next round begins with, and a round that nobody has something new for."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml
from client_rounds import HONEST, MODELS, Clients
from demo_project import PROFILES, Project

from flows.candidates import ClientRound, client_round
from merge_core.errors import InvalidInput, Refused

DOCUMENT: dict[str, Any] = {"base_model": "base", "clients": ["clients/*"], "merge_method": "median"}


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """``base``, and as many clients as there are honest ones, each a copy under another digest."""
    (tmp_path / "base").symlink_to(MODELS / "base")
    for name in HONEST:
        shutil.copytree(MODELS / "base", tmp_path / "clients" / name)
    return tmp_path


def round_of(place: Path, released: Path | None = None, **changes: Any) -> ClientRound:
    def digest_of(directory: Path) -> str:
        return directory.name

    return client_round({**DOCUMENT, **changes}, place, "profile", released=released, digest_of=digest_of)


def names(found: ClientRound) -> list[str]:
    return [Path(one["model"]).name for one in found.document["models"]]


def release(place: Path, *made_of: str) -> Path:
    """A release of these clients, named by their digests."""
    out = place / "releases/v1"
    shutil.copytree(MODELS / "base", out)
    parents = [{"name": f"clients/{name}", "digest": {"sha256": name}} for name in made_of]
    statement = {"predicate": {"buildDefinition": {"resolvedDependencies": parents}}}
    (out / "provenance.json").write_text(json.dumps(statement))
    (out / "recipe.yaml").write_text(yaml.safe_dump({"merge_method": "median", "base_model": "base", "models": []}))
    return out


def test_a_first_round_begins_with_the_base_and_takes_everybody(place: Path) -> None:
    found = round_of(place)
    assert (found.document["base_model"], names(found), found.remarks) == ("base", sorted(HONEST), ())
    assert "clients" not in found.document


def test_the_next_round_begins_with_the_release_and_leaves_out_who_is_late(place: Path) -> None:
    found = round_of(place, release(place, "ada", "cleo"))
    assert found.document["base_model"] == "releases/v1"
    assert names(found) == ["ben", "dan"]
    late = [remark for remark in found.remarks if "late" in remark]
    assert [remark.partition(":")[0] for remark in late] == ["clients/ada", "clients/cleo"]
    assert found.text.splitlines() == [f"# {remark}" for remark in found.remarks]


@pytest.mark.parametrize("at_least", [1, 3])
def test_where_too_few_have_something_new_the_last_round_stands(place: Path, at_least: int) -> None:
    made_of = tuple(HONEST) if at_least == 1 else ("ada", "ben", "cleo")
    found = round_of(place, release(place, *made_of), at_least=at_least)
    assert found.document == {"merge_method": "median", "base_model": "base", "models": []}
    assert "the last round stands" in found.remarks[-1]


def test_a_first_round_of_too_few_is_refused(place: Path) -> None:
    with pytest.raises(Refused, match="at least 5"):
        round_of(place, at_least=5)


def test_who_is_not_there_or_not_whole_or_of_another_shape_is_left_out_by_name(place: Path) -> None:
    (place / "clients/ada/config.json").unlink()
    (place / "clients/ben/model.safetensors").write_bytes(b"half of it")
    shutil.rmtree(place / "clients/dan")
    shutil.copytree(MODELS / "other-tokenizer", place / "clients/eve")
    (place / "clients/notes.txt").write_text("not a client")
    found = round_of(place, clients=["clients/*", "clients/zoe", "other/*", "clients/cleo"])
    assert names(found) in (["cleo"], ["cleo", "eve"])
    said = {remark.partition(":")[0]: remark for remark in found.remarks}
    assert "no such file" in said["clients/ada"] or "config.json" in said["clients/ada"]
    assert "model.safetensors" in said["clients/ben"]
    assert "not there" in said["clients/zoe"]
    assert "nothing is there" in said["other/*"]
    assert str(place) not in found.text  # a release tells it to strangers


def test_a_pattern_may_be_absolute_and_names_one_client_once(place: Path) -> None:
    found = round_of(place, clients=[f"{place}/clients/*", "clients/ada"])
    assert names(found) == sorted(HONEST)
    assert all(not one["model"].startswith("/") for one in found.document["models"])


def test_a_card_that_is_no_file_leaves_its_client_out(place: Path) -> None:
    (place / "clients/ada/README.md").unlink()
    os.mkfifo(place / "clients/ada/README.md")
    (place / "clients/ben/README.md").write_text("---\nsamples: many\n---\n")
    found = round_of(place)
    assert names(found) == ["cleo", "dan"]
    assert [remark.partition(":")[0] for remark in found.remarks] == ["clients/ada", "clients/ben"]


@pytest.mark.parametrize("method", ["task_arithmetic", "geometric_median"])
def test_samples_are_weights_and_those_of_the_recipe_win(place: Path, method: str) -> None:
    for number, name in enumerate(sorted(HONEST), start=1):
        (place / "clients" / name / "README.md").write_text(f"---\nlicense: mit\nsamples: {100 * number}\n---\n")
    found = round_of(place, merge_method=method, samples={"clients/ada": 7})
    weights = [one["parameters"]["weight"] for one in found.document["models"]]
    assert weights == [7, 200, 300, 400]
    assert found.document.get("parameters", {}).get("normalize", True)


def test_without_a_method_it_is_the_mean_by_samples(place: Path) -> None:
    document = {key: value for key, value in DOCUMENT.items() if key != "merge_method"}
    found = client_round(document, place, "profile", released=None, digest_of=lambda one: one.name)
    assert found.document["merge_method"] == "task_arithmetic"
    assert found.document["parameters"] == {"normalize": True}


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"clients": []}, "a list of directories"),
        ({"clients": "clients/*"}, "a list of directories"),
        ({"samples": {"clients/ada": 0}}, "above 0"),
        ({"samples": {"clients/ada": True}}, "above 0"),
        ({"samples": ["clients/ada"]}, "above 0"),
        ({"clients": ["x" * 5000]}, "no directory can match"),
        ({"clients": ["clients/*", 3]}, "a list of directories"),
        ({"at_least": 0}, "from 1"),
        ({"at_least": True}, "from 1"),
        ({"models": [{"model": "a"}]}, "clients are the models"),
        ({"base_model": None}, "base_model"),
        ({"merge_method": "task_arithmetic", "samples": {"clients/ada": 3}}, "none of clients/ben"),
        ({"samples": dict.fromkeys([f"clients/{name}" for name in HONEST], 3)}, "count alike"),
    ],
)
def test_what_a_round_cannot_be(place: Path, changes: Mapping[str, Any], said: str) -> None:
    with pytest.raises(InvalidInput) as problem:
        round_of(place, **changes)
    assert said in str(problem.value)


# --- a whole project over rounds ---


def make_profile(project: Project, method: str, **recipe: Any) -> str:
    profile = {
        "name": f"rounds-{method}",
        "recipe": {
            "merge_method": method,
            "base_model": "demo/models/base",
            "clients": [f"../clients-{method}/*"],
            "dtype": "bfloat16",
            **recipe,
        },
        "evaluate": {
            "tasks": [
                {"task": f"demo/tasks/{skill}.yaml", "guarded_by": "champion", "max_drop": 30}
                for skill in ("copy", "reverse", "shift")
            ]
        },
        "publish": {"to": "directory", "path": f"../releases/{method}"},
    }
    (project.root / f"profiles/{method}.yaml").write_text(yaml.safe_dump(profile))
    return f"profiles/{method}.yaml"


def scores(project: Project, method: str) -> dict[str, float]:
    said = json.loads((project.root / f"releases/{method}/latest/provenance.json").read_text())
    return {one["task"]: one["merge_score"] for one in said["predicate"]["mergegate_verdict"]["guards"]}


@pytest.mark.slow
def test_five_rounds_with_one_absurd_client_keep_both_skills(project: Project) -> None:
    name = make_profile(project, "median", leave_out_beyond=5)
    clients = Clients(project.root / "clients-median")
    begin = MODELS / "base"
    for number in range(5):
        for client in HONEST:
            clients.train(client, begin)
        clients.damage("eve", begin) if number == 3 else clients.turn("eve", begin, 30)
        result = project.mergegate("run", name)
        assert result.exit_code == 0, result.output
        begin = (project.root / "releases/median/latest").resolve()
        provenance = json.loads((begin / "provenance.json").read_text())
        parents = [one["name"] for one in provenance["predicate"]["buildDefinition"]["resolvedDependencies"]]
        assert [Path(parent).name for parent in parents[:-1]] == [*sorted(HONEST), "eve"]
        assert "eve" in result.output
        report = (project.root / ".mergegate/reports/rounds-median.html").read_text()
        assert "left out" in report
    assert scores(project, "median")["copy"] >= 0.99
    assert scores(project, "median")["reverse"] >= 0.95
    assert scores(project, "median")["shift"] >= 0.99
    # Nobody has trained since: the last round stands, and nothing is made.
    before = {stage: project.artifacts(stage) for stage in ("merge", "distances", "evaluate")}
    again = project.mergegate("run", name)
    assert "nothing new" in again.output, again.output
    assert {stage: project.artifacts(stage) for stage in before} == before
    assert project.mergegate("verify", "releases/median/latest").exit_code == 0
    assert (
        project.mergegate("reproduce", "releases/median/latest", "--parents", str(project.root / "profiles")).exit_code
        == 0
    )
    # One client is enough to go on, and the others are named as late.
    clients.train("ada", begin)
    checked = project.mergegate("check", name)
    assert "clients-median/ben: left out: late" in checked.output.replace("\n", " "), checked.output


@pytest.mark.slow
def test_a_mean_of_the_same_clients_is_lost(project: Project) -> None:
    name = make_profile(project, "task_arithmetic")
    clients = Clients(project.root / "clients-task_arithmetic")
    for client in HONEST:
        clients.train(client, MODELS / "base")
    clients.turn("eve", MODELS / "base", 30)
    result = project.mergegate("run", name)
    assert (result.exit_code, scores_or_none(project, "task_arithmetic")) != (0, {"reverse": 1.0})
    assert "shift" in result.output
    assert PROFILES.is_dir()


def scores_or_none(project: Project, method: str) -> dict[str, float] | None:
    there = (project.root / f"releases/{method}/latest").is_dir()
    return scores(project, method) if there else None
