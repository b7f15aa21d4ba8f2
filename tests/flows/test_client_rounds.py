"""Client rounds: participating clients, the start of the next round, and rounds without new contributions."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from client_rounds import HONEST, MODELS, Clients
from demo_project import Project
from safetensors.torch import load_file, save_file

from mergegate.flows.candidates import ExpandedRecipe, client_digest, client_round
from mergegate.flows.candidates.last_round import used_digests
from mergegate.merge_core import load_recipe, merge_weights, open_checkpoint, plan_merge
from mergegate.merge_core.errors import InvalidInput, Refused
from mergegate.merge_core.files import HashMemo, sha256_file
from mergegate.tasks.merge import find_optimizer_state
from mergegate.tasks.publish.releases.champion import selecting_samples

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


def write_provenance(release: Path, *parents: Mapping[str, Any], byproducts: Sequence[Mapping[str, Any]] = ()) -> None:
    predicate = {"buildDefinition": {"resolvedDependencies": parents}, "runDetails": {"byproducts": byproducts}}
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
        ({"clients": []}, "a list of directories"),
        ({"samples": {"clients/ada": 0}}, "above 0"),
        ({"samples": {"clients/ada": True}}, "above 0"),
        ({"samples": ["clients/ada"]}, "above 0"),
        ({"clients": ["x" * 5000]}, "cannot match a directory"),
        ({"clients": ["clients/*", 3]}, "a list of directories"),
        ({"at_least": 0}, "from 1"),
        ({"at_least": True}, "from 1"),
        ({"momentum": 1}, "below 1"),
        ({"momentum": -0.1}, "from 0"),
        ({"momentum": True}, "from 0"),
        ({"models": [{"model": "a"}]}, "clients are the models"),
        ({"adam": True}, "{rate: ...}"),
        ({"adam": {}}, "{rate: ...}"),
        ({"adam": {"rate": 0}}, "above 0"),
        ({"adam": {"rate": "0.1"}}, "above 0"),
        ({"adam": {"rate": 0.1, "tau": 0}}, "above 0"),
        ({"adam": {"rate": 0.1, "tau": float("nan")}}, "above 0"),
        ({"adam": {"rate": 0.1, "beta2": -0.1}}, "from 0"),
        ({"adam": {"rate": 0.1, "beta_1": 0.9}}, "beta1"),
        ({"base_model": None}, "base_model"),
        ({"merge_method": "task_arithmetic", "samples": {"clients/ada": 3}}, "no sample count of clients/ben"),
        ({"samples": dict.fromkeys([f"clients/{name}" for name in HONEST], 3)}, "weights all clients equally"),
    ],
)
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


# --- momentum and Adam ---


def save_tiny(place: Path, weights: np.ndarray) -> None:
    place.mkdir(parents=True, exist_ok=True)
    save_file({"model.norm.weight": torch.from_numpy(weights.astype(np.float32))}, place / "model.safetensors")
    (place / "config.json").write_text('{"model_type": "llama"}')


def read_tiny(place: Path) -> np.ndarray:
    return load_file(place / "model.safetensors")["model.norm.weight"].double().numpy()


def digest_of_tiny(place: Path) -> str:
    return sha256_file(place / "model.safetensors")


@pytest.mark.story
@pytest.mark.parametrize(
    "settings",
    [
        {"momentum": 0.9, "parameters": {"lambda": 1.0}},
        {"momentum": 0.5, "parameters": {"lambda": 0.3}},
        {"adam": {"rate": 0.03, "beta1": 0.8, "beta2": 0.95, "tau": 0.02}},
    ],
    ids=["momentum", "momentum at a lower rate", "Adam"],
)
def test_the_step_of_a_round_is_that_of_its_formula(tmp_path: Path, settings: dict[str, Any]) -> None:
    """D is the mean change of the clients by samples.

    Momentum: v' = momentum v + D, w' = w + rate v', computed from the releases alone without other stored state.
    Adam: m' = beta1 m + (1 - beta1) D, v' = beta2 v + (1 - beta2) D^2, w' = w + rate m' / (sqrt v' + tau).
    """
    draw = np.random.default_rng(5)
    w, m, v = draw.normal(size=300), np.zeros(300), np.zeros(300)
    adam, samples = settings.get("adam"), {"clients/a": 100, "clients/b": 300}
    document = {"base_model": "base", "clients": ["clients/*"], "samples": samples, "dtype": "float32", **settings}
    save_tiny(tmp_path / "base", w)
    released: Path | None = None
    for number in range(1, 6):
        begin = read_tiny(released or tmp_path / "base")
        steps = {name: draw.normal(size=300) for name in samples}
        for name, step in steps.items():
            save_tiny(tmp_path / name, begin + step)
        found = client_round(
            document, tmp_path, "profile", last_release=released, digest_of=digest_of_tiny, find_state=tmp_path.joinpath
        )
        recipe = load_recipe(yaml.safe_dump_all([dict(one) for one in found.documents]))
        if adam:
            assert len(recipe.references()) == (3 if number == 1 else 5)
        else:
            assert len(found.documents) == (1 if number == 1 else 2)
        checkpoints = {str(ref): open_checkpoint(tmp_path / ref.path) for ref in recipe.references()}
        parents = [{"digest": {"sha256": digest_of_tiny(tmp_path / ref.path)}} for ref in recipe.references()]
        released = tmp_path / f"releases/{number}"
        merge_weights(plan_merge(recipe, checkpoints), released, seed=0)
        kept = []
        for name in ("mean", "squares") if adam else ():
            stored = f"kept/{number}/{name}"
            merge_weights(plan_merge(recipe.ending_with(name), checkpoints), tmp_path / stored, seed=0)
            digest = {"sha256": digest_of_tiny(tmp_path / stored)}
            kept.append({"name": name, "digest": digest, "annotations": {"stored": stored}})
        write_provenance(released, *parents, byproducts=kept)
        (released / "recipe.yaml").write_text(yaml.safe_dump_all([dict(one) for one in found.documents]))
        (released / "config.json").write_text('{"model_type": "llama"}')
        change = sum(steps[name] * count for name, count in samples.items()) / sum(samples.values())
        if adam:
            m = adam["beta1"] * m + (1 - adam["beta1"]) * change
            v = adam["beta2"] * v + (1 - adam["beta2"]) * change**2
            w = w + adam["rate"] * m / (np.sqrt(v) + adam["tau"])
        else:
            v = settings["momentum"] * v + change
            w = w + settings["parameters"]["lambda"] * v
        np.testing.assert_allclose(read_tiny(released), w, atol=2e-6 if adam else 5e-6)
    remark = "Adam continues" if adam else f"{settings['momentum']:g} times the last step, from 3"
    assert any(remark in one for one in found.remarks)


@pytest.mark.parametrize("lost", ["gone", "another", "no recipe"])
def test_where_the_release_before_the_last_is_not_there_momentum_begins_anew(place: Path, lost: str) -> None:
    released = release(place, "nobody", *([] if lost == "another" else ["base"]))
    if lost == "gone":
        (place / "base").unlink()
    elif lost == "no recipe":
        (released / "recipe.yaml").write_text("{}\n---\n{}\n")
    found = round_of(place, released, momentum=0.9)
    assert len(found.documents) == 1
    assert any("without momentum" in remark for remark in found.remarks)


def adam_after(place: Path, **byproduct: Any) -> ExpandedRecipe:
    """Return a round by Adam after a release that stored one optimizer state."""
    kept = {"name": "mean", "digest": {"sha256": "mean"}, "annotations": {"stored": "kept/mean"}, **byproduct}
    write_provenance(released := release(place), byproducts=[kept])
    return client_round(
        {**DOCUMENT, "adam": {"rate": 0.01}},
        place,
        "profile",
        last_release=released,
        digest_of=lambda directory: directory.name,
        find_state=lambda stored: place / stored if (place / stored).is_dir() else None,
    )


def test_a_round_by_adam_is_plain_documents_that_name_what_was_kept(place: Path) -> None:
    (place / "kept/mean").mkdir(parents=True)
    documents = adam_after(place).documents
    assert [one.get("name", "") for one in documents] == ["round", "mean", "squares", ""]
    assert documents[1]["models"] == [{"model": "round"}, {"model": "kept/mean"}]
    assert documents[3]["models"] == [{"model": "mean"}, {"model": "squares"}]
    assert {one["base_model"] for one in documents} == {"releases/v1"}
    read = load_recipe(yaml.safe_dump_all([dict(one) for one in documents]))
    assert read.states == ("kept/mean", "mean", "squares")
    assert "kept/mean" not in map(str, read.merged_references())


@pytest.mark.parametrize(
    "byproduct",
    [{}, {"digest": {"sha256": "another"}}, {"annotations": {}}, {"digest": 3}],
    ids=["gone", "another", "nowhere", "nonsense"],
)
def test_where_what_was_kept_is_not_there_adam_begins_anew(place: Path, byproduct: Mapping[str, Any]) -> None:
    if byproduct:
        (place / "kept/mean").mkdir(parents=True)
    found = adam_after(place, **byproduct)
    assert [len(one["models"]) for one in found.documents[1:3]] == [1, 1]
    assert any("Adam starts again" in remark for remark in found.remarks)


def test_a_recipe_can_end_at_one_of_its_steps(place: Path) -> None:
    documents = round_of(place, adam={"rate": 0.01}).documents
    squares = load_recipe(yaml.safe_dump_all([dict(one) for one in documents])).ending_with("squares")
    assert [step.name for step in squares.steps] == ["round"]
    assert squares.states == ()


@pytest.mark.parametrize(
    "stored", ["../../etc", "optimizer/*/mean", f"merge/{'0' * 32}/mean", f"optimizer/{'0' * 32}/../mean", ""]
)
def test_a_provenance_can_only_refer_to_the_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stored: str) -> None:
    monkeypatch.setenv("MERGEGATE_HOME", str(tmp_path))
    (tmp_path / f"store/optimizer/{'0' * 32}/mean").mkdir(parents=True)
    assert find_optimizer_state(stored) is None
    assert find_optimizer_state(f"optimizer/{'0' * 32}/mean") is None  # without a manifest


# --- a whole project over rounds ---


def make_profile(project: Project, method: str, drop: float, **recipe: Any) -> str:
    source = {"base_model": "demo/models/base", "clients": [f"../clients-{method}/*"], "dtype": "bfloat16"}
    tasks = [{"task": f"demo/tasks/{it}.yaml", "guarded_by": "champion", "max_drop": drop} for it in TASKS]
    profile = {
        "name": f"rounds-{method}",
        "recipe": {"merge_method": method, **source, **recipe},
        "evaluate": {"tasks": tasks},
        "publish": {"to": "directory", "path": f"../releases/{method}"},
    }
    (project.root / f"profiles/{method}.yaml").write_text(yaml.safe_dump(profile))
    return f"profiles/{method}.yaml"


class Rounds:
    """Client rounds in a project. Honest clients train from the last release, and ``eve`` attacks."""

    def __init__(self, project: Project, method: str = "median", drop: float = 30, **recipe: Any) -> None:
        self.project, self.method = project, method
        self.profile = make_profile(project, method, drop, **recipe)
        self.clients = Clients(project.root / f"clients-{method}")
        self.begin = MODELS / "base"

    def train(self, reversed_times: float = 30) -> None:
        for client in HONEST:
            self.clients.train(client, self.begin)
        self.clients.turn("eve", self.begin, reversed_times)

    def run(self, codes: tuple[int, ...] = (0,)) -> str:
        """Run the round and return its output without line breaks."""
        result = self.project.mergegate("run", self.profile)
        assert result.exit_code in codes, result.output
        self.begin = self.latest.resolve()
        return " ".join(result.output.split())

    @property
    def latest(self) -> Path:
        return self.project.root / f"releases/{self.method}/latest"

    @property
    def predicate(self) -> dict[str, Any]:
        return dict(json.loads((self.begin / "provenance.json").read_text())["predicate"])

    @property
    def scores(self) -> dict[str, float]:
        return {one["task"]: one["merge_score"] for one in self.predicate["mergegate_verdict"]["guards"]}

    def require_nothing_new(self) -> None:
        stages = ("merge", "distances", "evaluate", "apply", "optimizer")
        before = {stage: self.project.artifacts(stage) for stage in stages}
        assert "nothing new" in self.run()
        assert {stage: self.project.artifacts(stage) for stage in stages} == before

    def require_reproducible(self) -> None:
        made = self.project.mergegate("reproduce", str(self.latest), "--parents", str(self.project.root / "profiles"))
        assert made.exit_code == 0, made.output

    def check(self) -> str:
        return " ".join(self.project.mergegate("check", self.profile).output.split())


LATE = "clients-median/ben: left out: the last round already includes"


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


@pytest.mark.proof
def test_rounds_by_adam_are_released_made_again_and_begin_anew_without_what_was_kept(project: Project) -> None:
    rounds, store = Rounds(project, leave_out_beyond=5, adam={"rate": 0.02}), project.home / "store"
    rounds.train()
    rounds.run()
    kept = rounds.predicate["runDetails"]["byproducts"]
    assert [one["name"] for one in kept] == ["mean", "squares"]
    rounds.train()
    assert "Adam continues" in rounds.run()
    inputs = {one["name"]: one for one in rounds.predicate["buildDefinition"]["resolvedDependencies"]}
    for one in kept:
        named = os.path.relpath(store / one["annotations"]["stored"], project.root / "profiles")
        assert inputs[named]["digest"] == one["digest"]
    # Optimizer states are not models and are never evaluated.
    lines = [line for file in (project.home / "runs").glob("*.jsonl") for line in file.read_text().splitlines()]
    noted = [json.loads(line) for line in lines if line]
    assert {one.get("subject") for one in noted if one.get("stage") == "evaluate"}.isdisjoint({"mean", "squares"})
    rounds.require_nothing_new()
    # Garbage collection keeps the inputs of the current release and the state that the next round needs.
    before = project.artifacts("optimizer")
    assert project.mergegate("store", "gc", "--older-than", "0").exit_code == 0
    assert project.artifacts("optimizer") == before
    rounds.require_reproducible()
    newest = rounds.predicate["runDetails"]["byproducts"][0]["annotations"]["stored"].split("/")[1]
    (store / "optimizer" / newest / "squares/model.safetensors").write_bytes(b"damaged")
    rounds.train()
    assert "Adam starts again" in rounds.run()
    shutil.rmtree(store / "optimizer")
    rounds.require_reproducible()  # the last round started Adam from scratch and needs no state
