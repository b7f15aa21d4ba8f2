"""YAML is read strictly and written on one line, and findings with one cause are reported together."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mergegate.merge_core import errors
from mergegate.merge_core.parsing import flow_yaml, parse_yaml

TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=150)
# A mixture of strings that YAML can misread.
ODD = st.lists(
    st.sampled_from(
        ["no", "~", "1e3", ".5", "0x1", "2024-01-01", "<<", "=", "&", "*", "!", "- ", ": ", " #", "\n", ","]
    ),
    max_size=4,
).map("".join)
SCALARS = st.none() | st.booleans() | st.integers(-(10**30), 10**30) | st.floats(allow_nan=False) | TEXT | ODD
VALUES: st.SearchStrategy[Any] = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT | ODD, inner, max_size=3), max_leaves=8
)


@settings(max_examples=50)
@given(value=VALUES)
def test_flow_yaml_writes_one_line_that_parses_to_the_same_value(value: Any) -> None:
    line = flow_yaml(value)
    assert len(line.splitlines()) <= 1
    (read,) = parse_yaml(f"key: {line}\nother: {{inner: {line}, list: [{line}]}}\n", "a line")
    assert read == {"key": value, "other": {"inner": value, "list": [value]}}
    assert str(read["key"]) == str(value)  # Equal numbers of different types are different values.


@pytest.mark.parametrize(
    ("value", "line"),
    [
        ({"merge_method": "ties", "density": 0.3}, "{merge_method: ties, density: 0.3}"),
        ({"models": [{"model": "./a b"}, {"model": "acme/x"}]}, "{models: [{model: ./a b}, {model: acme/x}]}"),
        ("alice: it's ours", '"alice: it\'s ours"'),
        ("1e3", '"1e3"'),  # YAML 1.2 reads this as a number.
        ("held out.jsonl", "held out.jsonl"),
    ],
)
def test_flow_yaml_quotes_only_when_necessary(value: object, line: str) -> None:
    assert flow_yaml(value) == line


# A mapping that ``<<`` refers to has a ``<<`` itself, and each level overrides a key.
CHAIN = "base: &B {x: 0, y: 1}\nouter: {a: &A {<<: *B, x: 1}}\nc: {<<: *A, y: 2}\n"


def anchors_used_first_and_last(text: str) -> list[str]:
    """Return ``text`` in versions that construct its mappings in different orders, with short and long keys."""
    texts = [
        text, f"first: [{{z: 1}}]\n{text}", f"{text}e: [*A, *B, {{<<: *A}}]\n", f"{text}e: {{f: {{<<: *A, x: 7}}}}\n",
    ]  # fmt: skip
    return [*texts, *(text.replace("x:", "weight:").replace("y:", "density:") for text in texts)]


@pytest.mark.parametrize("text", anchors_used_first_and_last(CHAIN))
def test_a_key_may_override_a_merged_key_at_any_level(text: str) -> None:
    (read,) = parse_yaml(text, "a text")
    x, y = read["base"]
    assert (read["base"], read["outer"]["a"], read["c"]) == ({x: 0, y: 1}, {x: 1, y: 1}, {x: 1, y: 2})


@pytest.mark.parametrize("text", anchors_used_first_and_last(CHAIN.replace("x: 1", "x: 1, x: 4")))
def test_a_duplicate_key_in_a_merged_mapping_is_reported_once(text: str) -> None:
    with pytest.raises(errors.InvalidInput, match="appears twice") as caught:
        parse_yaml(text, "a text")
    assert len(errors.findings_of(caught.value)) == 1


MAPPINGS = st.lists(st.dictionaries(st.sampled_from(["x", "weight", "y", "density"]), st.integers(0, 9)), max_size=4)


@settings(max_examples=40)
@given(MAPPINGS, st.dictionaries(st.sampled_from(["x", "weight", "z"]), st.integers(10, 19)), st.booleans())
def test_own_keys_come_before_merged_ones_and_earlier_mappings_before_later_ones(
    mappings: list[dict[str, int]], own: dict[str, int], merge_last: bool
) -> None:
    entries = [f"<<: {flow_yaml(mappings)}", *(f"{key}: {value}" for key, value in own.items())]
    (read,) = parse_yaml("\n".join(reversed(entries) if merge_last else entries), "a text")
    expected: dict[str, int] = {}
    for mapping in (own, *mappings):
        expected = {**mapping, **expected}
    assert read == expected


@pytest.mark.parametrize("value", ["text", "[1]", "3", "[{a: 1}, 2]", "null"])
def test_only_mappings_are_merged(value: str) -> None:
    with pytest.raises(errors.InvalidInput, match=r"line 2, column.*needs a mapping"):
        parse_yaml(f"a: 1\n<<: {value}", "a text")


WORDS = st.sampled_from(["", "a: x", "a: y", "b: x", "size"])
FINDINGS = st.lists(
    st.builds(errors.Finding, st.sampled_from(["block", "warn", "info"]), WORDS, WORDS, WORDS, WORDS, cause=WORDS),
    max_size=12,
)


@settings(max_examples=40)
@given(FINDINGS)
def test_each_finding_is_in_one_group_led_by_its_most_severe(findings: list[errors.Finding]) -> None:
    groups = errors.group_findings(findings)
    members = [one for group in groups for one in (group.first, *group.others)]
    assert sorted(members, key=repr) == sorted(errors.worst_first(findings), key=repr)
    for group in groups:
        assert errors.worst_first((group.first, *group.others))[0] == group.first
        assert len({one.cause for one in (group.first, *group.others)}) == 1


def test_findings_with_one_cause_are_counted() -> None:
    cause = errors.Finding("block", "big: config.json", "30 layers against 3", cause="big: size")
    tensors = [
        errors.Finding("block", f"big: layers.{n}.weight", "no such tensor", cause="big: size") for n in range(270)
    ]
    (group,) = errors.group_findings([cause, *tensors])
    assert group.first == cause
    assert group.others_line() == ("and 270 more with this cause: layers.0.weight, layers.1.weight, layers.2.weight, …")


def test_equal_findings_about_two_models_are_separate_groups() -> None:
    assert (
        len(errors.group_findings([errors.Finding("block", f"{model}: config.json", "none") for model in ("a", "b")]))
        == 2
    )


def test_a_finding_becomes_the_error_that_it_was_created_from() -> None:
    for kind in (errors.InvalidInput, errors.Refused):
        error = kind("here", found="this", expected="that", remedy="so")
        assert type(errors.finding_of(error).refusal()) is kind
        assert str(errors.finding_of(error).refusal()) == str(error)


def test_a_cause_is_not_part_of_a_key() -> None:
    one, other = (errors.Finding("block", "a", "b", cause=cause) for cause in ("", "size"))
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
    assert errors.pip_command("mergegate[ifeval]", "six") == f"{start} 'mergegate[ifeval]' six"


@pytest.mark.parametrize("files", [(), ("Makefile",), ("gguf-constraints.txt",), ("Makefile", "gguf-constraints.txt")])
def test_a_remedy_names_a_make_target_only_in_a_clone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, files: tuple[str, ...]
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in files:
        Path(name).touch()
    command = errors.environment_command(Path(".venv-gguf/bin/python"), "gguf-env", "llama-cpp", "six<2")
    installed = "python3 -m venv .venv-gguf && .venv-gguf/bin/pip install llama-cpp 'six<2'"
    assert command == ("make gguf-env" if len(files) == 2 else installed)


@given(st.text(max_size=8), st.lists(st.text("abcde", min_size=1, max_size=6), max_size=4))
def test_a_suggestion_names_one_or_all_names_and_is_empty_without_names(word: str, names: list[str]) -> None:
    assert errors.suggest(word, iter(())) == ""
    closest = {f"did you mean {name!r}?" for name in names}
    every = {f"choose one of {', '.join(sorted(names))}"} if names else {""}
    assert errors.suggest(word, iter(names)) in closest | every
    assert all(errors.suggest(name, names) == f"did you mean {name!r}?" for name in names)
