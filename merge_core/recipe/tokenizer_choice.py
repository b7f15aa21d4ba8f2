"""Parse ``tokenizer_source`` and ``tokenizer`` of a recipe: the vocabulary of the result, and rows of single tokens.

The format is mergekit's, with one additional key (``strangers``)::

    tokenizer:
      source: union                      # or base, or a model
      tokens:
        <|im_start|>: {source: chat-model}                                          # this row for models without one
        <|new|>: {source: {kind: model_token, model: chat-model, token: hello}}     # the row of another token
        <|unused|>: {source: {kind: zero}, force: true}                             # zeros, in every model
      pad_to_multiple_of: 64
      strangers: dormant                 # treatment of ordinary tokens that the base lacks: see ``vocabulary/union.py``
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

from mergegate.merge_core.checkpoint.vocabulary import STRANGERS, Strangers
from mergegate.merge_core.errors import FindingLog, InvalidInput, suggest
from mergegate.merge_core.recipe.keys import known_mapping, require_value
from mergegate.merge_core.recipe.reference import CheckpointRef, parse_reference

_KEYS = ("source", "tokens", "pad_to_multiple_of", "strangers")
_MOST_TOKENS = 100_000
_MOST_PADDING = 1 << 16


@dataclass(frozen=True)
class RowOrigin:
    """Source of a token's row in the embeddings.

    Args:
        model: Model that provides the row. None means a row of zeros.
        token: Token whose row is copied, if it is a different token.
        token_id: ID of the token whose row is copied, as an alternative to ``token``.
    """

    model: CheckpointRef | None
    token: str | None = None
    token_id: int | None = None

    def canonical(self) -> dict[str, Any]:
        """Return the fields as JSON-compatible data."""
        return {"model": str(self.model) if self.model else None, "token": self.token, "token_id": self.token_id}


@dataclass(frozen=True)
class TokenRow:
    """Rule in a recipe for one token's row in the embeddings.

    Args:
        token: Text of the token. If no tokenizer has it, it is added to the tokenizer of the result.
        origin: Source of the row for models that lack the token. None selects the general rule for missing tokens.
        force: Whether ``origin`` also replaces the row of models that have the token.
    """

    token: str
    origin: RowOrigin | None
    force: bool


@dataclass(frozen=True)
class TokenizerChoice:
    """Tokenizer that a recipe selects for the result.

    Args:
        source: ``base``, ``union`` or a checkpoint.
        location: Location in the recipe, for messages.
        tokens: Rules for single tokens.
        pad_to_multiple_of: Pad the token table to a multiple of this number of rows. Default: no padding.
        strangers: How a union treats ordinary tokens that the base lacks.
    """

    source: str | CheckpointRef
    location: str
    tokens: tuple[TokenRow, ...] = ()
    pad_to_multiple_of: int | None = None
    strangers: Strangers = "refuse"

    def canonical(self) -> dict[str, Any]:
        """Return the fields that determine the result, as JSON-compatible data.

        If all settings other than ``source`` have their defaults, they are omitted.
        """
        if not self.tokens and self.pad_to_multiple_of is None and self.strangers == "refuse":
            return {"tokenizer_source": str(self.source)}
        return {
            "tokenizer_source": str(self.source),
            "tokenizer": {
                "tokens": [
                    [row.token, row.origin.canonical() if row.origin else None, row.force] for row in self.tokens
                ],
                "pad_to_multiple_of": self.pad_to_multiple_of,
                "strangers": self.strangers,
            },
        }


def parse_tokenizer_choice(content: Mapping[str, Any], location: str, log: FindingLog) -> TokenizerChoice | None:
    """Return the tokenizer that a recipe selects, or None if it selects none.

    Raises:
        InvalidInput: A value is invalid.
    """
    if "tokenizer" in content and "tokenizer_source" in content:
        raise InvalidInput(
            location,
            found="both 'tokenizer' and 'tokenizer_source'",
            expected="one of them",
            remedy="remove one of them",
        )
    if "tokenizer_source" in content:
        location = f"{location}: tokenizer_source"
        return TokenizerChoice(_source(content["tokenizer_source"], location, log), location)
    if "tokenizer" not in content:
        return None
    location, value = f"{location}: tokenizer", content["tokenizer"]
    if isinstance(value, str):
        remedy = f"write 'tokenizer_source: {value}'" if value.strip() else "remove it"
        raise InvalidInput(
            location, found=f"{value!r:.60}", expected="a mapping, such as {source: union}", remedy=remedy
        )
    if value == {}:
        return TokenizerChoice("union", location)
    block = known_mapping(value, location, _KEYS, log)
    require_value(value, "source", f"{location}.source")
    source: str | CheckpointRef = "union"
    tokens: tuple[TokenRow, ...] = ()
    with log.collect():
        source = _source(block.get("source", "union"), f"{location}.source", log)
    with log.collect():
        tokens = _tokens(block.get("tokens"), f"{location}.tokens", log)
    padding = None if block.get("pad_to_multiple_of") == 0 else block.get("pad_to_multiple_of")  # as in mergekit
    if isinstance(padding, str) and padding.isascii() and padding.isdigit() and len(padding) < 10:
        padding = int(padding)
    if padding is not None and (type(padding) is not int or not 1 <= padding <= _MOST_PADDING):
        expected = f"a whole number from 1 to {_MOST_PADDING}"
        log.fault(f"{location}.pad_to_multiple_of", found=f"{padding!r:.60}", expected=expected)
    strangers = block.get("strangers", "refuse")
    if not isinstance(strangers, str) or strangers not in STRANGERS:
        raise InvalidInput(
            f"{location}.strangers",
            found=f"{strangers!r:.60}",
            expected=f"one of {', '.join(STRANGERS)}",
            remedy=suggest(str(strangers)[:60], STRANGERS),
        )
    if strangers != "refuse" and source != "union":
        raise InvalidInput(f"{location}.strangers", found=f"{strangers} with source {source}", expected="source: union")
    source_location = f"{location}.source" if "source" in block else location
    return TokenizerChoice(source, source_location, tokens, padding, cast(Strangers, strangers))


def _source(value: object, location: str, log: FindingLog) -> str | CheckpointRef:
    if isinstance(value, str) and value.startswith("model:"):
        raise InvalidInput(
            location,
            found=f"{value!r:.60}",
            expected="union, base, or a model; the prefix 'model:' is of mergekit before 0.1",
            remedy=f"write {value.removeprefix('model:')!r}",
        )
    return str(value) if value in ("base", "union") else parse_reference(value, location, log)


def _tokens(value: object, location: str, log: FindingLog) -> tuple[TokenRow, ...]:
    if value is None:
        return ()
    if not isinstance(value, Mapping):
        raise InvalidInput(location, found=f"{value!r:.60}", expected="token: {source: ..., force: ...}")
    if len(value) > _MOST_TOKENS:
        raise InvalidInput(location, found=f"{len(value)} tokens", expected=f"at most {_MOST_TOKENS}")
    rows = []
    for token, entry in value.items():
        row_location = f"{location}.{token}"
        if not isinstance(token, str) or not token:
            expected = "the text of a token"
            log.fault(row_location, found=f"{token!r:.60}", expected=expected, remedy="put it in quotes")
            continue
        if entry is None or entry == {}:
            rows.append(TokenRow(token, None, force=False))
            continue
        with log.collect():
            content = known_mapping(entry, row_location, ("source", "force"), log)
            force, source = content.get("force", False), content.get("source")
            if not isinstance(force, bool):
                raise InvalidInput(f"{row_location}.force", found=f"{force!r:.60}", expected="true or false")
            if force and source is None:
                expected = "a source for the row"
                raise InvalidInput(f"{row_location}.force", found="true without a source", expected=expected)
            origin = None if source is None else _origin(source, f"{row_location}.source", log)
            rows.append(TokenRow(token, origin, force))
    return tuple(rows)


def _origin(value: object, location: str, log: FindingLog) -> RowOrigin:
    if not isinstance(value, Mapping) or "kind" not in value:
        return RowOrigin(parse_reference(value, location, log))
    kind = value["kind"]
    if kind == "zero":
        known_mapping(value, location, ("kind",))
        return RowOrigin(None)
    if kind != "model_token":
        raise InvalidInput(f"{location}.kind", found=f"{kind!r:.60}", expected="zero or model_token")
    entry = known_mapping(value, location, ("kind", "model", "token", "token_id"))
    if "model" not in entry:
        raise InvalidInput(location, found="no 'model'", expected="{kind: model_token, model: ..., token: ...}")
    token, number = entry.get("token"), entry.get("token_id")
    if (token is None) == (number is None):
        found = "both token and token_id" if token is not None else "neither token nor token_id"
        raise InvalidInput(location, found=found, expected="exactly one of them")
    if token is not None and not isinstance(token, str):
        raise InvalidInput(f"{location}.token", found=f"{token!r:.60}", expected="the text of a token")
    if number is not None and (type(number) is not int or number < 0):
        raise InvalidInput(f"{location}.token_id", found=f"{number!r:.60}", expected="a whole number of at least 0")
    return RowOrigin(parse_reference(entry["model"], f"{location}.model"), token, number)
