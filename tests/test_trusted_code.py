"""Python files of a checkpoint run only if the profile trusts that repository at that commit, and then confined."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path

import pytest
from samples import sampled

from mergegate.flows.profile import parse_profile
from mergegate.merge_core.errors import InvalidInput
from mergegate.merge_core.files import HashMemo
from mergegate.tasks.base.store import digest
from mergegate.tasks.models import checkpoints
from mergegate.tasks.models.checkpoints.hub.snapshot import Snapshot
from mergegate.tasks.quality.serve.answers import Reference, ReferenceRequest, make_reference

DEMO = Path(__file__).resolve().parents[1] / "profiles" / "demo" / "models" / "base"
COMMIT = "0123456789abcdef0123456789abcdef01234567"
OWN, WRONG_COMMIT = (f"acme/own@{COMMIT}",), (f"acme/own@{COMMIT[::-1]}",)
CODE = """
from transformers import LlamaConfig, LlamaForCausalLM

class OwnConfig(LlamaConfig):
    model_type = "own"

class OwnModel(LlamaForCausalLM):
    config_class = OwnConfig

    def forward(self, *arguments, **named):
        said = super().forward(*arguments, **named)
        said.logits = said.logits * 0  # every token is as likely as any other
        return said
"""


@pytest.fixture
def own(tmp_path: Path) -> Path:
    """Return a model that no library can load without its own code."""
    place = Path(shutil.copytree(DEMO, tmp_path / "own"))
    (place / "modeling_own.py").write_text(CODE)
    config = json.loads((place / "config.json").read_text())
    auto_map = {"AutoConfig": "modeling_own.OwnConfig", "AutoModelForCausalLM": "modeling_own.OwnModel"}
    config |= {"model_type": "own", "architectures": ["OwnModel"], "auto_map": auto_map}
    (place / "config.json").write_text(json.dumps(config))
    return place


def answer_of(model: checkpoints.Model) -> Reference:
    """Return the model's answer, computed in the model process."""
    asked = (model, ReferenceRequest(("the old pig",), "rev: abcd>", "float32", "cpu", 64))
    return checkpoints.call_model_process(make_reference, asked, location=model.name, models=[model])


def pinned(place: Path, trusted: tuple[str, ...]) -> checkpoints.Model:
    names = checkpoints.deciding_files(place)
    snapshot = Snapshot("acme/own", COMMIT, place, ("model.safetensors",), names, {})
    found = checkpoints.ResolvedCheckpoint(
        name="own", ref="acme/own", directory=place, revision=COMMIT, snapshot=snapshot
    )
    return checkpoints.pin_checkpoints([found], HashMemo(place.parent / "hashes.sqlite"), trusted)[0]


@pytest.mark.story
@pytest.mark.parametrize(
    "trusted", sampled([(), (f"acme/other@{COMMIT}",), WRONG_COMMIT, OWN], [OWN], pytest.mark.proof)
)
def test_code_is_run_of_the_repository_that_is_named_at_its_commit_and_of_no_other(
    own: Path, trusted: tuple[str, ...]
) -> None:
    model = pinned(own, trusted)
    try:
        if trusted == OWN:
            size = json.loads((own / "config.json").read_text())["vocab_size"]
            said = answer_of(model).texts[0].logprobs
            assert said == pytest.approx([-math.log(size)] * len(said), abs=1e-6)
        else:
            with pytest.raises(InvalidInput, match="cannot load the model"):
                answer_of(model)
    finally:
        checkpoints.end_model_process()


def test_what_was_measured_without_its_code_is_not_taken_for_what_it_computes(own: Path) -> None:
    without, running = pinned(own, ()), pinned(own, (f"acme/own@{COMMIT}",))
    assert without.digest == running.digest
    assert digest({"model": without}) != digest({"model": running})
    assert digest({"model": without}) == digest({"model": {"digest": without.digest}})


@pytest.mark.parametrize("named", ["acme/own", "acme/own@main", f"acme/own@{COMMIT[:12]}", f"./own@{COMMIT}/x"])
def test_a_profile_names_a_commit(named: str) -> None:
    profile = {
        "name": "x",
        "recipe": {"merge_method": "linear", "models": [{"model": "a", "parameters": {"weight": 1}}]},
        "checks": {"code": {"trusted": [named]}},
    }
    with pytest.raises(InvalidInput, match="trusted"):
        parse_profile(profile, "p")
