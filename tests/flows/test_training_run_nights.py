"""Train the demo's run over three simulated nights, and release a merge of its last checkpoints after each."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import yaml
from demo_project import PROFILES, Project, make_project
from safetensors.torch import load_file

WINDOW, NIGHTS, EVERY = 8, 3, 5
PROFILE = "profiles/demo-training-run.yaml"


def train(directory: Path, checkpoints: int, *options: str) -> None:
    """Train until ``directory`` has a number of checkpoints."""
    script = PROFILES / "demo" / "train_run.py"
    arguments = [str(directory), "--checkpoints", str(checkpoints), "--every", str(EVERY), *options]
    done = subprocess.run([sys.executable, str(script), *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def weights(checkpoint: Path) -> bytes:
    return (checkpoint / "model.safetensors").read_bytes()


@dataclass(frozen=True)
class Night:
    """Output of the scheduled run, and the release that is published afterwards."""

    output: str
    release: Path


@dataclass(frozen=True)
class Nights:
    """A project after three nights, and the output of a run without new checkpoints."""

    project: Project
    nights: tuple[Night, ...]
    repeated: str

    @property
    def run(self) -> Path:
        return self.project.root / "runs" / "demo"


@pytest.fixture(scope="module")
def three_nights(tmp_path_factory: pytest.TempPathFactory, prefect_api: None) -> Nights:
    project = make_project(tmp_path_factory.mktemp("training-run"))
    nights, repeated = list[Night](), ""
    for night in range(1, NIGHTS + 1):
        train(project.root / "runs" / "demo", night * WINDOW)
        result = project.mergegate("run", PROFILE)
        assert result.exit_code == 0, result.output
        nights.append(Night(result.output, (project.root / "releases/demo-training-run/latest").resolve()))
        if night == 2:
            repeated = project.mergegate("run", PROFILE).output
    return Nights(project, tuple(nights), repeated)


@pytest.mark.story
@pytest.mark.proof
def test_each_night_releases_the_newest_checkpoints(three_nights: Nights) -> None:
    for number, night in enumerate(three_nights.nights):
        assert "released demo-training-run" in night.output
        recipe = yaml.safe_load((night.release / "recipe.yaml").read_text())
        steps = [EVERY * (number * WINDOW + index) for index in range(1, WINDOW + 1)]
        assert [Path(model["model"]).name for model in recipe["models"]] == [f"checkpoint-{step}" for step in steps]
    assert len({night.release for night in three_nights.nights}) == NIGHTS


@pytest.mark.story
@pytest.mark.proof
def test_a_night_without_new_checkpoints_publishes_nothing(three_nights: Nights) -> None:
    assert f"nothing new: {three_nights.nights[1].release.name} is released" in three_nights.repeated


@pytest.mark.story
@pytest.mark.proof
def test_later_nights_are_compared_with_the_release_of_the_night_before(three_nights: Nights) -> None:
    for number, night in enumerate(three_nights.nights):
        verdict = json.loads((night.release / "evidence" / "gate.json").read_text())["verdict"]
        references = {guard["reference"] for guard in verdict["guards"]}
        last = f"checkpoint-{EVERY * WINDOW * (number + 1)}"
        assert references == ({last} if number == 0 else {"champion", last})


@pytest.mark.story
@pytest.mark.proof
def test_a_release_is_the_mean_of_its_window(three_nights: Nights) -> None:
    """A linear decay over equal distances weights all checkpoints equally."""
    last = three_nights.nights[-1].release
    steps = [EVERY * ((NIGHTS - 1) * WINDOW + index) for index in range(1, WINDOW + 1)]
    parents = [load_file(three_nights.run / f"checkpoint-{step}" / "model.safetensors") for step in steps]
    for name, tensor in load_file(last / "model.safetensors").items():
        mean = sum(parent[name].double() for parent in parents) / WINDOW
        # Half a unit in the last place of bfloat16, and the rounding of float32 before it.
        assert ((tensor.double() - mean).abs() <= mean.abs() * (2.0**-8 + 2.0**-20) + 1e-38).all(), name


@pytest.mark.story
@pytest.mark.proof
def test_the_merge_predicts_held_out_text_better_than_the_last_checkpoint(three_nights: Nights) -> None:
    from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

    lines = (PROFILES / "demo" / "data" / "held-out.jsonl").read_text().splitlines()[:300]
    last = three_nights.run / f"checkpoint-{EVERY * WINDOW * NIGHTS}"
    tokenizer = PreTrainedTokenizerFast.from_pretrained(last)
    texts = [tokenizer.bos_token + json.loads(line)["text"] + tokenizer.eos_token for line in lines]

    @torch.no_grad()
    def log_likelihoods(checkpoint: Path) -> torch.Tensor:
        model = LlamaForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()
        values = []
        for text in texts:
            ids = tokenizer(text, add_special_tokens=False, return_tensors="pt").input_ids
            values.append(-model(input_ids=ids, labels=ids).loss)
        return torch.stack(values)

    gains = log_likelihoods(three_nights.nights[-1].release) - log_likelihoods(last)
    assert gains.mean() > 3 * gains.std() / len(gains) ** 0.5


@pytest.mark.story
@pytest.mark.proof
def test_every_release_of_the_run_can_be_verified(three_nights: Nights) -> None:
    for night in three_nights.nights:
        result = three_nights.project.mergegate("verify", str(night.release), "--verdict")
        assert result.exit_code == 0, result.output


@pytest.mark.story
def test_a_run_that_continues_has_the_checkpoints_of_one_that_did_not_stop(tmp_path: Path) -> None:
    train(tmp_path / "nights", 1)
    train(tmp_path / "nights", 2)
    train(tmp_path / "whole", 2)
    for step in (EVERY, 2 * EVERY):
        assert weights(tmp_path / "nights" / f"checkpoint-{step}") == weights(tmp_path / "whole" / f"checkpoint-{step}")


@pytest.mark.story
def test_a_decayed_run_ends_at_a_learning_rate_near_zero(tmp_path: Path) -> None:
    train(tmp_path, 5)
    train(tmp_path, 10, "--decay")
    state = json.loads((tmp_path / f"checkpoint-{10 * EVERY}" / "trainer_state.json").read_text())
    rates = {entry["step"]: entry["learning_rate"] for entry in state["log_history"]}
    assert rates[5 * EVERY] == 1e-3
    assert rates[10 * EVERY] == pytest.approx(1e-3 / (5 * EVERY))
