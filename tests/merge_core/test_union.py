"""Unions keep each token's text (tokenizers library) and each model's rows (numpy), or the recipe is refused."""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from family import LINEAR, check_recipe, load, merge_text, plan_recipe, random_tensors, save_checkpoint, save_tokenizer
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from samples import sampled
from tokenizer_samples import (
    TEXTS,
    WORDS,
    byte_level,
    content_of,
    sentence_pieces,
    unigram,
    with_added,
    word_pieces,
    write_tokenizer,
)
from tokenizers import AddedToken, Tokenizer, models
from transformers import AutoTokenizer

from mergegate.merge_core.errors import InvalidInput

EMBED, HEAD = "model.embed_tokens.weight", "lm_head.weight"


def model(
    root: Path, name: str, tokenizer: Tokenizer | dict[str, Any], *, seed: int, rows: int | None = None, **config: Any
) -> Path:
    library = tokenizer if isinstance(tokenizer, Tokenizer) else Tokenizer.from_str(json.dumps(tokenizer))
    size = rows or 1 + max(library.get_vocab().values())
    place = save_checkpoint(root / name, random_tensors(seed, tokens=size), config=config)
    write_tokenizer(place, tokenizer)
    return place


def result(root: Path) -> tuple[Tokenizer, Mapping[str, np.ndarray], dict[str, Any]]:
    out = root / "out"
    return Tokenizer.from_file(str(out / "tokenizer.json")), load(out), json.loads((out / "config.json").read_text())


def moved(tokenizer: Tokenizer, order: random.Random) -> dict[str, Any]:
    """Return the same tokenizer model with its ids shuffled."""
    content = content_of(tokenizer)
    vocab = content["model"]["vocab"]
    numbers = list(vocab.values())
    order.shuffle(numbers)
    content["model"]["vocab"] = dict(zip(vocab, numbers, strict=True))
    for entry in content["added_tokens"]:
        entry["id"] = content["model"]["vocab"].get(entry["content"], entry["id"])
    content["post_processor"] = None
    return content


def require_union(root: Path, tables: Mapping[str, Tokenizer]) -> Tokenizer:
    """Require each model's tokens under one id in the result, with the mean of the owners' rows as their row."""
    union, out, config = result(root)
    vocab = union.get_vocab()
    assert sorted(set(vocab.values())) == sorted(vocab.values())
    assert config["vocab_size"] == len(out[EMBED]) == len(out[HEAD]) >= 1 + max(vocab.values())
    for name in (EMBED, HEAD):
        rows = {model: load(root / model)[name] for model in tables}
        for token, number in vocab.items():
            places = {model: one.token_to_id(token) for model, one in tables.items()}
            own = [rows[model][at] for model, at in places.items() if at is not None and at < len(rows[model])]
            assert own, token
            expected = np.mean([*own, *[np.mean(own, 0)] * (len(tables) - len(own))], 0)
            # Allow a difference in the last place.
            np.testing.assert_allclose(out[name][number], expected, rtol=1e-6, atol=2.4e-7)
    for one in tables.values():
        assert one.get_vocab().keys() <= vocab.keys()
    return union


@pytest.mark.story
@settings(max_examples=12, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_a_union_of_siblings_keeps_tokens_rows_and_segmentation(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    root = tmp_path_factory.mktemp("siblings")
    kind = data.draw(st.sampled_from([byte_level, sentence_pieces, word_pieces, unigram]))
    names = st.lists(st.sampled_from([f"<|{n}|>" for n in range(6)]), max_size=4, unique=True)
    first = with_added(kind(), *data.draw(names))
    second = with_added(kind(), *data.draw(names))
    if kind is not unigram:
        second = Tokenizer.from_str(json.dumps(moved(second, random.Random(data.draw(st.integers(0, 9))))))
    third = with_added(kind(), *data.draw(names), special=False)
    more = data.draw(st.integers(0, 9))
    tables = {"a": first, "b": second, "c": third}
    for seed, (name, one) in enumerate(tables.items()):
        model(root, name, one, seed=seed, rows=1 + max(one.get_vocab().values()) + (more if name == "a" else 0))
    text = LINEAR.replace("{model: b}", "{model: b}, {model: c}") + "tokenizer: {source: union}\n"
    merge_text(text, root)
    union = require_union(root, tables)
    for text in TEXTS:
        for one in tables.values():
            assert (
                union.encode(text, add_special_tokens=False).tokens == one.encode(text, add_special_tokens=False).tokens
            )
    for token, number in first.get_vocab().items():  # The base keeps its ids.
        assert union.token_to_id(token) == number


def test_an_ordinary_token_of_the_base_becomes_special_if_another_model_needs_it(tmp_path: Path) -> None:
    first = content_of(byte_level())
    first["model"]["vocab"]["<|y|>"] = 340
    first["added_tokens"] = [one for one in first["added_tokens"] if one["content"] != "<|x|>"]
    model(tmp_path, "a", first, seed=0)
    model(tmp_path, "b", with_added(byte_level(), "<|y|>"), seed=1)
    merge_text(LINEAR + "tokenizer_source: union", tmp_path)
    union, _, _ = result(tmp_path)
    assert union.encode("the<|y|>").tokens[-1] == "<|y|>"
    assert union.token_to_id("<|y|>") == 340


@pytest.mark.parametrize("shape", [(341,), (1, 341), (341, 8)])
def test_an_unknown_tensor_of_vocabulary_size_is_refused(tmp_path: Path, shape: tuple[int, ...]) -> None:
    """Its rows may belong to tokens whose ids change, so it is merged only if no token moves."""
    own = content_of(byte_level())
    for seed, (name, one) in enumerate({"a": own, "b": own, "c": moved(byte_level(), random.Random(3))}.items()):
        place = model(tmp_path, name, one, seed=seed, rows=341)
        tensors = {**load_file(place / "model.safetensors"), "token_scores": torch.ones(shape)}
        save_file(tensors, place / "model.safetensors", {"format": "pt"})
    merge_text(LINEAR + "tokenizer_source: union", tmp_path)
    with pytest.raises(InvalidInput, match="token_scores"):
        merge_text(LINEAR.replace("{model: b}", "{model: c}") + "tokenizer_source: union", tmp_path, "2")


def test_padding_rows_are_kept_and_added_on_request(tmp_path: Path) -> None:
    a = model(tmp_path, "a", byte_level(), seed=0, rows=400)
    model(tmp_path, "b", with_added(byte_level(), "<|new|>"), seed=1)
    text = LINEAR + "tokenizer: {source: union, pad_to_multiple_of: 64}"
    merge_text(text, tmp_path)
    union, out, config = result(tmp_path)
    assert config["vocab_size"] == len(out[EMBED]) == 448
    number = union.token_to_id("<|new|>")
    before, other = load(a)[EMBED], load(tmp_path / "b")[EMBED]
    np.testing.assert_allclose(out[EMBED][number], other[-1], rtol=1e-6)
    spare = [row for row in range(341, 400) if row != number]
    np.testing.assert_allclose(out[EMBED][spare], before[spare], rtol=1e-6)
    means = (before.mean(0) + other.mean(0)) / 2
    np.testing.assert_allclose(out[EMBED][400:], np.tile(means, (48, 1)), rtol=1e-5, atol=1e-6)
    small = merge_text(text, tmp_path, "2", block_elements=16384, threads=1).files["model.safetensors"]
    assert small == hashlib.sha256((tmp_path / "out/model.safetensors").read_bytes()).hexdigest()


def test_ids_beyond_the_table_need_no_row_or_get_that_of_another_model(tmp_path: Path) -> None:
    past = with_added(byte_level(), "<|past|>")
    model(tmp_path, "a", past, seed=0, rows=341)
    model(tmp_path, "b", with_added(byte_level(), "<|past|>", "<|more|>"), seed=1, rows=341)
    c = model(tmp_path, "c", past, seed=1)
    for source in ("a", "b", "base", "union"):
        merge_text(LINEAR + f"tokenizer_source: {source}", tmp_path, f"of-{source}")
        assert len(load(tmp_path / f"of-{source}")[EMBED]) == 341
    merge_text(LINEAR.replace("model: b", "model: c") + "tokenizer_source: union", tmp_path)
    _, out, config = result(tmp_path)
    assert config["vocab_size"] == 342
    np.testing.assert_allclose(out[EMBED][341], load(c)[EMBED][341], rtol=1e-6)


TOKENS = """tokenizer:
  source: base
  tokens:
    <|zero|>: {source: {kind: zero}}
    <|like-the|>: {source: {kind: model_token, model: b, token: Ġthe}}
    <|by-id|>: {source: {kind: model_token, model: a, token_id: 7}}
    "</s>": {source: b, force: true}
    <|x|>: {source: {kind: zero}}
"""


def test_rows_of_single_tokens_follow_the_recipe(tmp_path: Path) -> None:
    model(tmp_path, "a", byte_level(), seed=0)
    model(tmp_path, "b", byte_level(), seed=1)
    merge_text(LINEAR + TOKENS, tmp_path)
    union, out, _ = result(tmp_path)
    a, b = (load(tmp_path / name)[EMBED] for name in "ab")
    expected = {
        "<|zero|>": np.zeros(12),
        "<|like-the|>": b[byte_level().token_to_id("Ġthe")],
        "<|by-id|>": a[7],
        "</s>": b[byte_level().token_to_id("</s>")],
        "<|x|>": (a[340] + b[340]) / 2,  # Both models have the token and nothing is forced.
        "Ġthe": (a + b)[byte_level().token_to_id("Ġthe")] / 2,
    }
    for token, row in expected.items():
        np.testing.assert_allclose(out[EMBED][union.token_to_id(token)], row, rtol=1e-6, err_msg=token)


@pytest.mark.parametrize(
    ("block", "match"),
    [
        ("tokens: {<|n|>: {}}", "no merged model has"), ("tokens: {<|n|>: {source: c}}", "is not a merged model"),
        ("tokens: {<|n|>: {source: b}}", "has no row"),
        ("tokens: {<|n|>: {source: {kind: model_token, model: b, token_id: 9999}}}", "has no row"),
        ("tokens: {<|n|>: {source: {kind: model_token, model: b}}}", "exactly one"),
        ("tokens: {<|n|>: {source: {kind: model_token, model: b, token: a, token_id: 1}}}", "exactly one"),
        ("tokens: {<|n|>: {source: {kind: model_token, token: a}}}", "no 'model'"),
        ("tokens: {<|n|>: {source: {kind: one}}}", "zero or model_token"),
        ("tokens: {<|n|>: {source: {kind: zero, model: b}}}", "unknown key 'model'"),
        ("tokens: {<|n|>: {force: true}}", "true without a source"),
        ("tokens: {<|n|>: {source: b, force: 1}}", "true or false"), ("tokens: [a]", "token: {source"),
        ("pad_to_multiple_of: -1", "from 1"), ("pad_to_multiple_of: true", "from 1"),
        ("strangers: dormand", "did you mean 'dormant'"), ("source: a, strangers: dormant", "source: union"),
    ],
)  # fmt: skip
def test_invalid_tokenizer_settings_are_refused_with_their_location(tmp_path: Path, block: str, match: str) -> None:
    model(tmp_path, "a", byte_level(), seed=0)
    model(tmp_path, "b", byte_level(), seed=1)
    with pytest.raises(InvalidInput, match=match) as caught:
        merge_text(LINEAR + f"tokenizer: {{{block}}}", tmp_path)
    assert "tokenizer" in caught.value.where


def strangers(root: Path, **changes: Any) -> list[Tokenizer]:
    """Write models with byte-level tokenizers of 300 and 330 tokens, and return both tokenizers."""
    tokenizers = []
    for seed, (name, size) in enumerate({"a": 300, "b": 330}.items()):
        content = content_of(byte_level(size))
        content["model"] |= changes
        tokenizers.append(Tokenizer.from_str(json.dumps(content)))
        model(root, name, tokenizers[-1], seed=seed)
    return tokenizers


def test_unshared_tokens_are_refused_unless_the_recipe_handles_them(tmp_path: Path) -> None:
    strangers(tmp_path)
    with pytest.raises(InvalidInput, match="union of strangers") as caught:
        merge_text(LINEAR + "tokenizer_source: union", tmp_path)
    assert all(way in caught.value.remedy for way in ("specials", "dormant", "appended", "transplant-tokenizer"))
    strangers(tmp_path / "without merges", ignore_merges=True)
    with pytest.raises(InvalidInput, match="ignore_merges"):
        merge_text(LINEAR + "tokenizer: {source: union, strangers: dormant}", tmp_path / "without merges")


@pytest.mark.parametrize("way", ["specials", "dormant", "appended"])
def test_unshared_tokens_join_the_vocabulary_as_the_recipe_requests(tmp_path: Path, way: str) -> None:
    one, two = strangers(tmp_path)
    text = LINEAR + f"tokenizer: {{source: union, strangers: {way}}}"
    merge_text(text, tmp_path)
    union, out, config = result(tmp_path)
    assert config["vocab_size"] == len(out[EMBED]) == 1 + max(union.get_vocab().values())
    for token, number in one.get_vocab().items():
        assert union.token_to_id(token) == number
    cuts = [[t.encode(text).tokens for text in (*TEXTS, WORDS)] for t in (one, two, union)]
    if way == "appended":  # The second has all merges of the first, so the union splits like it.
        assert cuts[2] == cuts[1] != cuts[0]
    else:
        assert cuts[2] == cuts[0] != cuts[1]
    new = two.get_vocab().keys() - one.get_vocab().keys()
    assert len(new) == 30
    assert (new <= union.get_vocab().keys()) == (way != "specials")
    if way != "specials":
        rows = load(tmp_path / "b")[EMBED]
        for token in new:
            assert union.decode([union.token_to_id(token)]) == two.decode([two.token_to_id(token)])
            np.testing.assert_allclose(out[EMBED][union.token_to_id(token)], rows[two.token_to_id(token)], rtol=1e-6)


@pytest.mark.parametrize("way", ["dormant", "appended"])
def test_scores_of_two_unigram_models_are_not_combined(tmp_path: Path, way: str) -> None:
    model(tmp_path, "a", unigram(), seed=0)
    other = content_of(unigram())
    other["model"]["vocab"][5][1] -= 1.0
    other["model"]["vocab"].append(["zz", -9.0])
    model(tmp_path, "b", other, seed=1)
    with pytest.raises(InvalidInput, match="specials"):
        merge_text(LINEAR + f"tokenizer: {{source: union, strangers: {way}}}", tmp_path)
    merge_text(LINEAR + "tokenizer: {source: union, strangers: specials}", tmp_path)


@pytest.mark.parametrize("way", ["dormant", "appended"])
def test_tokens_with_a_different_encoding_are_refused(tmp_path: Path, way: str) -> None:
    model(tmp_path, "a", byte_level(), seed=0)
    model(tmp_path, "b", sentence_pieces(), seed=1)
    with pytest.raises(InvalidInput, match="spells its tokens differently"):
        merge_text(LINEAR + f"tokenizer: {{source: union, strangers: {way}}}", tmp_path)


def test_single_characters_cannot_be_dormant_and_are_omitted(tmp_path: Path) -> None:
    pairs = []
    for name, vocab, merges in (("a", "ab", []), ("b", "abc", [("a", "b")])):
        words = {token: number for number, token in enumerate([*vocab, *["".join(pair) for pair in merges]])}
        one = Tokenizer(models.BPE(words, merges, unk_token="a"))
        model(tmp_path, name, one, seed=len(vocab))
        pairs.append(one)
    text = LINEAR + "tokenizer: {source: union, strangers: dormant}"
    merge_text(text, tmp_path)
    union, _, _ = result(tmp_path)
    assert union.get_vocab() == {"a": 0, "b": 1, "ab": 2}
    assert union.encode("abc").tokens == pairs[0].encode("abc").tokens
    assert any("single characters" in one.found for one in check_recipe(text, tmp_path).findings)


def test_special_ids_follow_their_tokens_into_both_configurations(tmp_path: Path) -> None:
    base = with_added(byte_level(), "<|end|>", "<|image|>")
    other = with_added(byte_level(), "<|image|>", "<|end|>", "<|call|>")
    ids, after = base.get_vocab(), other.get_vocab()
    end, image = [ids["<|end|>"], ids["</s>"]], ids["<|image|>"]
    text = {"image_token_id": image, "vocab_size": 343}
    more: dict[str, Any] = {"pad_token_id": -1, "text_config": text}
    a = model(tmp_path, "a", base, seed=0, eos_token_id=end, image_token_index=image, **more)
    generation = {"eos_token_id": ids["<|end|>"], "suppress_tokens": [ids["<|image|>"], ids["<s>"]], "top_p": 0.9}
    (a / "generation_config.json").write_text(json.dumps(generation))
    model(tmp_path, "b", other, seed=1)
    merge_text(LINEAR + "tokenizer_source: b", tmp_path)
    _, _, config = result(tmp_path)
    assert config["eos_token_id"] == [after["<|end|>"], after["</s>"]]
    assert config["image_token_index"] == config["text_config"]["image_token_id"] == after["<|image|>"]
    assert config["pad_token_id"] == -1
    assert config["vocab_size"] == config["text_config"]["vocab_size"] == 344
    written = json.loads((tmp_path / "out/generation_config.json").read_text())
    suppressed = [after["<|image|>"], after["<s>"]]
    assert written == {"eos_token_id": after["<|end|>"], "suppress_tokens": suppressed, "top_p": 0.9}
    merge_text(LINEAR + "tokenizer_source: union", tmp_path, "union")
    config = json.loads((tmp_path / "union/config.json").read_text())
    assert config["eos_token_id"] == end
    assert json.loads((tmp_path / "union/generation_config.json").read_text()) == generation


def test_a_special_token_that_the_result_lacks_blocks(tmp_path: Path) -> None:
    base = with_added(byte_level(), "<|image|>")
    model(tmp_path, "a", base, seed=0, image_token_index=base.token_to_id("<|image|>"))
    model(tmp_path, "b", byte_level(), seed=1)
    with pytest.raises(InvalidInput, match="image_token_index"):
        plan_recipe(LINEAR + "tokenizer_source: b", tmp_path)


def test_all_written_tokenizer_files_are_consistent(tmp_path: Path) -> None:
    first, second = byte_level(), with_added(byte_level(), "<|call|>")
    a = model(tmp_path, "a", first, seed=0)
    model(tmp_path, "b", second, seed=1)
    listed = {
        str(number): {"content": token.content, "special": token.special}
        for number, token in first.get_added_tokens_decoder().items()
    }
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "added_tokens_decoder": listed, "eos_token": "</s>"}
    (a / "tokenizer_config.json").write_text(json.dumps(settings))
    (a / "added_tokens.json").write_text(json.dumps({"<|x|>": 340}))
    merge_text(LINEAR + "tokenizer_source: union", tmp_path)
    union, _, _ = result(tmp_path)
    number = union.token_to_id("<|call|>")
    written = json.loads((tmp_path / "out/tokenizer_config.json").read_text())
    assert written["added_tokens_decoder"][str(number)]["content"] == "<|call|>"
    assert written["eos_token"] == "</s>"
    assert json.loads((tmp_path / "out/added_tokens.json").read_text())["<|call|>"] == number
    loaded = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert loaded.get_vocab() == union.get_vocab()
    assert loaded("the <|call|> theory")["input_ids"] == union.encode("the <|call|> theory").ids


def test_a_step_with_a_union_can_be_the_input_of_another_step(tmp_path: Path) -> None:
    tokens = {"a": ["<|a|>"], "b": ["<|b|>"], "c": ["<|c|>", "<|b|>"]}
    tables = {name: with_added(byte_level(), *own) for name, own in tokens.items()}
    for seed, (name, one) in enumerate(tables.items()):
        model(tmp_path, name, one, seed=seed)
    first = LINEAR + "tokenizer_source: union\n"
    text = f"name: both\n{first}---\n{first.replace('model: a', 'model: both').replace('model: b}', 'model: c}')}"
    merge_text(text, tmp_path)
    union, out, _ = result(tmp_path)
    rows = {name: load(tmp_path / name)[EMBED] for name in tables}
    assert union.get_vocab().keys() >= {"<|a|>", "<|b|>", "<|c|>"}
    place = {name: one.token_to_id("<|b|>") for name, one in tables.items()}
    expected = (rows["b"][place["b"]] + rows["c"][place["c"]]) / 2
    np.testing.assert_allclose(out[EMBED][union.token_to_id("<|b|>")], expected, rtol=1e-6)


@pytest.mark.parametrize("method", sampled(("slerp", "ties", "task_arithmetic", "dare_linear"), ("slerp", "ties")))
def test_every_method_merges_the_rows_of_the_union(tmp_path: Path, method: str) -> None:
    """The result equals a merge of models whose tables were reordered first."""
    tables = {"a": byte_level(), "b": with_added(byte_level(), "<|b|>")}
    for seed, (name, one) in enumerate(tables.items()):
        model(tmp_path, name, one, seed=seed)
    told = "parameters: {t: 0.3}" if method == "slerp" else "parameters: {weight: 0.7, density: 0.5}"
    told = told.replace(", density: 0.5", "") if method == "task_arithmetic" else told
    text = f"merge_method: {method}\nbase_model: a\nmodels: [{{model: b}}]\n{told}\n"
    merge_text(text + "tokenizer_source: union", tmp_path)
    ready = tmp_path / "ready"
    first, second = (dict(random_tensors(seed, tokens=341 + seed)) for seed in (0, 1))
    for name in (EMBED, HEAD):
        first[name] = torch.cat([first[name], second[name][341:]])
    for name, tensors in (("a", first), ("b", second)):
        write_tokenizer(save_checkpoint(ready / name, tensors), tables["b"])
    merge_text(text, ready)
    assert (tmp_path / "out/model.safetensors").read_bytes() == (ready / "out/model.safetensors").read_bytes()


def test_added_tokens_with_different_flags_are_reported(tmp_path: Path) -> None:
    other = Tokenizer.from_str(byte_level().to_str())
    first = with_added(byte_level(), "<|y|>")
    other.add_tokens([AddedToken("<|y|>", lstrip=True, special=True, normalized=False)])
    model(tmp_path, "a", first, seed=0)
    model(tmp_path, "b", other, seed=1)
    found = check_recipe(LINEAR + "tokenizer_source: union", tmp_path).findings
    assert [(one.severity, one.where) for one in found] == [("warn", "b: tokenizer.json: added_tokens.flags")]


@pytest.fixture
def shuffled(tmp_path: Path) -> Path:
    """Model ``a`` with tokens t0 to t23, and ``b`` with the same tokens reversed, after two others."""
    save_checkpoint(tmp_path / "a", random_tensors(0))
    save_checkpoint(tmp_path / "b", random_tensors(1, tokens=26), config={"eos_token_id": 1})
    save_tokenizer(tmp_path / "b", ["new", "<eos>", *[f"t{n}" for n in reversed(range(24))]])
    return tmp_path


@pytest.mark.parametrize("way", [{"block_elements": 16384}, {"kernels": "fused"}])
def test_the_vocabulary_of_the_first_model_is_kept(shuffled: Path, way: dict[str, str]) -> None:
    merge_text(LINEAR + "tokenizer_source: a", shuffled, **way)
    a, b, out = (load(shuffled / name) for name in ("a", "b", "out"))
    for name in (EMBED, HEAD):
        expected = (a[name] + b[name][[25 - row for row in range(24)]]) / 2
        np.testing.assert_allclose(out[name], expected, rtol=1e-6)
    assert json.loads((shuffled / "out/config.json").read_text())["vocab_size"] == 24


def test_a_token_that_the_base_lacks_gets_the_mean_of_its_owners(shuffled: Path) -> None:
    save_checkpoint(shuffled / "c", random_tensors(2, tokens=26))
    save_tokenizer(shuffled / "c", ["<eos>", "new", *[f"t{n}" for n in range(24)]])
    models = "base_model: a\nmodels: [{model: b}, {model: c}]\nparameters: {weight: 1}\ntokenizer_source: b\n"
    merge_text(f"merge_method: task_arithmetic\n{models}", shuffled)
    b, c, out = (load(shuffled / name)[EMBED] for name in ("b", "c", "out"))
    base = (b[0] + c[1]) / 2
    np.testing.assert_allclose(out[0], base + (b[0] - base) + (c[1] - base), rtol=1e-5, atol=1e-6)


def test_with_a_tokenizer_source_different_ids_do_not_block(shuffled: Path) -> None:
    assert check_recipe(LINEAR + "tokenizer_source: a", shuffled).findings == ()


@pytest.mark.parametrize("name", [EMBED, HEAD])
@pytest.mark.parametrize("shape", [(26, 2), (26, 32), (26, 1), (26,), (26, 16, 1), (26, 4, 4)])
def test_rows_of_another_shape_are_refused_even_if_they_follow_their_tokens(
    shuffled: Path, name: str, shape: tuple[int, ...]
) -> None:
    file = shuffled / "b/model.safetensors"
    save_file({**load_file(file), name: torch.ones(shape)}, file, {"format": "pt"})
    reported = check_recipe(LINEAR + "tokenizer_source: a", shuffled).blocking
    assert [(one.where, one.found) for one in reported] == [(f"b: {name}", f"shape {list(shape)}")]


def test_a_union_of_unrelated_vocabularies_and_unknown_tokens_are_refused(shuffled: Path) -> None:
    save_checkpoint(shuffled / "c", random_tensors(2))
    save_tokenizer(shuffled / "c", [f"u{n}" for n in range(24)])
    for source, words in (("union", "union"), ("c", "24 tokens of c")):
        with pytest.raises(InvalidInput, match=words):
            merge_text(LINEAR + f"tokenizer_source: {source}", shuffled)


def test_a_union_of_equal_vocabularies_changes_nothing(family: Path) -> None:
    assert merge_text(LINEAR + "tokenizer_source: union", family, "1").files == merge_text(LINEAR, family, "2").files
