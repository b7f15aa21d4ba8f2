"""Findings with one cause are reported together, and none is lost."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mergegate.merge_core.errors import (
    Finding,
    InvalidInput,
    Refused,
    finding_of,
    group_findings,
    pip_command,
    suggest,
    worst_first,
)

TEXTS = st.sampled_from(["", "a: x", "a: y", "b: x", "size"])
FINDINGS = st.lists(
    st.builds(Finding, st.sampled_from(["block", "warn", "info"]), TEXTS, TEXTS, TEXTS, TEXTS, cause=TEXTS), max_size=12
)


@settings(max_examples=40)
@given(FINDINGS)
def test_each_finding_is_in_one_group_led_by_its_most_severe(findings: list[Finding]) -> None:
    groups = group_findings(findings)
    members = [one for group in groups for one in (group.first, *group.others)]
    assert sorted(members, key=repr) == sorted(worst_first(findings), key=repr)
    for group in groups:
        assert worst_first((group.first, *group.others))[0] == group.first
        assert len({one.cause for one in (group.first, *group.others)}) == 1


def test_findings_with_one_cause_are_counted() -> None:
    cause = Finding("block", "big: config.json", "30 layers against 3", cause="big: size")
    tensors = [Finding("block", f"big: layers.{n}.weight", "no such tensor", cause="big: size") for n in range(270)]
    (group,) = group_findings([cause, *tensors])
    assert group.first == cause
    assert group.others_line() == ("and 270 more with this cause: layers.0.weight, layers.1.weight, layers.2.weight, …")


def test_equal_findings_about_two_models_are_separate_groups() -> None:
    assert len(group_findings([Finding("block", f"{model}: config.json", "none") for model in ("a", "b")])) == 2


def test_a_finding_becomes_the_error_that_it_was_created_from() -> None:
    for kind in (InvalidInput, Refused):
        error = kind("here", found="this", expected="that", remedy="so")
        assert type(finding_of(error).refusal()) is kind
        assert str(finding_of(error).refusal()) == str(error)


def test_a_cause_is_not_part_of_a_key() -> None:
    one, other = (Finding("block", "a", "b", cause=cause) for cause in ("", "size"))
    assert one.content_key() == other.content_key()


@pytest.mark.parametrize(
    ("receipt", "start"),
    [
        ("", "pip install"),
        ("uv-receipt.toml", 'uv pip install --python "$(uv tool dir)/mergegate"'),
        ("pipx_metadata.json", "pipx runpip mergegate install"),
    ],
)
def test_the_command_for_an_extra_reaches_the_environment_of_mergegate(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, receipt: str, start: str
) -> None:
    environment = tmp_path / "mergegate"
    environment.mkdir()
    if receipt:
        (environment / receipt).touch()
    monkeypatch.setattr(sys, "prefix", str(environment))
    assert pip_command("mergegate[ifeval]", "six") == f"{start} 'mergegate[ifeval]' six"


@given(st.text(max_size=8), st.lists(st.text("abcde", min_size=1, max_size=6), max_size=4))
def test_a_suggestion_names_one_or_all_names_and_is_empty_without_names(word: str, names: list[str]) -> None:
    assert suggest(word, iter(())) == ""
    closest = {f"did you mean {name!r}?" for name in names}
    every = {f"choose one of {', '.join(sorted(names))}"} if names else {""}
    assert suggest(word, iter(names)) in closest | every
    assert all(suggest(name, names) == f"did you mean {name!r}?" for name in names)
