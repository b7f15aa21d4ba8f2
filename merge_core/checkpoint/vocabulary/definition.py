"""Read a tokenizer from its files: model, pipeline, added tokens, and the id of every token, and compare ids.

In this package, the *model* is the part of a tokenizer that splits words into tokens, such as BPE. Added tokens that
its vocabulary lacks get the next free ids in the order of the list, even if the file contains different ids. The
tokenizers library assigns ids in this way (checked with 0.23), so these are the ids of the training.

Merging embeddings row by row is only correct if each row belongs to the same token in every model. If it does not, the
merge succeeds, but its result generates nonsense.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeAlias

from mergegate.merge_core.checkpoint.companions import Companions, is_binary_vocabulary, list_companions
from mergegate.merge_core.errors import InvalidInput
from mergegate.merge_core.parsing import JsonBounds

# The tokenizers of Gemma, which are the largest, have 33 MB and two million values.
TOKENIZER_BOUNDS = JsonBounds(size=96 << 20, values=4_000_000)
NAME = "tokenizer.json"
SETTINGS = "tokenizer_config.json"
SPECIAL = "special_tokens_map.json"
MERGES = "merges.txt"
_FILES = (NAME, SETTINGS, SPECIAL, "vocab.json", MERGES, "vocab.txt", "added_tokens.json")
_MAX_MERGES_BYTES = 64 << 20
# The largest vocabularies have 300,000 tokens. Tables are allocated with one entry for each possible id.
_MAX_IDS = 1 << 24
_ID_RANGE = f"whole numbers from 0 to {_MAX_IDS - 1}"
# Flags of an added token, with their defaults. They control how the token is matched in a text.
FLAGS = MappingProxyType({"single_word": False, "lstrip": False, "rstrip": False, "normalized": True, "special": False})


_Key: TypeAlias = tuple[tuple[str, Path | bytes | None], ...]
_cache: ContextVar[dict[_Key, TokenizerDefinition | None] | None] = ContextVar("read tokenizers", default=None)


@dataclass(frozen=True)
class TokenizerDefinition:
    """Content of a tokenizer's files.

    Args:
        location: File of the tokenizer, for messages.
        kind: Type of the model: ``BPE``, ``Unigram``, ``WordPiece``, ``WordLevel``, or another type in the file.
        content: Content of ``tokenizer.json``. Older files (``vocab.json``, ``merges.txt``) are converted to this form.
        settings: Content of ``tokenizer_config.json``, with the special tokens of ``special_tokens_map.json``.
        model_ids: Ids of the tokens in the model's vocabulary.
        ids: Ids of all tokens, as the tokenizers library assigns them.
        added: Flags by added token, in the order of the file.
        misnumbered: Added tokens whose id in the file differs from the id that the library assigns.
        merges: Merges of BPE, as pairs of tokens in order of priority.
        has_pipeline: Whether the files also define how a text is split before the model processes it. Only
            ``tokenizer.json`` does. With ``vocab.json`` or ``vocab.txt``, the tokenizer's class defines it.
    """

    location: str
    kind: str
    content: Mapping[str, Any]
    settings: Mapping[str, Any]
    model_ids: Mapping[str, int]
    ids: Mapping[str, int]
    added: Mapping[str, Mapping[str, bool]]
    misnumbered: tuple[str, ...] = ()
    merges: tuple[tuple[str, str], ...] = field(default=(), repr=False)
    has_pipeline: bool = True

    @property
    def model(self) -> Mapping[str, Any]:
        model: Mapping[str, Any] = self.content["model"]
        return model


def read_tokenizer(source: Companions | Path) -> TokenizerDefinition | None:
    """Return the tokenizer of a checkpoint, given its files or its directory.

    ``tokenizer.json`` takes precedence, then ``vocab.json`` with ``merges.txt``, then ``vocab.txt``. Without any of
    these files, return None.
    """
    files = list_companions(source) if isinstance(source, Path) else source
    cache = _cache.get()
    key = tuple((name, files.sources.get(name)) for name in _FILES)
    if cache is None:
        return _read_files(files)
    if key not in cache:
        cache[key] = _read_files(files)
    return cache[key]


@contextmanager
def cached_tokenizers() -> Iterator[None]:
    """Cache tokenizers in this context, because checks need them repeatedly and large ones take a second to read."""
    if _cache.get() is not None:
        yield
        return
    token = _cache.set({})
    try:
        yield
    finally:
        _cache.reset(token)


def _read_files(files: Companions) -> TokenizerDefinition | None:
    settings = read_settings(files)
    content = files.json(NAME, TOKENIZER_BOUNDS)
    if content is not None:
        return define(content, settings, files.location(NAME))
    # Convert an older format to the form of tokenizer.json.
    vocab = files.json("vocab.json", TOKENIZER_BOUNDS)
    if vocab is not None:
        name, model = "vocab.json", dict[str, Any](vocab=vocab)
        if vocab and all(isinstance(entry, dict) for entry in vocab.values()):  # MMS: one vocabulary for each language.
            language = settings.get("target_lang")
            if language not in vocab:
                raise InvalidInput(
                    f"{files.location(SETTINGS)}: target_lang",
                    found=f"{language!r:.40}",
                    expected=f"a language of vocab.json, such as {next(iter(vocab))}",
                )
            model = {"vocab": vocab[language], "languages": vocab}
        if MERGES in files:
            text = files.text(MERGES, _MAX_MERGES_BYTES, "merges, one per line")
            lines = [line.rstrip("\r") for line in text.split("\n")]
            merges = [line for line in lines if line.strip() and not line.startswith("#version")]
            model |= {"type": "BPE", "merges": merges}
    elif "vocab.txt" in files:
        # One token per line. If a token is repeated, the last line counts, as in the library.
        lines = files.text("vocab.txt", _MAX_MERGES_BYTES, "tokens, one per line").removesuffix("\n").split("\n")
        name, model = "vocab.txt", {"vocab": {line.rstrip(): number for number, line in enumerate(lines)}}
    else:
        return None
    # The added tokens are in other files. They are added in the order of their ids.
    ids = added_ids(files, settings)
    decoder = settings.get("added_tokens_decoder")
    flags = {
        entry["content"]: {flag: entry[flag] for flag in FLAGS if flag in entry}
        for entry in (decoder.values() if isinstance(decoder, Mapping) else ())
        if isinstance(entry, Mapping) and isinstance(entry.get("content"), str)
    }
    added = [{**flags.get(token, {}), "content": token, "id": ids[token]} for token in sorted(ids, key=ids.__getitem__)]
    definition = define({"model": model, "added_tokens": added}, settings, files.location(name))
    return replace(definition, has_pipeline=False)


def read_settings(files: Companions) -> dict[str, Any]:
    """Return ``tokenizer_config.json``, with ``special_tokens_map.json`` if it lacks ``added_tokens_decoder``."""
    settings = files.json(SETTINGS, TOKENIZER_BOUNDS) or {}
    if "added_tokens_decoder" in settings:  # transformers ignores the older file in this case.
        return settings
    return {**(files.json(SPECIAL, TOKENIZER_BOUNDS) or {}), **settings}


def added_ids(files: Companions, settings: Mapping[str, Any]) -> dict[str, int]:
    """Return the ids of the added tokens in ``added_tokens.json`` and ``settings`` (``tokenizer_config.json``)."""
    content = files.json("added_tokens.json", TOKENIZER_BOUNDS) or {}
    if not all(map(_is_id, content.values())):
        raise InvalidInput(
            files.location("added_tokens.json"),
            found=f"ids that are not {_ID_RANGE}",
            expected="an object: token → id",
        )
    ids = {token: number for token, number in content.items() if token}
    for entry in _settings_entries(settings, set(), files.location(SETTINGS)):
        ids.setdefault(entry["content"], entry["id"])
    return ids


def define(content: Mapping[str, Any], settings: Mapping[str, Any], location: str) -> TokenizerDefinition:
    """Return the tokenizer that ``content``, a parsed ``tokenizer.json``, defines."""
    model = content.get("model")
    vocab = model.get("vocab") if isinstance(model, Mapping) else None
    if not isinstance(model, Mapping) or not isinstance(vocab, (dict, list)):
        raise InvalidInput(f"{location}: model.vocab", found=f"{vocab!r:.40}", expected="a vocabulary")
    if isinstance(vocab, list):  # Unigram: [token, score] in the order of the ids.
        tokens = [item[0] if isinstance(item, list) and len(item) == 2 else None for item in vocab]
        if not all(isinstance(token, str) for token in tokens):
            raise InvalidInput(
                f"{location}: model.vocab", found="entries that are not pairs", expected="pairs [token, score]"
            )
        model_ids = {str(token): number for number, token in enumerate(tokens)}
    elif all(map(_is_id, vocab.values())):
        model_ids = dict(vocab)
    else:
        raise InvalidInput(
            f"{location}: model.vocab", found=f"ids that are not {_ID_RANGE}", expected="an object: token → id"
        )
    # Older files have no type, but their content reveals it.
    kind = "Unigram" if isinstance(vocab, list) else "BPE" if model.get("merges") is not None else ""
    declared = content.get("added_tokens") or []
    added_location = f"{location}: added_tokens"
    if not isinstance(declared, list):
        raise InvalidInput(added_location, found=f"{declared!r:.40}", expected="a list of tokens")
    by_token: dict[str, dict[str, Any]] = {}
    for entry in declared:
        if not isinstance(entry, dict) or not isinstance(entry.get("content"), str) or type(entry.get("id")) is not int:
            raise InvalidInput(added_location, found=f"{entry!r:.60}", expected="{content: text, id: number, …}")
        if not _is_id(entry["id"]):
            raise InvalidInput(added_location, found=f"id {entry['id']}", expected=f"ids that are {_ID_RANGE}")
        if entry["content"]:  # The library ignores an empty token.
            by_token.setdefault(entry["content"], entry)
    entries = list(by_token.values())
    entries += _settings_entries(settings, {entry["content"] for entry in entries}, location)
    ids = assign_ids(model_ids, [entry["content"] for entry in entries])
    return TokenizerDefinition(
        location=location,
        kind=str(model["type"]) if isinstance(model.get("type"), str) else kind,
        content=content,
        settings=settings,
        model_ids=model_ids,
        ids=ids,
        added={entry["content"]: {flag: bool(entry.get(flag, FLAGS[flag])) for flag in FLAGS} for entry in entries},
        misnumbered=tuple(entry["content"] for entry in entries if entry["id"] != ids[entry["content"]]),
        merges=_merges(model.get("merges"), f"{location}: model.merges"),
    )


def assign_ids(model_ids: Mapping[str, int], added_tokens: Iterable[str]) -> dict[str, int]:
    """Return the ids of all tokens. ``added_tokens`` are in the order in which they are added.

    An added token that is in the model's vocabulary keeps its id. All others are numbered from the *number* of tokens
    in the vocabulary, so an id can occur twice if the vocabulary has gaps.
    """
    ids = dict(model_ids)
    next_id = len(model_ids)
    for token in added_tokens:
        if token not in ids:
            ids[token], next_id = next_id, next_id + 1
    return ids


def _settings_entries(settings: Mapping[str, Any], listed_tokens: set[str], location: str) -> list[dict[str, Any]]:
    """Return the added tokens in ``settings`` that are not in ``listed_tokens``, in the order of their ids."""
    decoder = settings.get("added_tokens_decoder")
    if not isinstance(decoder, Mapping):
        return []
    entries = []
    for number, entry in decoder.items():
        if isinstance(entry, Mapping) and isinstance(entry.get("content"), str) and str(number).isdecimal():
            if len(str(number)) > 12 or not _is_id(int(number)):
                raise InvalidInput(
                    f"{location}: added_tokens_decoder",
                    found=f"id {number!r:.40}",
                    expected=f"ids that are {_ID_RANGE}",
                )
            if entry["content"] and entry["content"] not in listed_tokens:
                entries.append({**entry, "id": int(number)})
    return sorted(entries, key=lambda entry: int(entry["id"]))


def _merges(value: object, location: str) -> tuple[tuple[str, str], ...]:
    if value is None:
        return ()
    if not isinstance(value, list):
        raise InvalidInput(location, found=f"{value!r:.40}", expected="a list of pairs")
    pairs = []
    for entry in value:  # Up to half a million entries, so the loop makes as few calls as possible.
        parts = entry.split(" ") if type(entry) is str else entry
        if type(parts) is not list or len(parts) != 2 or type(parts[0]) is not str or type(parts[1]) is not str:
            raise InvalidInput(location, found=f"{entry!r:.60}", expected="a pair of tokens")
        pairs.append((parts[0], parts[1]))
    return tuple(pairs)


def _is_id(number: object) -> bool:
    return type(number) is int and 0 <= number < _MAX_IDS


@dataclass(frozen=True)
class Vocabulary:
    """Tokens and their ids, including added tokens such as special tokens and chat markers.

    Args:
        ids: Ids by token. Contains only added tokens unless ``is_complete`` is true.
        digests: SHA-256 digests of binary vocabulary files (such as SentencePiece), by file name.
        is_complete: Whether ``ids`` contains every token.
        model_tokens: Tokens of the tokenizer's own vocabulary, without added tokens. None if they are unknown.
    """

    ids: Mapping[str, int]
    digests: Mapping[str, str] = field(default_factory=dict)
    is_complete: bool = True
    model_tokens: frozenset[str] | None = None


def read_vocabulary(source: Companions | Path) -> Vocabulary | None:
    """Return the vocabulary of a checkpoint, given its files or its directory. None if it has no tokenizer files."""
    files = list_companions(source) if isinstance(source, Path) else source
    contents = {name: files.read(name) for name in files if is_binary_vocabulary(name)}
    digests = {name: hashlib.sha256(content).hexdigest() for name, content in contents.items()}
    if (definition := read_tokenizer(files)) is not None:
        return Vocabulary(definition.ids, digests, model_tokens=frozenset(definition.model_ids))
    if not digests:
        return None
    pieces = next((items for content in contents.values() if (items := read_pieces(content)) is not None), None)
    added = added_ids(files, read_settings(files))
    return Vocabulary(added, digests, is_complete=False, model_tokens=None if pieces is None else frozenset(pieces))


def vocabulary_differences(first: Vocabulary, second: Vocabulary) -> tuple[list[str], list[str], list[str]]:
    """Compare the ids of two vocabularies. If one of them is incomplete, only added tokens are compared.

    Returns:
        Tokens with different ids, tokens only in ``first``, and tokens only in ``second``. If only one vocabulary has a
        token, and the other uses its id for a different token, it counts as a token with different ids, because that
        embedding row has two meanings.
    """
    ids_1, ids_2 = first.ids, second.ids
    if not (first.is_complete and second.is_complete):
        model_tokens = (first.model_tokens or frozenset()) | (second.model_tokens or frozenset())
        ids_1, ids_2 = (
            {token: number for token, number in ids.items() if token not in model_tokens} for ids in (ids_1, ids_2)
        )
    tokens_1 = {number: token for token, number in ids_1.items()}
    tokens_2 = {number: token for token, number in ids_2.items()}
    moved = [token for token, number in ids_1.items() if token in ids_2 and ids_2[token] != number]
    moved_set = set(moved)
    clashing = [
        token
        for number, token in tokens_1.items()
        if number in tokens_2 and tokens_2[number] != token and token not in moved_set and token not in ids_2
    ]
    clashing_set = set(clashing)
    only_1 = [token for token in ids_1 if token not in ids_2 and token not in clashing_set]
    only_2 = [token for token, number in ids_2.items() if token not in ids_1 and number not in tokens_1]
    return moved + clashing, only_1, only_2


def read_pieces(content: bytes) -> tuple[str, ...] | None:
    """Return the pieces of a SentencePiece model in the order of their ids, or None for other content.

    The file is a protocol buffer (https://github.com/google/sentencepiece, ``sentencepiece_model.proto``). Field 1 of
    the message is repeated, once per piece. Field 1 of a piece is its text.
    """
    try:
        pieces = [
            text.decode()
            for number, message in _fields(content)
            if number == 1
            for field, text in _fields(message)
            if field == 1
        ]
    except (ValueError, IndexError):  # UnicodeDecodeError is a ValueError.
        return None
    return tuple(pieces) or None


def _fields(content: bytes) -> list[tuple[int, bytes]]:
    """Return the numbers and bytes of a message's length-delimited fields. Invalid content raises an exception."""
    fields, position = [], 0
    while position < len(content):
        key, position = _varint(content, position)
        kind, number = key & 7, key >> 3
        if kind == 2:
            length, position = _varint(content, position)
            fields.append((number, content[position : position + length]))
            position += length
        elif kind in (1, 5):
            position += 8 if kind == 1 else 4
        elif kind == 0:
            _, position = _varint(content, position)
        else:
            raise ValueError("not a protocol buffer")
    if position != len(content):
        raise IndexError("a field ends after the message")
    return fields


def _varint(content: bytes, position: int) -> tuple[int, int]:
    """Return the variable-length integer at a position, and the position after it."""
    value = shift = 0
    while True:
        byte = content[position]
        value |= (byte & 127) << shift
        position, shift = position + 1, shift + 7
        if byte < 128:
            return value, position
        if shift > 63:
            raise ValueError("a number of more than 64 bits")
