"""Trains small real tokenizers for the tests and provides texts that tell them apart."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

TEXTS = (
    "The quick brown fox jumps over the lazy dog, and THE DOG sleeps.",
    "def add(first, second):\n    return first + second  # 1 + 22 = 23",
    "Prices: 1234.50, 99 and 0x7f; naïve café, ÅNGSTRÖM ﬁne.",
    "the  theory   of <|x|> the <s> other </s>lathe",
    "Привет, мир. こんにちは 你好 مرحبا",
    "a b  c\td\n\ne ... !!! unbelievable-ness",
)
WORDS = " ".join(TEXTS) + " the theory of other mothers bathe lathe add second first return quick dog dogs sleeps sleep"


def flags(**changes: bool) -> dict[str, bool]:
    """Return the flags of an added token, as in tokenizer.json."""
    return {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True, **changes}


def once(train: Callable[..., Tokenizer]) -> Callable[..., Tokenizer]:
    """Cache a trained tokenizer, because training breaks ties differently each time."""
    trained = cache(lambda *arguments: train(*arguments).to_str())
    return lambda *arguments: Tokenizer.from_str(trained(*arguments))


@once
def byte_level(size: int = 340) -> Tokenizer:
    """Train byte-level BPE with two special tokens and a template that prepends one of them."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=["<s>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([WORDS] * 3, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        "<s> $A", special_tokens=[("<s>", tokenizer.token_to_id("<s>"))]
    )
    tokenizer.add_tokens([AddedToken("<|x|>", special=False, normalized=False)])
    return tokenizer


@once
def sentence_pieces() -> Tokenizer:
    """Train BPE over characters with byte fallback, like a converted SentencePiece model."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    trainer = trainers.BpeTrainer(
        vocab_size=420,
        special_tokens=["<unk>", "<s>", "</s>", *[f"<0x{byte:02X}>" for byte in range(256)]],
        show_progress=False,
        limit_alphabet=60,
    )
    tokenizer.train_from_iterator([WORDS] * 3, trainer)
    return tokenizer


@once
def unigram() -> Tokenizer:
    """Train a Unigram model with scores."""
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.normalizer = normalizers.NFKC()
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    trainer = trainers.UnigramTrainer(
        vocab_size=120, special_tokens=["<unk>", "<s>"], unk_token="<unk>", show_progress=False
    )
    tokenizer.train_from_iterator([WORDS] * 3, trainer)
    return tokenizer


@once
def word_pieces() -> Tokenizer:
    """Train WordPiece with BERT's pipeline."""
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    trainer = trainers.WordPieceTrainer(vocab_size=200, special_tokens=["[UNK]", "[CLS]", "[SEP]"], show_progress=False)
    tokenizer.train_from_iterator([WORDS] * 3, trainer)
    marks = [(token, tokenizer.token_to_id(token)) for token in ("[SEP]", "[CLS]")]
    tokenizer.post_processor = processors.BertProcessing(*marks)
    return tokenizer


def content_of(tokenizer: Tokenizer) -> dict[str, Any]:
    """Return the content of the tokenizer's tokenizer.json."""
    content: dict[str, Any] = json.loads(tokenizer.to_str())
    return content


def with_added(tokenizer: Tokenizer, *tokens: str, special: bool = True) -> Tokenizer:
    """Return the same tokenizer with further added tokens."""
    other = Tokenizer.from_str(tokenizer.to_str())
    other.add_tokens([AddedToken(token, special=special, normalized=False) for token in tokens])
    return other


def write_tokenizer(directory: Path, tokenizer: Tokenizer | dict[str, Any], **settings: Any) -> None:
    """Write the tokenizer's files."""
    content = tokenizer if isinstance(tokenizer, dict) else content_of(tokenizer)
    (directory / "tokenizer.json").write_text(json.dumps(content))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", **settings}
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))
