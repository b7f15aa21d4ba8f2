"""Tokenizers in older file formats are compared as far as the files define them. The oracle is transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from family import LINEAR, check_recipe
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizer_samples import TEXTS, byte_level, content_of, with_added, write_tokenizer
from transformers import AutoTokenizer

from mergegate.merge_core import Finding
from mergegate.merge_core.checkpoint.vocabulary import read_vocabulary
from mergegate.merge_core.checkpoint.vocabulary.definition import read_pieces

SPECIAL = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<s>"}
TOKENIZER_FILES = (
    *("tokenizer.json", "vocab.json", "merges.txt", "vocab.txt", "added_tokens.json", "tokenizer.model"),
    *("special_tokens_map.json", "tokenizer_config.json", "tekken.json", "qwen.tiktoken", "source.spm"),
)


@pytest.fixture(autouse=True)
def clear(pair: Path) -> None:
    remove_tokenizers(pair)


def remove_tokenizers(pair: Path) -> None:
    for name in "ab":
        for file in TOKENIZER_FILES:
            (pair / name / file).unlink(missing_ok=True)


def content(*added: str) -> dict[str, Any]:
    """Return a byte-level tokenizer.json that tokenizes like GPT-2's tokenizer."""
    return {**content_of(with_added(byte_level(), *added)), "post_processor": None}


def write_older(directory: Path, tokenizer: dict[str, Any], **settings: Any) -> None:
    """Write a byte-level tokenizer in GPT-2's original file format."""
    model = tokenizer["model"]
    (directory / "vocab.json").write_text(json.dumps(model["vocab"]))
    pairs = [" ".join(pair) for pair in model["merges"]]
    (directory / "merges.txt").write_text("\n".join(["#version: 0.2", *pairs]) + "\n")
    added = {one["content"]: one["id"] for one in tokenizer["added_tokens"] if one["content"] not in model["vocab"]}
    if added:
        (directory / "added_tokens.json").write_text(json.dumps(added))
    settings = {"tokenizer_class": "GPT2Tokenizer", **SPECIAL, **settings}
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))


def findings(pair: Path, more: str = "") -> tuple[Finding, ...]:
    return check_recipe(LINEAR + more, pair).findings


def blocking(pair: Path) -> list[str]:
    return [finding.where for finding in findings(pair) if finding.severity == "block"]


def library_ids(directory: Path) -> list[list[int]]:
    tokenizer = AutoTokenizer.from_pretrained(directory)
    return [tokenizer.encode(text) for text in (*TEXTS, "<|a|> and <|b|>")]


@settings(max_examples=8, deadline=None)
@given(
    st.lists(st.sampled_from(["<|a|>", "<|b|>", "<|c|>"]), unique=True),
    st.lists(st.sampled_from(["<|a|>", "<|b|>", "<|c|>"]), unique=True),
    st.sampled_from(["nothing", "merges", "vocabulary"]),
    st.booleans(),
    st.booleans(),
)
def test_different_ids_block_in_every_file_format(
    pair: Path, first: list[str], second: list[str], change: str, is_older: bool, both_older: bool
) -> None:
    remove_tokenizers(pair)
    mine, theirs = (content(*tokens) for tokens in (first, second))
    model = theirs["model"]
    if change == "merges":
        model["merges"] = model["merges"][::-1]
    if change == "vocabulary":
        *_, (one, first_id), (two, second_id) = model["vocab"].items()
        model["vocab"] = {**model["vocab"], one: second_id, two: first_id}
    write = write_older if is_older and both_older else write_tokenizer
    write(pair / "a", mine)
    (write_older if is_older else write_tokenizer)(pair / "b", theirs)
    found = findings(pair)
    assert bool([one for one in found if one.severity == "block"]) == (change != "nothing" or first != second)
    if library_ids(pair / "a") != library_ids(pair / "b"):
        assert any(one.severity == "block" for one in found)


@pytest.mark.parametrize("order", ["ab", "ba"])
def test_one_tokenizer_in_two_formats_has_no_findings(pair: Path, order: str) -> None:
    first, second = order
    write_tokenizer(pair / first, content("<|a|>"), **SPECIAL)
    write_older(pair / second, content("<|a|>"))
    assert library_ids(pair / "a") == library_ids(pair / "b")
    planned = check_recipe(LINEAR, pair)
    assert planned.tokenizer_pairs == ()
    (found,) = planned.findings
    assert found.severity == "warn"
    assert "not compared, because vocab.json does not contain them" in found.found


def test_line_numbers_of_a_vocabulary_are_its_ids(pair: Path) -> None:
    (pair / "a" / "vocab.txt").write_text("[PAD]\n[UNK]\nthe\n##s\n")
    (pair / "b" / "vocab.txt").write_text("[PAD]\n[UNK]\nthe\n##s\n")
    assert findings(pair) == ()
    found = read_vocabulary(pair / "a")
    assert found is not None
    assert found.ids == {"[PAD]": 0, "[UNK]": 1, "the": 2, "##s": 3}
    (pair / "b" / "vocab.txt").write_text("[PAD]\n[UNK]\n##s\nthe\n")
    assert blocking(pair) == ["b: tokenizer.json"]


def test_a_tokenizer_without_a_pipeline_is_not_rewritten(pair: Path) -> None:
    for name, tokens in (("a", ["<|a|>"]), ("b", ["<|b|>"])):
        write_older(pair / name, content(*tokens))
    found = findings(pair, "tokenizer_source: union\n")
    assert any("has no tokenizer.json" in one.found and one.severity == "block" for one in found)


def sentence_pieces_model(*pieces: str) -> bytes:
    """Return a SentencePiece model of these pieces, encoded as a protocol buffer by hand."""

    def part(number: int, content: bytes) -> bytes:
        return bytes([number << 3 | 2, len(content)]) + content

    trainer = part(2, b"\x18\x02\x55\x00\x00\x00\x00")
    return b"".join(part(1, part(1, one.encode()) + b"\x15\x00\x00\x80\xbf\x18\x01") for one in pieces) + trainer


PIECES = ("<unk>", "<s>", "</s>", "▁the", "▁a")
DECODER = {"added_tokens_decoder": {"0": {"content": "<unk>"}, "1": {"content": "<s>"}, "2": {"content": "</s>"}}}


def distinct(added: dict[str, int]) -> bool:
    """Return whether no two tokens share an id, which no library writes."""
    return len(set(added.values())) == len(added)


@settings(max_examples=12, deadline=None)
@given(
    st.dictionaries(st.sampled_from(["<pad>", "<|im_start|>", "<|im_end|>"]), st.integers(5, 7)).filter(distinct),
    st.dictionaries(st.sampled_from(["<pad>", "<|im_start|>", "<|im_end|>"]), st.integers(5, 7)).filter(distinct),
    st.booleans(),
    st.booleans(),
)
def test_added_tokens_count_next_to_a_model_that_only_a_library_reads(
    pair: Path, first: dict[str, int], second: dict[str, int], in_settings: bool, other_pieces: bool
) -> None:
    remove_tokenizers(pair)
    for name, added in (("a", first), ("b", second)):
        pieces = PIECES[::-1] if other_pieces and name == "b" else PIECES
        (pair / name / "tokenizer.model").write_bytes(sentence_pieces_model(*pieces))
        if in_settings and name == "b":
            listed = {str(number): {"content": token} for token, number in added.items()}
            decoder = {"added_tokens_decoder": {**DECODER["added_tokens_decoder"], **listed}}
            (pair / name / "tokenizer_config.json").write_text(json.dumps(decoder))
            second = {one["content"]: int(number) for number, one in listed.items()}
        else:
            (pair / name / "added_tokens.json").write_text(json.dumps(added))
    assert bool(blocking(pair)) == (other_pieces or first != second)


def test_pieces_match_those_of_the_library(pair: Path) -> None:
    assert read_pieces(sentence_pieces_model(*PIECES)) == PIECES
    for content in (b"", b"not a model", b"\x0a\xff\xff", b"\x0f", b"\x0a\x02\x0a\x05"):
        assert read_pieces(content) is None


def test_files_of_different_kinds_are_reported_as_not_compared(pair: Path) -> None:
    write_tokenizer(pair / "a", byte_level())
    (pair / "b" / "tokenizer.model").write_bytes(sentence_pieces_model(*PIECES))
    (found,) = [one for one in findings(pair) if one.where == "b: tokenizer"]
    assert found.severity == "warn"
    files = "tokenizer.json or vocab.json of a"
    assert found.found == f"tokenizer.model: mergegate cannot compare the vocabulary with {files}"


def test_the_same_model_file_counts_next_to_a_tokenizer_that_can_be_read(pair: Path) -> None:
    vocabulary = {"model": {"type": "Unigram", "vocab": [[one, 0.0] for one in PIECES]}, "added_tokens": []}
    for name in "ab":
        (pair / name / "tokenizer.model").write_bytes(sentence_pieces_model(*PIECES))
    (pair / "a" / "tokenizer.json").write_text(json.dumps(vocabulary))
    assert findings(pair) == ()
    (pair / "b" / "added_tokens.json").write_text('{"<pad>": 5}')
    assert blocking(pair) == ["b: tokenizer"]


@pytest.mark.parametrize("name", ["tekken.json", "qwen.tiktoken", "source.spm"])
def test_a_different_binary_vocabulary_blocks_the_merge(pair: Path, name: str) -> None:
    for parent in "ab":
        (pair / parent / name).write_text("one")
    assert findings(pair) == ()
    (pair / "b" / name).write_text("two")
    (found,) = findings(pair)
    assert (found.severity, found.where) == ("block", f"b: {name}")
    assert "cannot compare" in found.found


def test_settings_and_special_tokens_count_next_to_a_model_that_only_a_library_reads(pair: Path) -> None:
    for name, end in (("a", "</s>"), ("b", "<s>")):
        (pair / name / "tokenizer.model").write_bytes(sentence_pieces_model(*PIECES))
        (pair / name / "tokenizer_config.json").write_text(json.dumps({"add_bos_token": name == "a"}))
        (pair / name / "special_tokens_map.json").write_text(json.dumps({"eos_token": end}))
    found = {(one.severity, one.where) for one in findings(pair)}
    assert found == {
        ("block", "b: tokenizer_config.json: add_bos_token"),
        ("warn", "b: tokenizer_config.json: eos_token"),
    }


def test_a_binary_file_that_differs_next_to_equal_tokenizers_is_a_warning(pair: Path) -> None:
    for name in "ab":
        write_tokenizer(pair / name, byte_level())
        (pair / name / "tekken.json").write_text(name)
    (found,) = findings(pair)
    assert (found.severity, found.where) == ("warn", "b: tekken.json")
    (pair / "a" / "tekken.json").unlink()
    (found,) = findings(pair)
    assert (found.severity, found.found) == ("info", "not in the result: tekken.json")
