"""For every mixture-of-experts family, inputs and importance are measured for each expert matrix.

This holds for every way in which a family computes its experts.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from tiny_families import FAMILIES

from mergegate.merge_core.architecture.experts import split_experts
from mergegate.merge_core.checkpoint import open_checkpoint, open_importance, open_moments
from mergegate.merge_core.files import HashMemo, JournalLocation
from mergegate.merge_core.recipe import CalibrationReading
from mergegate.tasks.checkpoints.model import Model
from mergegate.tasks.merge.calibration import CalibrationJob
from mergegate.tasks.merge.gradient_statistics import read_gradients
from mergegate.tasks.merge.input_statistics import read_inputs
from mergegate.tasks.perplexity import TextSetting, pin_text

TOKENIZER = Path(__file__).resolve().parents[2] / "profiles/demo/models/base"
MIXTURES = {
    one.name: one
    for one in FAMILIES
    if one.auto == "AutoModelForCausalLM" and one.listed and "experts" in str(one.settings)
}


@pytest.mark.story
@pytest.mark.parametrize("name", MIXTURES)
def test_distances_cover_every_expert_of_a_mixture(tmp_path: Path, name: str) -> None:
    torch.manual_seed(0)
    network = MIXTURES[name].loader.from_config(MIXTURES[name].config())
    for parameter in network.parameters():
        if parameter.ndim > 1:
            torch.nn.init.normal_(parameter, std=0.2)
    place = tmp_path / "model"
    network.save_pretrained(place)
    for file in ("tokenizer.json", "tokenizer_config.json"):
        (place / file).write_bytes((TOKENIZER / file).read_bytes())
    (tmp_path / "text.jsonl").write_text(
        "".join(json.dumps({"text": one}) + "\n" for one in ("rev: abcd>dcba", "a hen."))
    )
    text = pin_text(tmp_path / "text.jsonl", "text", HashMemo(tmp_path / "hashes.db"), TextSetting("the text"))
    model = Model(name=name, digest=name, directory=place)
    unseen = []
    for read in (read_inputs, read_gradients):
        out = tmp_path / read.__name__
        out.mkdir()
        journal = JournalLocation(tmp_path / f"{read.__name__}.journal", name)
        job = CalibrationJob(model, text, CalibrationReading(), "float32", "cpu", out, journal)
        told = read(job, lambda done, total: None)
        unseen += told.unseen
    assert unseen == []
    tensors = split_experts(open_checkpoint(place)).tensors
    routed = {name for name, one in tensors.items() if ".experts." in name and len(one.shape) == 2}
    assert routed
    assert routed <= open_moments(tmp_path / "read_inputs").keys()
    assert routed <= open_importance(tmp_path / "read_gradients").keys()
