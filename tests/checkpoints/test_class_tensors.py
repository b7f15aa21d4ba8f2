"""The class of a model, built without weights, shows which stored tensors are missing, damaged or without effect."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
import transformers
from samples import sampled
from tiny_families import FAMILIES, make

from mergegate.merge_core import open_checkpoint
from mergegate.merge_core.architecture import is_optional
from mergegate.merge_core.errors import InvalidInput
from mergegate.tasks.models.checkpoints.class_tensors import Differences, Table, build_class, compare_with_classes

BY_NAME = {family.name: family for family in FAMILIES}


def table(directory: Path) -> tuple[str, Table]:
    checkpoint = open_checkpoint(directory)
    rows = ((tensor.name, tensor.dtype.torch_name, tensor.shape) for tensor in checkpoint.tensors.values())
    return json.dumps(dict(checkpoint.config)), tuple(rows)


def differences(config: str, rows: Table) -> Differences:
    return build_class(config, rows, lambda done, total: None)


@pytest.mark.story
@pytest.mark.parametrize("name", sampled(BY_NAME, ["llama", "mixtral", "gemma3, vision"], pytest.mark.proof))
def test_every_missing_or_repeated_tensor_of_a_family_is_found(name: str, tmp_path: Path) -> None:
    transformers.utils.logging.set_verbosity_error()  # Other code in the model process may do this too.
    config, rows = table(make(BY_NAME[name], tmp_path / "model", 0))
    assert differences(config, rows) == Differences()
    draw = random.Random(name)
    for row in draw.sample([row for row in rows if row[2] and not is_optional(row[0])], 4):
        others = tuple(other for other in rows if other != row)
        without = differences(config, others)
        assert without.missing or without.unjoined or without.shapes, row[0]
        repeated = differences(config, (*others, (row[0], row[1], (8 * row[2][0], *row[2][1:]))))
        assert repeated.shapes or repeated.unjoined, row[0]
    extra = differences(config, (*rows, ("an.extra.weight", "float32", (2,))))
    assert extra == Differences(ignored=("an.extra.weight",))


@pytest.mark.usefixtures("home")
def test_models_of_one_configuration_and_table_share_an_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A failure of the process, or an answer of another shape, is reported and asked again."""
    model = open_checkpoint(make(BY_NAME["llama"], tmp_path / "model", 0))
    failure = InvalidInput("classes", found="no memory", expected="an answer", remedy="free memory")
    answers = iter([failure, "?", Differences(reason="no timm"), Differences(ignored=("x",))])

    def answer(*call: object, **options: object) -> object:
        if isinstance(given := next(answers), InvalidInput):
            raise given
        return given

    monkeypatch.setattr("mergegate.tasks.models.checkpoints.class_tensors.call_model_process", answer)
    question = (model.config, model.tensors.values())
    found = [compare_with_classes([question, question]) for _ in range(5)]
    reasons = ["no memory", "the process returned no result", "no timm", "", ""]
    assert [[each.reason for each in pair] for pair in found] == [[reason] * 2 for reason in reasons]
    assert found[3] == found[4] == [Differences(ignored=("x",))] * 2
