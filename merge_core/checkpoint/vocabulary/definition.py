"""A tokenizer as its files define it: model, pipeline, added tokens, and the id of every token.

An added token that the model's vocabulary lacks has the id that comes next when the list is gone through, *whatever the
file says*: that is what the tokenizers library does (checked with 0.23), so it is what a model was trained with. The
rule is here, once.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeAlias

from mergegate.merge_core.checkpoint.companions import Companions, list_companions
from mergegate.merge_core.errors import InvalidInput
from mergegate.merge_core.parsing import JsonBounds

# Those of Gemma, the largest today, have 33 MB and two million values.
TOKENIZER_BOUNDS = JsonBounds(size=96 << 20, values=4_000_000)
NAME = "tokenizer.json"
SETTINGS = "tokenizer_config.json"
SPECIAL = "special_tokens_map.json"
MERGES = "merges.txt"
_FILES = (NAME, SETTINGS, SPECIAL, "vocab.json", MERGES, "vocab.txt", "added_tokens.json")
_MAX_MERGES_BYTES = 64 << 20
# Of an added token: how it is found in a text.
FLAGS = MappingProxyType({"single_word": False, "lstrip": False, "rstrip": False, "normalized": True, "special": False})


_Key: TypeAlias = tuple[tuple[str, Path | bytes | None], ...]
_read: ContextVar[dict[_Key, TokenizerDefinition | None] | None] = ContextVar("read tokenizers", default=None)


@dataclass(frozen=True)
class TokenizerDefinition:
    """What a tokenizer is.

    Args:
        where: Its file, for messages.
        kind: ``BPE``, ``Unigram``, ``WordPiece``, ``WordLevel``, or what else the file says.
        content: ``tokenizer.json``; of older files (``vocab.json``, ``merges.txt``) the same in that form.
        settings: ``tokenizer_config.json``, with special tokens of ``special_tokens_map.json``.
        model_ids: Ids of the model's own vocabulary.
        ids: Ids of all tokens, as the library gives them.
        added: Added tokens in the order of the file, each with its flags.
        misnumbered: Added tokens whose id in the file is another.
        merges: Of BPE, pairs in their order.
        has_pipeline: Whether the files also say how a text is split before the model sees it. Only ``tokenizer.json``
            does; next to ``vocab.json`` or ``vocab.txt`` the tokenizer's class decides that.
    """

    where: str
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
        """``model`` of the file."""
        found: Mapping[str, Any] = self.content["model"]
        return found


def read_tokenizer(source: Companions | Path) -> TokenizerDefinition | None:
    """Return the tokenizer of a checkpoint; None if it has none that can be read without a library.

    ``tokenizer.json`` counts first, then ``vocab.json`` with ``merges.txt``, then ``vocab.txt``.

    Args:
        source: Files of the checkpoint, or its directory.

    Raises:
        InvalidInput: A tokenizer file that is not what its name says, or is not a plain file in its directory.
    """
    files = list_companions(source) if isinstance(source, Path) else source
    known = _read.get()
    key = tuple((name, files.sources.get(name)) for name in _FILES)
    if known is None:
        return _read_now(files)
    if key not in known:
        known[key] = _read_now(files)
    return known[key]


@contextmanager
def cached_tokenizers() -> Iterator[None]:
    """Inside, every tokenizer is read at most once: the largest take a second each, and a check asks several times."""
    if _read.get() is not None:
        yield
        return
    token = _read.set({})
    try:
        yield
    finally:
        _read.reset(token)


def _read_now(files: Companions) -> TokenizerDefinition | None:
    settings = read_settings(files)
    content = files.json(NAME, TOKENIZER_BOUNDS)
    if content is not None:
        return define(content, settings, files.where(NAME))
    model = _older_model(files)
    if model is None:
        return None
    name, older = model
    return replace(
        define({**older, "added_tokens": _older_added(files, settings)}, settings, files.where(name)),
        has_pipeline=False,
    )


def _older_model(files: Companions) -> tuple[str, dict[str, Any]] | None:
    """Return the file of a vocabulary as older libraries write it, and its content in the form of tokenizer.json."""
    vocab = files.json("vocab.json", TOKENIZER_BOUNDS)
    if vocab is not None:
        if MERGES not in files:
            return "vocab.json", {"model": {"vocab": vocab}}
        text = files.text(MERGES, _MAX_MERGES_BYTES, "merges, one per line")
        lines = [line.rstrip("\r") for line in text.split("\n")]
        merges = [line for line in lines if line.strip() and not line.startswith("#version")]
        return "vocab.json", {"model": {"vocab": vocab, "type": "BPE", "merges": merges}}
    if "vocab.txt" not in files:
        return None
    # A token per line; the last of equal ones counts, as in the library.
    lines = files.text("vocab.txt", _MAX_MERGES_BYTES, "tokens, one per line").removesuffix("\n").split("\n")
    return "vocab.txt", {"model": {"vocab": {line.rstrip(): number for number, line in enumerate(lines)}}}


def _older_added(files: Companions, settings: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the added tokens that files next to a vocabulary list, in the order of their ids."""
    more = added_ids(files, settings)
    declared = settings.get("added_tokens_decoder")
    flags = {
        entry["content"]: {flag: entry[flag] for flag in FLAGS if flag in entry}
        for entry in (declared.values() if isinstance(declared, Mapping) else ())
        if isinstance(entry, Mapping) and isinstance(entry.get("content"), str)
    }
    return [
        {**flags.get(token, {}), "content": token, "id": more[token]} for token in sorted(more, key=more.__getitem__)
    ]


def read_settings(files: Companions) -> dict[str, Any]:
    """Return ``tokenizer_config.json``, with the special tokens of ``special_tokens_map.json`` if it lists none itself.

    Raises:
        InvalidInput: One of the files is not a JSON object.
    """
    settings = files.json(SETTINGS, TOKENIZER_BOUNDS) or {}
    if "added_tokens_decoder" in settings:  # Then transformers does not read the older file.
        return settings
    return {**(files.json(SPECIAL, TOKENIZER_BOUNDS) or {}), **settings}


def added_ids(files: Companions, settings: Mapping[str, Any]) -> dict[str, int]:
    """Return the ids of added tokens that ``added_tokens.json`` and ``tokenizer_config.json`` list.

    Raises:
        InvalidInput: An id that is not a whole number from 0.
    """
    listed = files.json("added_tokens.json", TOKENIZER_BOUNDS) or {}
    if not all(type(number) is int and number >= 0 for number in listed.values()):
        raise InvalidInput(files.where("added_tokens.json"), found="ids that are not numbers", expected="token → id")
    found = {token: number for token, number in listed.items() if token}
    for entry in _entries_of_settings(settings, set(), files.where(SETTINGS)):
        found.setdefault(entry["content"], entry["id"])
    return found


def define(content: Mapping[str, Any], settings: Mapping[str, Any], where: str) -> TokenizerDefinition:
    """The tokenizer that a parsed ``tokenizer.json`` defines.

    Raises:
        InvalidInput: A part that is not of its shape.
    """
    model = content.get("model")
    vocab = model.get("vocab") if isinstance(model, Mapping) else None
    if not isinstance(model, Mapping) or not isinstance(vocab, (dict, list)):
        raise InvalidInput(f"{where}: model.vocab", found=f"{vocab!r:.40}", expected="a vocabulary")
    own = _own_ids(vocab, f"{where}: model.vocab")
    entries = _entries(content.get("added_tokens"), f"{where}: added_tokens")
    entries += _entries_of_settings(settings, {entry["content"] for entry in entries}, where)
    ids = given_ids(own, [entry["content"] for entry in entries])
    return TokenizerDefinition(
        where=where,
        kind=_kind(model),
        content=content,
        settings=settings,
        model_ids=own,
        ids=ids,
        added={entry["content"]: {flag: bool(entry.get(flag, FLAGS[flag])) for flag in FLAGS} for entry in entries},
        misnumbered=tuple(entry["content"] for entry in entries if entry["id"] != ids[entry["content"]]),
        merges=_merges(model.get("merges"), f"{where}: model.merges"),
    )


def given_ids(model_ids: Mapping[str, int], added: Iterable[str]) -> dict[str, int]:
    """Ids of the model's tokens and of added ones, in the order in which they are added.

    An added token that the model has keeps its id. The others are counted on from the *number* of the model's tokens;
    so where a vocabulary has holes, an id can be given twice.
    """
    ids = dict(model_ids)
    following = len(model_ids)
    for token in added:
        if token not in ids:
            ids[token], following = following, following + 1
    return ids


def _kind(model: Mapping[str, Any]) -> str:
    if isinstance(model.get("type"), str):
        return str(model["type"])
    if isinstance(model["vocab"], list):  # Older files do not say; what they have tells.
        return "Unigram"
    return "BPE" if model.get("merges") is not None else ""


def _own_ids(vocab: dict[str, Any] | list[Any], where: str) -> dict[str, int]:
    if isinstance(vocab, list):  # Unigram: [token, score] in the order of the ids.
        listed = [item[0] if isinstance(item, list) and len(item) == 2 else None for item in vocab]
        if not all(isinstance(token, str) for token in listed):
            raise InvalidInput(where, found="entries that are no tokens", expected="[token, score]")
        return {str(token): number for number, token in enumerate(listed)}
    if not all(type(number) is int and number >= 0 for number in vocab.values()):
        raise InvalidInput(where, found="ids that are not whole numbers from 0", expected="token → id")
    return dict(vocab)


def _entries(listed: object, where: str) -> list[dict[str, Any]]:
    entries = listed or []
    if not isinstance(entries, list):
        raise InvalidInput(where, found=f"{listed!r:.40}", expected="a list of tokens")
    found: dict[str, dict[str, Any]] = {}
    for entry in entries:
        if not isinstance(entry, dict) or not isinstance(entry.get("content"), str) or type(entry.get("id")) is not int:
            raise InvalidInput(where, found=f"{entry!r:.60}", expected="{content: text, id: number, …}")
        if entry["id"] < 0:
            raise InvalidInput(where, found=f"id {entry['id']}", expected="ids that are whole numbers from 0")
        if entry["content"]:  # The library passes over an empty one.
            found.setdefault(entry["content"], entry)
    return list(found.values())


def _entries_of_settings(settings: Mapping[str, Any], known: set[str], where: str) -> list[dict[str, Any]]:
    """Added tokens that only ``tokenizer_config.json`` has: transformers adds them in the order of their ids."""
    listed = settings.get("added_tokens_decoder")
    if not isinstance(listed, Mapping):
        return []
    more = []
    for number, entry in listed.items():
        if isinstance(entry, Mapping) and isinstance(entry.get("content"), str) and str(number).isdecimal():
            if len(str(number)) > 12:
                raise InvalidInput(f"{where}: added_tokens_decoder", found=f"id {number!r:.40}", expected="an id")
            if entry["content"] and entry["content"] not in known:
                more.append({**entry, "id": int(number)})
    return sorted(more, key=lambda entry: int(entry["id"]))


def _merges(listed: object, where: str) -> tuple[tuple[str, str], ...]:
    if listed is None:
        return ()
    if not isinstance(listed, list):
        raise InvalidInput(where, found=f"{listed!r:.40}", expected="a list of pairs")
    pairs = []
    for entry in listed:  # Half a million of them: looked at with as few calls as can be.
        parts = entry.split(" ") if type(entry) is str else entry
        if type(parts) is not list or len(parts) != 2 or type(parts[0]) is not str or type(parts[1]) is not str:
            raise InvalidInput(where, found=f"{entry!r:.60}", expected="two tokens")
        pairs.append((parts[0], parts[1]))
    return tuple(pairs)
