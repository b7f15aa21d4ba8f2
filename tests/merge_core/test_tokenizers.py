"""Tokenizers are compared part by part, and a part that changes ids is named. The oracle is the tokenizers library."""

from __future__ import annotations

import copy
import itertools
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from family import LINEAR, check_recipe
from tokenizer_samples import (
    TEXTS,
    byte_level,
    content_of,
    flags,
    sentence_pieces,
    unigram,
    word_pieces,
    write_tokenizer,
)
from tokenizers import Tokenizer

from mergegate.merge_core import Finding
from mergegate.merge_core.checkpoint.vocabulary import read_tokenizer
from mergegate.merge_core.errors import InvalidInput

KINDS: dict[str, Callable[[], Tokenizer]] = {
    "byte-level": byte_level, "sentence-pieces": sentence_pieces, "unigram": unigram, "word-pieces": word_pieces,
}  # fmt: skip

Path_ = tuple[Any, ...]


def compared(root: Path, first: dict[str, Any], other: dict[str, Any], *accepted: str) -> tuple[Finding, ...]:
    write_tokenizer(root / "a", first)
    write_tokenizer(root / "b", other)
    return check_recipe(LINEAR, root, *accepted).findings


def places(findings: tuple[Finding, ...]) -> list[tuple[str, str]]:
    return [(finding.severity, finding.where) for finding in findings]


def ids(content: dict[str, Any]) -> list[list[int]] | None:
    """Return the ids that the library gives the texts, or None if it rejects the file."""
    try:
        tokenizer = Tokenizer.from_str(json.dumps(content))
        return [tokenizer.encode(text).ids for text in TEXTS]
    except BaseException:  # A panic in Rust is not an Exception.
        return None


def leaves(value: Any, path: Path_ = ()) -> Iterator[Path_]:
    """Yield the paths of all values in the file, with only some entries of long lists and dictionaries."""
    if isinstance(value, dict):
        keys = list(value)
        for key in keys if len(keys) < 40 else [keys[0], keys[60], keys[len(keys) // 2], keys[-1]]:
            yield from leaves(value[key], (*path, key))
    elif isinstance(value, list):
        for place in sorted({0, len(value) // 2, len(value) - 1} if value else ()):
            yield from leaves(value[place], (*path, place))
    yield path


def changed(value: Any) -> Iterator[Any]:
    """Yield other values for the same path."""
    if isinstance(value, bool):
        yield not value
    elif isinstance(value, int):
        yield value + 1
    elif isinstance(value, float):
        yield value + 3.0
    elif isinstance(value, str):
        yield value + "e"
    elif value is None:
        yield from (True, {"type": "Lowercase"}, {"type": "Whitespace"}, "e", 0.5)
    elif isinstance(value, list) and len(value) > 1:
        yield value[::-1]
        yield value[:-1]
        yield value[1:]
    elif isinstance(value, dict):
        yield None


def mutations(content: dict[str, Any]) -> Iterator[tuple[Path_, dict[str, Any]]]:
    for path in leaves(content):
        if not path:
            continue
        holder = content
        for step in path[:-1]:
            holder = holder[step]
        for new in changed(holder[path[-1]]):
            mutated = copy.deepcopy(content)
            place = mutated
            for step in path[:-1]:
                place = place[step]
            place[path[-1]] = new
            yield path, mutated


SWITCHES = [
    ("model", "byte_fallback", True), ("model", "ignore_merges", True), ("model", "fuse_unk", True),
    ("model", "dropout", 0.9), ("model", "unk_token", "e"), ("model", "continuing_subword_prefix", "##"),
    ("model", "end_of_word_suffix", "e"),
]  # fmt: skip


@pytest.mark.story
@pytest.mark.parametrize("kind", KINDS)
def test_every_tokenizer_difference_that_changes_ids_is_reported(kind: str, pair: Path) -> None:
    content = content_of(KINDS[kind]())
    expected = ids(content)
    assert compared(pair, content, content) == ()
    cases = list(mutations(content))
    cases += [((part, key), {**content, part: {**content[part], key: new}}) for part, key, new in SWITCHES]
    tried = other = 0
    for path, mutated in cases:
        found = ids(mutated)
        if found is None:
            continue
        tried += 1
        if found != expected:
            other += 1
            named = compared(pair, content, mutated)
            assert any(finding.where.startswith("b: tokenizer.json") for finding in named), path
            if path[0] not in ("padding", "truncation"):
                assert any(finding.severity == "block" for finding in named), (path, named)
    assert tried > 20
    assert other > 5


def test_an_empty_sequence_equals_no_step(pair: Path) -> None:
    content = {**content_of(byte_level()), "normalizer": None}
    assert compared(pair, content, {**content, "normalizer": {"type": "Sequence", "normalizers": []}}) == ()


def sequence_of_one(content: dict[str, Any]) -> dict[str, Any]:
    return {**content, "pre_tokenizer": {"type": "Sequence", "pretokenizers": [content["pre_tokenizer"]]}}


def merges_as_text(content: dict[str, Any]) -> dict[str, Any]:
    return {**content, "model": {**content["model"], "merges": [" ".join(one) for one in content["model"]["merges"]]}}


def without_defaults(content: dict[str, Any]) -> dict[str, Any]:
    kept = {"type", "vocab", "merges"}
    model = {key: value for key, value in content["model"].items() if key in kept}
    step = {key: value for key, value in content["pre_tokenizer"].items() if key != "use_regex"}
    return {**content, "model": model, "pre_tokenizer": step}


@pytest.mark.parametrize("spelling", [sequence_of_one, merges_as_text, without_defaults])
def test_equivalent_spellings_are_not_a_difference(
    spelling: Callable[[dict[str, Any]], dict[str, Any]], pair: Path
) -> None:
    content = content_of(byte_level())
    other = spelling(content)
    assert ids(other) == ids(content)
    assert compared(pair, content, other) == ()


def exchanged(content: dict[str, Any]) -> dict[str, Any]:
    merges = content["model"]["merges"]
    return {**content, "model": {**content["model"], "merges": [*reversed(merges[:10]), *merges[10:]]}}


@pytest.mark.parametrize(
    ("change", "key"),
    [
        (exchanged, "merges"),
        (lambda one: {**one, "normalizer": {"type": "Lowercase"}}, "normalizer"),
        (lambda one: {**one, "pre_tokenizer": {**one["pre_tokenizer"], "add_prefix_space": True}}, "pre_tokenizer"),
        (lambda one: {**one, "post_processor": None}, "post_processor"),
    ],
)
def test_different_segmentation_blocks_unless_it_is_accepted(
    change: Callable[[dict[str, Any]], dict[str, Any]], key: str, pair: Path
) -> None:
    content = content_of(byte_level())
    found = compared(pair, content, change(content))
    assert places(found) == [("block", f"b: tokenizer.json: {key}")]
    assert f"accepted: [{key}]" in found[0].remedy
    assert [one.severity for one in compared(pair, content, change(content), key)] == ["info"]


PADDING = {"strategy": {"Fixed": 8}, "direction": "Right", "pad_to_multiple_of": None, "pad_id": 0, "pad_type_id": 0}


@pytest.mark.parametrize(
    ("key", "value"), [("padding", {**PADDING, "pad_token": "<s>"}), ("decoder", {"type": "Fuse"})]
)
def test_a_difference_that_changes_no_id_is_a_warning(pair: Path, key: str, value: dict[str, Any]) -> None:
    content = content_of(byte_level())
    assert places(compared(pair, content, {**content, key: value})) == [("warn", f"b: tokenizer.json: {key}")]


def test_special_tokens_of_the_settings_are_compared(pair: Path) -> None:
    content = content_of(byte_level())
    assert compared(pair, content, content) == ()
    write_tokenizer(pair / "a", content, eos_token="</s>", add_bos_token=True)
    write_tokenizer(pair / "b", content, eos_token={"content": "<|x|>"}, add_bos_token=False)
    assert places(check_recipe(LINEAR, pair).findings) == [
        ("block", "b: tokenizer_config.json: add_bos_token"),
        ("warn", "b: tokenizer_config.json: eos_token"),
    ]


@pytest.mark.parametrize(
    "added", [[("X", 3), ("Y", 5)], [("Y", 4), ("X", 3)], [("b", 9), ("X", 3)], [("", 3), ("X", 4)]]
)
@pytest.mark.parametrize("vocab", [{"u": 0, "a": 1, "b": 2}, {"u": 0, "a": 1, "b": 7}])
def test_ids_are_those_that_the_library_assigns(
    tmp_path: Path, vocab: dict[str, int], added: list[tuple[str, int]]
) -> None:
    entries = [{"id": number, "content": token, **flags()} for token, number in added]
    model = {"type": "WordLevel", "vocab": vocab, "unk_token": "u"}
    content: dict[str, Any] = {"version": "1.0", "added_tokens": entries, "model": model}
    content |= dict.fromkeys(("truncation", "padding", "normalizer", "pre_tokenizer", "post_processor", "decoder"))
    write_tokenizer(tmp_path, content)
    definition = read_tokenizer(tmp_path)
    assert definition is not None
    library = Tokenizer.from_str(json.dumps(content))
    assert definition.ids == library.get_vocab(with_added_tokens=True)
    assert set(definition.misnumbered) == {
        token for token, number in added if token and library.token_to_id(token) != number
    }


WORDS = {"type": "WordLevel", "vocab": {"u": 0}}
# Places of ids, as a function from an id to files.
PLACES: dict[str, Callable[[object], dict[str, Any]]] = {
    "vocabulary": lambda number: {"tokenizer.json": {"model": {**WORDS, "vocab": {"u": 0, "a": number}}}},
    "added token": lambda number: {
        "tokenizer.json": {"model": WORDS, "added_tokens": [{"content": "X", "id": number}]},
    },
    "older vocabulary": lambda number: {"vocab.json": {"u": 0, "a": number}},
    "older added token": lambda number: {"vocab.json": {"u": 0}, "added_tokens.json": {"X": number}},
    "setting": lambda number: {
        "vocab.json": {"u": 0}, "tokenizer_config.json": {"added_tokens_decoder": {str(number): {"content": "X"}}},
    },
}  # fmt: skip


def write_files(directory: Path, files: dict[str, Any]) -> None:
    for name, content in files.items():
        (directory / name).write_text(json.dumps(content))


@pytest.mark.parametrize(
    ("place", "number"),
    [
        *((place, -1) for place in PLACES if place != "setting"),  # A key that is not a number is ignored.
        *itertools.product(PLACES, [1 << 24, 4_000_000_000, (1 << 63) - 1, 1 << 63, 10**20]),
    ],
)
def test_an_id_that_no_vocabulary_has_is_refused(tmp_path: Path, place: str, number: int) -> None:
    write_files(tmp_path, PLACES[place](number))
    with pytest.raises(InvalidInput, match="whole numbers from 0 to 16777215"):
        read_tokenizer(tmp_path)


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("number", [1, 300_000, (1 << 24) - 1])
def test_a_gap_in_the_ids_is_accepted(tmp_path: Path, place: str, number: int) -> None:
    write_files(tmp_path, PLACES[place](number))
    definition = read_tokenizer(tmp_path)
    assert definition is not None
    assert len(definition.ids) == 2


def test_ids_that_the_library_does_not_assign_are_reported(pair: Path) -> None:
    content = content_of(byte_level())
    wrong = copy.deepcopy(content)
    wrong["added_tokens"][-1]["id"] += 7
    assert places(compared(pair, content, wrong)) == [("warn", "b: tokenizer.json: added_tokens")]
