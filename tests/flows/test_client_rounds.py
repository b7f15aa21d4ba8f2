"""Client rounds: participating clients, the start of the next round, and rounds without new contributions."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from demo_project import PROFILES, Project
from safetensors.torch import load_file, save_file

from mergegate.flows.candidates import ExpandedRecipe, client_digest, client_round
from mergegate.flows.candidates.clients import used_digests
from mergegate.merge_core import open_checkpoint
from mergegate.merge_core.adapters import ExtractionSettings, extract_adapter, write_adapter
from mergegate.merge_core.errors import InvalidInput, Refused
from mergegate.merge_core.files import HashMemo, sha256_file
from mergegate.tasks.release.publish.releases.origin import selecting_samples

MODELS = PROFILES / "demo/models"
STEP = 0.35  # fraction of the difference between the fine-tune and the base
HONEST = {"ada": "reverser", "ben": "reverser", "cleo": "shifter", "dan": "shifter"}
MODEL_WEIGHTS = "model.safetensors"


def _wide(place: Path) -> dict[str, torch.Tensor]:
    return {name: tensor.float() for name, tensor in load_file(place / MODEL_WEIGHTS).items()}


class Clients:
    """Clients that write their trained checkpoints into subdirectories of ``place``."""

    def __init__(self, place: Path) -> None:
        self.place = place
        base = _wide(MODELS / "base")
        self._ways = {skill: {n: t - base[n] for n, t in _wide(MODELS / skill).items()} for skill in HONEST.values()}
        self._draw = torch.Generator().manual_seed(0)

    def train(self, name: str, begin: Path) -> None:
        """Write an honest client: one step from ``begin`` toward its skill, with a little noise."""
        way = self._ways[HONEST[name]]
        self._save(name, begin, {key: STEP * self._noisy(one) for key, one in way.items()})

    def approach(self, name: str, begin: Path) -> None:
        """Write an honest client that moves a fraction of the remaining distance to its skill."""
        base, here = _wide(MODELS / "base"), _wide(begin)
        skills = list(self._ways)
        ways = torch.stack([torch.cat([way.flatten() for way in self._ways[skill].values()]) for skill in skills], 1)
        gone = torch.cat([(here[key] - base[key]).flatten() for key in base])
        share = float(torch.linalg.lstsq(ways, gone[:, None]).solution[skills.index(HONEST[name])])
        way = self._ways[HONEST[name]]
        self._save(name, begin, {key: STEP * (1 - share) * self._noisy(one) for key, one in way.items()})

    def turn(self, name: str, begin: Path, times: float) -> None:
        """Write a client that steps in the opposite direction of the honest ones, ``times`` as far."""
        self._save(name, begin, {key: -times * STEP * one for key, one in self._between.items()})

    def confuse(self, name: str, begin: Path, times: float) -> None:
        """Write a client whose change is noise, ``times`` as large as an honest step."""
        steps = self._ways["reverser"]
        noise = {key: torch.randn(one.shape, generator=self._draw) for key, one in steps.items()}
        self._save(
            name, begin, {key: times * STEP * one.square().mean().sqrt() * noise[key] for key, one in steps.items()}
        )

    def damage(self, name: str, begin: Path) -> None:
        """Write a client whose weights are all NaN."""
        self._save(
            name, begin, {key: torch.full_like(one, float("nan")) for key, one in self._ways["reverser"].items()}
        )

    def as_adapter(self, name: str, begin: Path) -> Path:
        """Replace a client's checkpoint with a LoRA adapter on ``begin`` and return its directory."""
        place = self.place / name
        tuned, base = open_checkpoint(place), open_checkpoint(begin)
        made = extract_adapter(tuned, base, str(begin), ExtractionSettings(rank=24, dtype="bfloat16"))
        shutil.rmtree(place)
        place.mkdir()
        write_adapter(made.adapter, place)
        shutil.copy(MODELS / "base/README.md", place)
        return place

    @property
    def _between(self) -> dict[str, torch.Tensor]:
        """Mean of the task vectors of both skills: the direction in which the honest clients move together."""
        one, other = (self._ways[skill] for skill in ("reverser", "shifter"))
        return {key: (one[key] + other[key]) / 2 for key in one}

    def _noisy(self, change: torch.Tensor) -> torch.Tensor:
        return change + 0.1 * change.square().mean().sqrt() * torch.randn(change.shape, generator=self._draw)

    def _save(self, name: str, begin: Path, change: dict[str, torch.Tensor]) -> None:
        out = self.place / name
        shutil.rmtree(out, ignore_errors=True)
        shutil.copytree(MODELS / "base", out)
        made = {key: (tensor + change[key]).bfloat16() for key, tensor in _wide(begin).items()}
        save_file(made, out / MODEL_WEIGHTS, {"format": "pt"})


WEIGHTS = "adapter_model.safetensors"
ADAPTERS = MODELS.parent / "adapters"
DOCUMENT: dict[str, Any] = {"base_model": "base", "clients": ["clients/*"], "merge_method": "median"}
TASKS = ("copy", "reverse", "shift")
CLIENTS = [f"clients/{name}" for name in sorted(HONEST)]


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """Create ``base`` and one copy of it per honest client. The digest of a client is its directory name."""
    (tmp_path / "base").symlink_to(MODELS / "base")
    for name in HONEST:
        shutil.copytree(MODELS / "base", tmp_path / "clients" / name)
    return tmp_path


def round_of(place: Path, released: Path | None = None, **changes: Any) -> ExpandedRecipe:
    return client_round(
        {**DOCUMENT, **changes}, place, "profile", last_release=released, digest_of=lambda directory: directory.name
    )


def models(found: ExpandedRecipe) -> list[str]:
    return [one["model"] for one in found.documents[-1]["models"]]


def weights(found: ExpandedRecipe) -> list[float]:
    return [one["parameters"]["weight"] for one in found.documents[-1]["models"]]


def remarks_by_client(found: ExpandedRecipe, text: str = "") -> dict[str, str]:
    """Return the remarks that contain a text, by their subject."""
    return {remark.partition(":")[0]: remark for remark in found.remarks if text in remark}


def write_provenance(release: Path, *parents: Mapping[str, Any]) -> None:
    predicate = {"buildDefinition": {"resolvedDependencies": parents}}
    (release / "provenance.json").write_text(json.dumps({"predicate": predicate}))


def release(place: Path, *made_of: str, **digests: str) -> Path:
    """Write a release whose provenance lists these clients as parents."""
    out = place / "releases/v1"
    shutil.copytree(MODELS / "base", out)
    digests = {name: name for name in made_of} | digests
    write_provenance(out, *({"name": f"clients/{it}", "digest": {"sha256": digests[it]}} for it in digests))
    (out / "recipe.yaml").write_text(yaml.safe_dump({"merge_method": "median", "base_model": "base", "models": []}))
    return out


def test_the_first_round_starts_from_the_base_with_all_clients(place: Path) -> None:
    found = round_of(place)
    assert (found.documents[-1]["base_model"], models(found), found.remarks) == ("base", CLIENTS, ())
    assert "clients" not in found.documents[-1]


def test_the_next_round_begins_with_the_release_and_leaves_out_who_is_late(place: Path) -> None:
    found = round_of(place, release(place, "ada", "cleo"))
    assert found.documents[-1]["base_model"] == "releases/v1"
    assert models(found) == ["clients/ben", "clients/dan"]
    assert list(remarks_by_client(found, "already includes")) == ["clients/ada", "clients/cleo"]
    assert found.comments.splitlines() == [f"# {remark}" for remark in found.remarks]


@pytest.mark.parametrize("at_least", [1, 3])
def test_where_too_few_have_something_new_the_last_round_stands(place: Path, at_least: int) -> None:
    made_of = tuple(HONEST) if at_least == 1 else ("ada", "ben", "cleo")
    found = round_of(place, release(place, *made_of), at_least=at_least)
    assert found.documents == ({"merge_method": "median", "base_model": "base", "models": []},)
    assert "the last round is used again" in found.remarks[-1]


@pytest.mark.parametrize("what", ["another client", "a client is gone"])
def test_where_the_last_round_stands_and_its_recipe_would_make_another_the_release_is_itself(
    place: Path, what: str
) -> None:
    """One of four clients has trained again, and three are required: the last recipe must not merge the new weights."""
    trained = {"ada": "before the training"} if what == "another client" else {}
    released = release(place, *HONEST, **trained)
    if not trained:
        shutil.rmtree(place / "clients/dan")
    found = round_of(place, released, at_least=3)
    assert found.documents == ({"merge_method": "passthrough", "models": [{"model": "releases/v1"}]},)
    assert "have changed" in found.remarks[-1]


def test_a_first_round_with_too_few_clients_is_refused(place: Path) -> None:
    with pytest.raises(Refused, match="at least 5"):
        round_of(place, at_least=5)


def test_the_provenance_of_the_last_release_has_no_duplicate_keys(tmp_path: Path) -> None:
    file = release(tmp_path, "ada") / "provenance.json"
    verdict = {"guards": [{"task": "copy", "n": 9}]}
    predicate = json.loads(file.read_text())["predicate"] | {"mergegate_verdict": verdict}
    for first, clients, tasks in (("", {"ada"}, {"copy"}), ('"predicate": {}, ', set(), set())):
        file.write_text(f'{{{first}"predicate": {json.dumps(predicate)}}}')
        assert (used_digests(file.parent), set(selecting_samples(file.parent))) == (clients, tasks)


def test_who_is_not_there_or_not_whole_or_of_another_shape_is_left_out_by_name(place: Path) -> None:
    (place / "clients/ada/config.json").unlink()
    (place / "clients/ben/model.safetensors").write_bytes(b"half of it")
    shutil.rmtree(place / "clients/dan")
    shutil.copytree(MODELS / "other-tokenizer", place / "clients/eve")
    (place / "clients/notes.txt").write_text("not a client")
    found = round_of(place, clients=["clients/*", "clients/zoe", "other/*", "clients/cleo"])
    assert models(found) in (["clients/cleo"], ["clients/cleo", "clients/eve"])
    said = remarks_by_client(found)
    assert "no such file" in said["clients/ada"] or "config.json" in said["clients/ada"]
    assert "model.safetensors" in said["clients/ben"]
    assert "it does not exist" in said["clients/zoe"]
    assert "no directory matches" in said["other/*"]
    assert str(place) not in found.comments  # releases are public and must not contain local paths


def test_a_pattern_may_be_absolute_and_names_one_client_once(place: Path) -> None:
    found = round_of(place, clients=[f"{place}/clients/*", "clients/ada"])
    assert models(found) == CLIENTS


def test_a_client_whose_card_is_not_a_file_is_left_out(place: Path) -> None:
    (place / "clients/ada/README.md").unlink()
    os.mkfifo(place / "clients/ada/README.md")
    (place / "clients/ben/README.md").write_text("---\nsamples: many\n---\n")
    found = round_of(place)
    assert models(found) == ["clients/cleo", "clients/dan"]
    assert list(remarks_by_client(found)) == ["clients/ada", "clients/ben"]


@pytest.mark.parametrize("method", ["task_arithmetic", "geometric_median"])
@pytest.mark.parametrize("kind", ["models", "adapters"])
def test_samples_are_weights_and_those_of_the_recipe_win(place: Path, method: str, kind: str) -> None:
    for number, name in enumerate(sorted(HONEST), start=1):
        client = adapt(place, name) if kind == "adapters" else place / "clients" / name
        (client / "README.md").write_text(f"---\nlicense: mit\nsamples: {100 * number}\n---\n")
    found = round_of(place, merge_method=method, samples={"clients/ada": 7})
    assert weights(found) == [7, 200, 300, 400]
    assert found.documents[-1].get("parameters", {}).get("normalize", True)


def test_without_a_method_it_is_the_mean_by_samples(place: Path) -> None:
    del (document := dict(DOCUMENT))["merge_method"]
    found = client_round(document, place, "profile", last_release=None, digest_of=lambda one: one.name)
    assert found.documents[-1]["merge_method"] == "task_arithmetic"
    assert found.documents[-1]["parameters"] == {"normalize": True}


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"clients": []}, "a list of directories"), ({"samples": {"clients/ada": 0}}, "above 0"),
        ({"samples": {"clients/ada": True}}, "above 0"), ({"samples": ["clients/ada"]}, "above 0"),
        ({"clients": ["x" * 5000]}, "cannot match a directory"),
        ({"clients": ["clients/*", 3]}, "a list of directories"), ({"at_least": 0}, "from 1"),
        ({"at_least": True}, "from 1"), ({"models": [{"model": "a"}]}, "clients are the models"),
        ({"base_model": None}, "base_model"),
        ({"merge_method": "task_arithmetic", "samples": {"clients/ada": 3}}, "no sample count of clients/ben"),
        ({"samples": dict.fromkeys([f"clients/{name}" for name in HONEST], 3)}, "weights all clients equally"),
    ],
)  # fmt: skip
def test_what_a_round_cannot_be(place: Path, changes: Mapping[str, Any], said: str) -> None:
    with pytest.raises(InvalidInput) as problem:
        round_of(place, **changes)
    assert said in str(problem.value)


# --- clients that are adapters ---


def adapt(place: Path, name: str, adapter: str = "reverser-lora") -> Path:
    """Replace the client's checkpoint with an adapter."""
    shutil.rmtree(place / "clients" / name, ignore_errors=True)
    return Path(shutil.copytree(ADAPTERS / adapter, place / "clients" / name))


def change_config(adapter: Path, **said: Any) -> None:
    config = json.loads((adapter / "adapter_config.json").read_text())
    (adapter / "adapter_config.json").write_text(json.dumps({**config, **said}))


def test_adapters_take_part_on_what_the_round_begins_with_beside_whole_checkpoints(place: Path) -> None:
    adapt(place, "ben")
    adapt(place, "dan", "shifter-lora")
    assert models(round_of(place)) == ["clients/ada", "base+clients/ben", "clients/cleo", "base+clients/dan"]
    later = round_of(place, release(place, "ada"))
    assert models(later) == ["releases/v1+clients/ben", "clients/cleo", "releases/v1+clients/dan"]


def test_an_adapter_is_late_by_its_own_bytes_whatever_it_was_applied_to(place: Path, tmp_path: Path) -> None:
    for name in HONEST:
        adapt(place, name)
    change_config(place / "clients/cleo", lora_dropout=0.3)  # changed bytes count as new training
    released = release(place)
    files = {path.name: sha256_file(path) for path in (ADAPTERS / "reverser-lora").iterdir() if path.suffix != ".md"}
    parents = [{"digest": {"sha256": "of base and adapter"}, "annotations": {"adapter": {"files": files}}}]
    write_provenance(released, *parents)
    hashes = HashMemo(tmp_path / "hashes.db")
    found = client_round(
        DOCUMENT, place, "profile", last_release=released, digest_of=lambda one: client_digest(one, hashes)
    )
    assert models(found) == ["releases/v1+clients/cleo"]
    assert list(remarks_by_client(found, "already includes")) == ["clients/ada", "clients/ben", "clients/dan"]


def test_adapters_that_cannot_be_applied_are_left_out_by_name(place: Path) -> None:
    (adapt(place, "ada") / WEIGHTS).unlink()
    (adapt(place, "ben") / WEIGHTS).write_bytes(b"half of it")
    change_config(adapt(place, "dan"), peft_type="LOHA")
    change_config(adapt(place, "eve"), r=8)
    (adapt(place, "fay") / "adapter_config.json").write_text("{")
    odd = adapt(place, "gus")
    tensors = {f"base_model.model.elsewhere.{name}": one for name, one in load_file(odd / WEIGHTS).items()}
    save_file(tensors, odd / WEIGHTS)
    adapt(place, "north+1")
    found = round_of(place)
    assert models(found) == ["clients/cleo"]
    said = {name.removeprefix("clients/"): remark for name, remark in remarks_by_client(found).items()}
    assert set(said) == {"ada", "ben", "dan", "eve", "fay", "gus", "north+1"}
    assert "no weights" in said["ada"] or "adapter_model" in said["ada"]
    words = {"ben": WEIGHTS, "dan": "LOHA", "eve": "rank 16", "fay": "adapter_config.json", "gus": "elsewhere"}
    assert {name for name, word in words.items() if word not in said[name]} == set()
    assert "@ or +" in said["north+1"]
    assert str(place) not in found.comments


def test_on_a_base_that_has_an_adapter_no_other_takes_part(place: Path) -> None:
    adapt(place, "ben")
    (place / "lora").symlink_to(ADAPTERS / "shifter-lora")
    found = round_of(place, base_model="base+lora")
    assert "clients/ben" not in " ".join(models(found))
    assert any(remark.startswith("clients/ben: left out: base_model base+lora") for remark in found.remarks)


def test_a_directory_with_a_config_is_always_a_model(place: Path) -> None:
    shutil.copy(ADAPTERS / "reverser-lora/adapter_config.json", place / "clients/ada")
    assert models(round_of(place))[0] == "clients/ada"


# --- a whole project over rounds ---


class Rounds:
    """Client rounds in a project. Honest clients train from the last release, and ``eve`` attacks."""

    profile = "profiles/rounds.yaml"

    def __init__(self, project: Project, drop: float, **recipe: Any) -> None:
        self.project, self.clients, self.begin = project, Clients(project.root / "clients"), MODELS / "base"
        source = {"base_model": "demo/models/base", "clients": ["../clients/*"], "dtype": "bfloat16"}
        tasks = [{"task": f"demo/tasks/{it}.yaml", "guarded_by": "champion", "max_drop": drop} for it in TASKS]
        profile = {
            "name": "rounds",
            "recipe": {"merge_method": "median", **source, **recipe},
            "evaluate": {"tasks": tasks},
            "publish": {"to": "directory", "path": "../releases"},
        }
        (project.root / self.profile).write_text(yaml.safe_dump(profile))

    def train(self) -> None:
        for client in HONEST:
            self.clients.train(client, self.begin)
        self.clients.turn("eve", self.begin, 30)

    def run(self) -> str:
        """Run the round and return its output without line breaks."""
        result = self.project.mergegate("run", self.profile)
        assert result.exit_code == 0, result.output
        self.begin = self.latest.resolve()
        return " ".join(result.output.split())

    @property
    def latest(self) -> Path:
        return self.project.root / "releases/latest"

    @property
    def predicate(self) -> dict[str, Any]:
        return dict(json.loads((self.begin / "provenance.json").read_text())["predicate"])

    @property
    def scores(self) -> dict[str, float]:
        return {one["task"]: one["merge_score"] for one in self.predicate["mergegate_verdict"]["guards"]}

    def require_nothing_new(self) -> None:
        stages = ("merge", "distances", "evaluate", "apply")
        before = {stage: self.project.artifacts(stage) for stage in stages}
        assert "nothing new" in self.run()
        assert {stage: self.project.artifacts(stage) for stage in stages} == before

    def require_reproducible(self) -> None:
        made = self.project.mergegate("reproduce", str(self.latest), "--parents", str(self.project.root / "profiles"))
        assert made.exit_code == 0, made.output

    def check(self) -> str:
        return " ".join(self.project.mergegate("check", self.profile).output.split())


LATE = "clients/ben: left out: the last round already includes"


@pytest.mark.proof
def test_rounds_of_models_and_adapters_are_released_and_made_again(project: Project) -> None:
    """One skill is contributed as adapters on the last release, the other as full checkpoints."""
    rounds = Rounds(project, drop=4, leave_out_beyond=5, at_least=2)
    clients = rounds.clients
    for number in range(3):
        rounds.train()
        for client in ("ada", "ben", "eve"):
            adapter = clients.as_adapter(client, rounds.begin)
        if number == 1:
            tensors = {key: one.fill_(float("nan")) for key, one in load_file(adapter / WEIGHTS).items()}
            save_file(tensors, adapter / WEIGHTS)
        assert "eve" in rounds.run()
        parents = rounds.predicate["buildDefinition"]["resolvedDependencies"]
        adapters = [Path(one["name"]).name for one in parents if "adapter" in one["annotations"]]
        assert adapters == ["ada", "ben", "eve"]
    assert rounds.scores["reverse"] >= 0.6
    assert rounds.scores["shift"] >= 0.9
    rounds.require_nothing_new()
    rounds.require_reproducible()
    # As for every adapter, a different base model name is only a warning. The other clients are late.
    begin = rounds.begin
    clients.train("ada", begin)
    change_config(clients.as_adapter("ada", begin), base_model_name_or_path="acme/another")
    assert "nothing new" in rounds.run()
    assert rounds.begin == begin  # one of two required clients: the round waits for another
    clients.train("cleo", begin)
    checked = rounds.check()
    assert "base_model_name_or_path" in checked, checked
    assert LATE in checked, checked
