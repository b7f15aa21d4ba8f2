"""Parse the blocks of a recipe: ``tokenizer``, ``statistics``, ``router_repair``, and ``output: adapter``.

**The vocabulary of the result**, and rows of single tokens, in mergekit's format, with the key ``strangers`` added::

    tokenizer:
      source: union                      # or base, or a model
      tokens:
        <|im_start|>: {source: chat-model}                                          # this row for models without one
        <|new|>: {source: {kind: model_token, model: chat-model, token: hello}}     # the row of another token
        <|unused|>: {source: {kind: zero}, force: true}                             # zeros, in every model
      pad_to_multiple_of: 64
      strangers: dormant                 # treatment of ordinary tokens that the base lacks: see ``vocabulary/union.py``

**Calibration texts**, one per model, and the settings for reading them. Each model reads its text before the merge. The
measurements then replace the texts in the recipe. With ``router_repair``, which refits the routers of a merged mixture
of experts (HARC), the merge itself reads the texts, and :mod:`merge_core.architecture.experts.router_fit` computes
routers that replace the merged ones in the plan::

    merge_method: regmean
    models:
      - model: org/math
        text: texts/math.jsonl          # relative to the recipe; examples of this model's tasks
      - model: org/verse
        text: texts/verse.jsonl
    statistics: {documents: 256, max_length: 2048}
    router_repair: true                 # or {off_diagonals: 0.9}

**Adapters** on one base, combined into one adapter on that base. Without the last two lines, the same recipe produces a
merged model: the base with the combined adapter applied. So a method can produce an adapter only if its result is the
base plus a term that depends only on the task vectors::

    merge_method: ties
    base_model: BASE
    models:
    - {model: BASE+ADAPTER, parameters: {weight: 0.5, density: 0.5}}
    - {model: BASE+OTHER, parameters: {weight: 0.5, density: 0.5}}
    output: adapter
    rank: 16
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple, cast

from mergegate.merge_core.checkpoint import AnyTensor, StoredMoments
from mergegate.merge_core.checkpoint.vocabulary import STRANGERS, Strangers
from mergegate.merge_core.errors import FindingLog, InvalidInput, suggest
from mergegate.merge_core.methods import Method, merge_methods
from mergegate.merge_core.recipe.keys import (
    RecipeBlock,
    is_number,
    is_whole,
    known_mapping,
    refuse,
    require_value,
    switch,
)
from mergegate.merge_core.recipe.reference import CheckpointRef, parse_reference

_MOST_TOKENS = 100_000
_MOST_PADDING = 1 << 16
_MOST_READ = 1 << 20
_MOST_RANK = 4096
_NOT_FOR_ADAPTERS = ("slices", "modules", "tokenizer", "tokenizer_source", "chat_template", "name")


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
        """Return the fields that determine the result, but only ``source`` if the others have their defaults."""
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


def parse_tokenizer_choice(document: RecipeBlock, log: FindingLog) -> TokenizerChoice | None:
    """Return the tokenizer that a recipe selects, or None if it selects none."""
    if "tokenizer" in document and "tokenizer_source" in document:
        found, expected = "both 'tokenizer' and 'tokenizer_source'", "one of them"
        log.fault(document.location, found=found, expected=expected, remedy="remove one of them")
        return None
    location = document.location_of("tokenizer_source")
    if source := document.read("tokenizer_source", _source, None, log):
        return TokenizerChoice(source, location)
    return document.read("tokenizer", _tokenizer, None, log)


def _tokenizer(value: object, location: str, log: FindingLog) -> TokenizerChoice:
    if isinstance(value, str):
        remedy = f"write 'tokenizer_source: {value}'" if value.strip() else "remove it"
        raise refuse(value, location, "a mapping, such as {source: union}", remedy)
    if value == {}:
        return TokenizerChoice("union", location)
    block = known_mapping(value, location, ("source", "tokens", "pad_to_multiple_of", "strangers"), log)
    require_value(block, cast(Mapping[str, Any], value), "source")
    source = block.read("source", _source, "union", log)
    tokens = block.read("tokens", _tokens, (), log)
    padding = None if block.get("pad_to_multiple_of") == 0 else block.get("pad_to_multiple_of")  # as in mergekit
    if isinstance(padding, str) and padding.isascii() and padding.isdigit() and len(padding) < 10:
        padding = int(padding)
    if padding is not None and not is_whole(padding, 1, _MOST_PADDING):
        expected = f"a whole number from 1 to {_MOST_PADDING}"
        log.fault(block.location_of("pad_to_multiple_of"), found=f"{padding!r:.60}", expected=expected)
    strangers = block.get("strangers", "refuse")
    where = block.location_of("strangers")
    if not isinstance(strangers, str) or strangers not in STRANGERS:
        raise refuse(strangers, where, f"one of {', '.join(STRANGERS)}", suggest(str(strangers)[:60], STRANGERS))
    if strangers != "refuse" and source != "union":
        raise InvalidInput(where, found=f"{strangers} with source {source}", expected="source: union")
    return TokenizerChoice(
        source, f"{location}.source" if "source" in block else location, tokens, padding, cast(Strangers, strangers)
    )


def _source(value: object, location: str, log: FindingLog) -> str | CheckpointRef:
    if isinstance(value, str) and value.startswith("model:"):
        raise refuse(
            value,
            location,
            "union, base, or a model; the prefix 'model:' is of mergekit before 0.1",
            f"write {value.removeprefix('model:')!r}",
        )
    return str(value) if value in ("base", "union") else parse_reference(value, location, log)


def _tokens(value: object, location: str, log: FindingLog) -> tuple[TokenRow, ...]:
    if not isinstance(value, Mapping):
        raise refuse(value, location, "token: {source: ..., force: ...}")
    if len(value) > _MOST_TOKENS:
        raise InvalidInput(location, found=f"{len(value)} tokens", expected=f"at most {_MOST_TOKENS}")
    rows = []
    for token, entry in value.items():
        row_location = f"{location}.{token}"
        with log.collect():
            if not isinstance(token, str) or not token:
                raise refuse(token, row_location, "the text of a token", "put it in quotes")
            if entry is None or entry == {}:
                rows.append(TokenRow(token, None, force=False))
                continue
            row = known_mapping(entry, row_location, ("source", "force"), log)
            force, source = switch(row.get("force", False), row.location_of("force")), row.get("source")
            if force and source is None:
                expected = "a source for the row"
                raise InvalidInput(row.location_of("force"), found="true without a source", expected=expected)
            origin = None if source is None else _origin(source, row.location_of("source"), log)
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
        raise refuse(kind, f"{location}.kind", "zero or model_token")
    entry = known_mapping(value, location, ("kind", "model", "token", "token_id"))
    if "model" not in entry:
        raise InvalidInput(location, found="no 'model'", expected="{kind: model_token, model: ..., token: ...}")
    token, number = entry.get("token"), entry.get("token_id")
    if (token is None) == (number is None):
        found = "both token and token_id" if token is not None else "neither token nor token_id"
        raise InvalidInput(location, found=found, expected="exactly one of them")
    if token is not None and not isinstance(token, str):
        raise refuse(token, entry.location_of("token"), "the text of a token")
    if number is not None and (type(number) is not int or number < 0):
        raise refuse(number, entry.location_of("token_id"), "a whole number of at least 0")
    return RowOrigin(parse_reference(entry.get("model"), entry.location_of("model")), token, number)


@dataclass(frozen=True, order=True)
class CalibrationReading:
    """Settings for reading calibration texts.

    Args:
        documents: Number of documents to read, from the start of each text.
        max_length: Largest number of tokens per forward pass. Longer documents are split into several windows.
        field: JSON field that contains the text of a line.
        diagonal_above: Largest input width for which the full moment matrix is stored. For wider inputs, only the
            diagonal is stored: the full matrix for width 14336 takes 0.4 GB.
    """

    documents: int = 256
    max_length: int = 2048
    field: str = "text"
    diagonal_above: int = 8192

    def canonical(self) -> dict[str, Any]:
        return asdict(self)

    def content_key(self) -> dict[str, Any]:
        """Return the settings that belong in a cache key, which excludes ``field``."""
        return {name: value for name, value in self.canonical().items() if name != "field"}


class CalibrationRequest(NamedTuple):
    """A statistic to measure with one model and its calibration text. Equal requests share one result.

    ``text`` is a path as the recipe writes it, and ``statistic`` a value of :attr:`.Traits.reads_text`.
    """

    model: str
    text: str
    statistic: str
    reading: CalibrationReading


@dataclass(frozen=True)
class InputMeasurements:
    """Measurements of one model on its calibration text.

    Args:
        digest: Digest of the measurements.
        text: SHA-256 digest of the text.
        moments: Input moments, by name of the matrix that is multiplied with the input.
        importance: Importance of each element, in the shape of the tensor, by tensor name.
    """

    digest: str
    text: str
    moments: Mapping[str, StoredMoments] = field(default_factory=dict)
    importance: Mapping[str, AnyTensor] = field(default_factory=dict)


def parse_reading(value: object, location: str, method: Method, reads_texts: bool) -> CalibrationReading:
    """Return the settings in ``statistics`` of a recipe. ``reads_texts`` states whether the method or a repair does."""
    if not reads_texts:
        raise InvalidInput(
            location, found=f"{method.name} does not read texts", expected="no such key", remedy="remove it"
        )
    block = known_mapping(value, location, tuple(CalibrationReading().canonical()))
    if "diagonal_above" in block and method.traits.reads_text != "moments":
        found = f"{method.name} does not store matrices"
        block.fault("diagonal_above", found=found, expected="no such key", remedy="remove it")
    minimums = {"documents": 1, "max_length": 2, "diagonal_above": 0}
    for key, setting in block.content.items():
        if key == "field" and not (isinstance(setting, str) and setting):
            block.fault(key, expected="the name of a field")
        if key != "field" and not is_whole(setting, minimums[key], _MOST_READ):
            block.fault(key, expected=f"a whole number of at least {minimums[key]}")
    return CalibrationReading(**block.content)


@dataclass(frozen=True)
class RouterRepair:
    """Settings of the repair of routers.

    Args:
        off_diagonals: Factor of the off-diagonal elements of each curvature matrix, from 0 to 1.
    """

    off_diagonals: float = 0.9

    def content_key(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class RepairedRouters:
    """New routers of a merge.

    Args:
        digest: Digest of the routers.
        texts: SHA-256 digest of the text of each parent, by reference.
        tensors: Weights and biases of the new routers, by the names that the merge writes.
        divergence: Mean Kullback-Leibler divergence from the routing of the parents, before and after, in nats.
        agreement: Mean share of the experts that the parents select that the merge selects too, before and after.
        layers: Number of layers with a router. Layers whose merged router was closer to the parents keep it, so
            ``tensors`` can have fewer.
        new_layers: Number of layers with a new router.
    """

    digest: str
    texts: Mapping[str, str]
    tensors: Mapping[str, AnyTensor]
    divergence: tuple[float, float]
    agreement: tuple[float, float]
    layers: int
    new_layers: int


def parse_router_repair(value: object, location: str) -> RouterRepair | None:
    """Return the settings in ``router_repair`` of a recipe, or None if there is no repair."""
    if isinstance(value, bool):
        return RouterRepair() if value else None
    block = known_mapping(value, location, ("off_diagonals",))
    factor = block.get("off_diagonals", RouterRepair.off_diagonals)
    if not is_number(factor, 0, 1):
        block.fault("off_diagonals", expected="a number from 0 to 1")
    return RouterRepair(float(factor))


@dataclass(frozen=True)
class AdapterOutput:
    """Settings of the adapter that a recipe produces.

    Args:
        rank: Rank of the adapter's factors. None means the sum of the ranks of all inputs, which loses nothing.
        is_sum: Whether the result is a weighted sum of the adapters' products.
    """

    rank: int | None
    is_sum: bool

    def canonical(self) -> dict[str, Any]:
        return {"kind": "adapter", "rank": self.rank}


def parse_output(
    document: RecipeBlock, method: Method, base: CheckpointRef | None, models: Sequence[CheckpointRef]
) -> AdapterOutput | None:
    """Return the settings in ``output`` and ``rank`` of a recipe, or None if its result is a model."""
    output, rank = document.get("output"), document.get("rank")
    if output in (None, "model"):
        if rank is not None:
            document.fault("rank", found="rank without output: adapter", expected="output: adapter")
        return None
    if output != "adapter":
        raise refuse(output, document.location_of("output"), "model or adapter")
    if method.traits.adapters is None:
        fitting = [name for name, candidate in merge_methods().items() if candidate.traits.adapters]
        raise InvalidInput(
            document.location_of("output"),
            found=f"{method.name} cannot produce an adapter",
            expected=f"one of {', '.join(fitting)}, which add a change of low rank to the base",
        )
    for key in _NOT_FOR_ADAPTERS:
        if key in document:
            raise InvalidInput(document.location_of(key), found="it is set", expected="no such key for an adapter")
    if rank is not None and not is_whole(rank, 1, _MOST_RANK):
        raise refuse(rank, document.location_of("rank"), f"a whole number from 1 to {_MOST_RANK}")
    if rank is None and method.traits.adapters != "sum":
        expected = f"a rank, because the result of {method.name} has no rank of its own"
        raise InvalidInput(document.location_of("rank"), found="not set", expected=expected)
    adapted = [model for model in models if model != base or model.adapter]
    bases = dict.fromkeys(CheckpointRef(model.path, model.revision) for model in adapted)
    plain = [model for model in adapted if not model.adapter]
    if plain or len(bases) != 1 or (base is not None and [base] != list(bases)):
        raise InvalidInput(
            document.location_of("models"),
            found=", ".join(map(str, plain or [*bases, *([base] if base else [])])),
            expected="adapters on one base, each written as base+adapter" + (f", with the base {base}" if base else ""),
        )
    return AdapterOutput(rank, is_sum=method.traits.adapters == "sum")
