"""Static checks before a server starts: each broken variant fails with a specific reason."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from variants import EMBEDDING, Q_PROJ, STATIC, with_config, with_tensors

from mergegate.merge_core.checkpoint.checkpoint import open_checkpoint
from mergegate.tasks.quality.serve.static_checks import check_finite, check_tensors, check_vocabulary, static_checks

torch.set_num_threads(1)


@pytest.mark.story
def test_a_good_checkpoint_passes_every_check(checkpoint: Path) -> None:
    checks = static_checks(open_checkpoint(checkpoint), must_chat=True)
    assert [check.outcome for check in checks] == ["pass"] * 3
    assert checks[0].seen == "29 tensors"


@pytest.mark.parametrize("variant", STATIC)
def test_a_broken_checkpoint_is_refused_with_its_own_reason(checkpoint: Path, variant: str) -> None:
    breaks, name, seen = STATIC[variant]
    breaks(checkpoint)
    checks = static_checks(open_checkpoint(checkpoint), must_chat=True)
    (failure,) = [check for check in checks if check.outcome == "fail"]
    assert failure.name == name
    assert seen in failure.seen
    assert all((failure.where, failure.expected, failure.remedy))
    assert variant != "missing tensor" or failure.where == Q_PROJ
    if variant == "no chat template":  # It is not required of a model that need not chat.
        checks = static_checks(open_checkpoint(checkpoint), must_chat=None)
        assert {check.outcome for check in checks} == {"pass"}


def test_an_unknown_architecture_cannot_be_checked_and_a_configuration_of_no_model_is_refused(checkpoint: Path) -> None:
    with_config(checkpoint, architectures=["OurOwnForCausalLM"])
    assert [check.outcome for check in check_tensors(open_checkpoint(checkpoint))] == ["not offered"]
    with_config(checkpoint, model_type="no_such_model")
    (check,) = check_tensors(open_checkpoint(checkpoint))
    assert check.outcome == "fail"
    assert check.where.endswith("config.json")


def test_an_end_of_sequence_without_a_row_and_a_missing_tokenizer_are_refused(checkpoint: Path) -> None:
    with_config(checkpoint, "generation_config.json", eos_token_id=[2, 99])
    check = check_vocabulary(open_checkpoint(checkpoint))
    assert check.outcome == "fail"
    assert check.where.endswith("generation_config.json")
    assert "eos_token_id is 99" in check.seen
    (checkpoint / "tokenizer.json").unlink()
    assert check_vocabulary(open_checkpoint(checkpoint)).outcome == "fail"


@pytest.mark.parametrize(
    "dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2]
)
def test_one_non_finite_number_is_found_in_every_format(checkpoint: Path, dtype: torch.dtype) -> None:
    healthy = torch.linspace(-400, 400, 1000).to(dtype)
    # One format has no infinity.
    for value in (0.0, torch.nan, *(() if dtype == torch.float8_e4m3fn else (torch.inf, -torch.inf))):
        content = healthy.float()
        content[700] = value
        save_file({EMBEDDING: content.to(dtype), "count": torch.arange(3)}, checkpoint / "model.safetensors")
        check = check_finite(open_checkpoint(checkpoint))
        assert check.outcome == ("pass" if value == 0 else "fail")
        assert value == 0 or (check.where == EMBEDDING and "1 of 1,000" in check.seen)


def test_a_tensor_of_infinities_only_is_a_constant(checkpoint: Path) -> None:
    for bound in (torch.tensor(torch.inf), torch.tensor([-torch.inf] * 2000)):
        save_file({EMBEDDING: torch.ones(9), "input_max": bound}, checkpoint / "model.safetensors")
        assert check_finite(open_checkpoint(checkpoint)).outcome == "pass"
    for damaged in (torch.tensor(torch.nan), torch.tensor([torch.nan, torch.inf])):
        save_file({EMBEDDING: torch.ones(9), "input_max": damaged}, checkpoint / "model.safetensors")
        assert check_finite(open_checkpoint(checkpoint)).where == "input_max"


def test_weights_are_checked_to_the_last_one(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mergegate.tasks.quality.serve.static_checks._BLOCK", 96)
    with_tensors(checkpoint, lambda tensors: tensors[Q_PROJ].view(-1)[-1].fill_(torch.inf))
    assert check_finite(open_checkpoint(checkpoint)).where == Q_PROJ
