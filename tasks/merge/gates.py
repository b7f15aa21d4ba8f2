"""Router rows of a mixture of experts, out of prompts: which hidden states should be sent to which expert.

A row is the mean of what the base makes of an expert's positive prompts, less the mean of its negative ones, of length
one; in a layer where nothing is left of the difference (the first sees the last token only, and prompts may end alike)
the positive prompts' alone. What it makes of a prompt is, in layer ``l``, the hidden state that enters that layer: of
the last token (``hidden``, ``hidden_last``) or the mean over all tokens (``hidden_avg``); or, in every layer, the sum
of its tokens' embeddings (``cheap_embed``, where both means are brought to length one first), for which no layer is
computed.

Prompts are read one by one, so no padding is in any mean. The base is asked in the process that holds models: its
tokenizer is what a stranger wrote. What it says is kept by content, like everything that a model was asked::

    recipe = with_gates(recipe, find=lambda ref: pinned[ref])      # the same recipe where nothing is to be computed
"""

from __future__ import annotations

import base64
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from pydantic import BaseModel, ConfigDict

from mergegate.merge_core import Recipe
from mergegate.merge_core.architecture import is_embedding
from mergegate.merge_core.checkpoint import numbers, open_checkpoint, patterns, read_into
from mergegate.merge_core.errors import InvalidInput
from mergegate.merge_core.recipe import GateRows, Mixture
from mergegate.tasks.checkpoints import Model, TellProgress, call_model_process, load_model
from mergegate.tasks.stage import Runtime, StageValue, advance, runtime, value_stage
from mergegate.tasks.store import StoredValue

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Array = NDArray[np.floating[Any]]

# Below this share of what the positive prompts give, the rest is rounding, and its direction means nothing.
_NOTHING_LEFT = 1e-6


class PromptPair(BaseModel):
    """What should, and what should not, be sent to an expert."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    positive: tuple[str, ...]
    negative: tuple[str, ...]


class GateQuestion(BaseModel):
    """What is asked of the base: one row a pair, in each layer; of an expert without prompts, zeros."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    mode: str
    experts: tuple[PromptPair, ...]


class RouterRows(StageValue):
    """Rows of length one, or zeros, as base64 of little-endian float32 ``[layers, rows, width]``."""

    layers: int
    rows: int
    width: int
    data: str

    def summary(self) -> str:
        return f"{self.rows} rows of {self.width} in {self.layers} layers"


Ask: TypeAlias = "Callable[[Model, GateQuestion, Runtime], StoredValue[RouterRows]]"


def with_gates(recipe: Recipe, find: Callable[[str], Model], ask: Ask | None = None) -> Recipe:
    """``recipe`` with the router rows that its prompts ask for, in every document of it.

    Args:
        find: The pinned model of a reference. Asked of bases only, and only where rows are to be computed.
        ask: :func:`router_rows`, as a task of a flow; None: the same without Prefect.

    Raises:
        InvalidInput: when the base cannot be loaded, or prompts leave nothing that tells an expert from nothing.
    """
    return recipe.map_documents(lambda document: _with_own_gates(document, find, ask))


def _with_own_gates(recipe: Recipe, find: Callable[[str], Model], ask: Ask | None) -> Recipe:
    mixture = recipe.mixture
    if mixture is None or not mixture.needs_prompts or mixture.gates is not None:
        return recipe
    said = (ask or router_rows.build)(find(str(recipe.base)), _question(mixture), runtime()).value
    gates = GateRows(said.layers, said.rows, said.width, base64.b64decode(said.data))
    _require_rows(gates, len(mixture.all_experts), str(recipe.base))
    return replace(recipe, mixture=replace(mixture, gates=gates))


def _require_rows(gates: GateRows, rows: int, where: str) -> None:
    """What a stranger's tokenizer had a hand in is looked at before it is believed."""
    import numpy as np

    found = np.frombuffer(gates.data, "<f4") if len(gates.data) % 4 == 0 else np.zeros(0)
    if gates.rows != rows or found.size != gates.layers * rows * gates.width or not np.isfinite(found).all():
        raise InvalidInput(f"router rows of {where}", found="numbers that are none", expected=f"{rows} rows a layer")


def _question(mixture: Mixture) -> GateQuestion:
    mode = "hidden" if mixture.gate_mode == "hidden_last" else mixture.gate_mode
    pairs = (PromptPair(positive=expert.positive, negative=expert.negative) for expert in mixture.all_experts)
    return GateQuestion(mode=mode, experts=tuple(pairs))


@value_stage("gates", version=1, subject="model")
def router_rows(model: Model, question: GateQuestion, runtime: Runtime) -> RouterRows:
    """The rows that ``question`` asks of ``model``.

    Raises:
        InvalidInput: see :func:`with_gates`.
    """
    found = call_model_process(
        compute_rows,
        (model, question, runtime.device),
        where=f"router rows of {model.name}",
        models=[model],
        on_progress=lambda done, total: advance(done, total, "prompts"),
    )
    return RouterRows(layers=found.layers, rows=found.rows, width=found.width, data=found.data)


class SerializedRouterRows(NamedTuple):
    """As :class:`RouterRows`, on its way between processes."""

    layers: int
    rows: int
    width: int
    data: str


def compute_rows(model: Model, question: GateQuestion, device: str, on_progress: TellProgress) -> SerializedRouterRows:
    """The rows of every expert: done in the process that holds models."""
    import numpy as np

    with _Reader(model, question.mode, device) as read:
        total = sum(len(pair.positive) + len(pair.negative) for pair in question.experts)
        done, rows = 0, []
        for number, pair in enumerate(question.experts):
            means = []
            for prompts in (pair.positive, pair.negative):
                states = []
                for prompt in prompts:
                    states.append(read.states(prompt))
                    on_progress(done := done + 1, total)
                means.append(np.mean(states, axis=0) if states else None)
            rows.append(
                _row(means, f"{model.name}: prompts of expert {number}", of_sums=question.mode == "cheap_embed")
            )
        known = next(row for row in rows if row is not None)
        stacked = np.stack([np.zeros_like(known) if row is None else row for row in rows], axis=1)
    layers, count, width = stacked.shape
    data = base64.b64encode(stacked.astype("<f4").tobytes()).decode()
    return SerializedRouterRows(layers, count, width, data)


def _row(means: Sequence[Array | None], where: str, *, of_sums: bool) -> Array | None:
    """``[layers, width]`` of length one: the positive mean less the negative one; None without positive prompts."""
    import numpy as np

    positive, negative = means
    if positive is None:
        return None
    alone = _normalised(positive, where)
    if negative is None:
        return alone
    rest = alone - _normalised(negative, where) if of_sums else positive - negative
    left = _lengths(rest) > _NOTHING_LEFT * (1.0 if of_sums else _lengths(positive))
    if not left.any():
        raise InvalidInput(
            where,
            found="nothing is left of them: positive and negative prompts give the same states",
            expected="texts that the base tells apart",
            remedy="write other prompts, or set gate_mode: random",
        )
    return np.where(left, rest / np.where(left, _lengths(rest), 1.0), alone)


def _lengths(states: Array) -> Array:
    import numpy as np

    lengths: Array = np.linalg.norm(states, axis=-1, keepdims=True)
    return lengths


def _normalised(states: Array, where: str) -> Array:
    import numpy as np

    lengths = _lengths(states)
    if not np.isfinite(lengths).all() or (lengths == 0).any():
        raise InvalidInput(
            where, found="hidden states that are zero or not finite", expected="a base that computes something"
        )
    return states / lengths


class _Reader:
    """What a model makes of a prompt: float64 ``[layers, width]``."""

    def __init__(self, model: Model, mode: str, device: str) -> None:
        self._model, self._mode, self._device = model, mode, device

    def __enter__(self) -> _Reader:
        if self._mode == "cheap_embed":
            self._embedding = _Embedding(self._model)
        else:
            self._context = load_model(self._model, dtype="auto", device=self._device)
            self._loaded = self._context.__enter__()
        return self

    def __exit__(self, *failure: Any) -> None:
        if self._mode != "cheap_embed":
            self._context.__exit__(*failure)

    def states(self, prompt: str) -> Array:
        if self._mode == "cheap_embed":
            return self._embedding.sum(prompt)
        import torch

        tokens = _tokens(self._loaded.tokenizer, prompt, self._model.name)
        limit = self._loaded.context
        if limit is not None and len(tokens) > limit:
            raise InvalidInput(
                f"{self._model.name}: the prompt {prompt[:40]!r}",
                found=f"{len(tokens)} tokens",
                expected=f"at most {limit}, for which the model was made",
                remedy="shorten it",
            )
        with torch.inference_mode():
            asked = torch.tensor([tokens], device=self._device)
            entering = self._loaded.network(asked, output_hidden_states=True, use_cache=False).hidden_states[:-1]
            states = torch.stack([layer[0].double() for layer in entering])
        states = states.mean(dim=1) if self._mode == "hidden_avg" else states[:, -1]
        found: Array = states.cpu().numpy()
        return found


class _Embedding:
    """Rows of a model's embeddings, read where they are needed, and its tokenizer."""

    def __init__(self, model: Model) -> None:
        import transformers

        where = f"{model.name} ({model.directory})"
        checkpoint = open_checkpoint(model.directory)
        tables = [tensor for tensor in checkpoint.stored() if is_embedding(tensor.name)]
        if len(tables) != 1 or tables[0].dtype.kind != "float":
            raise InvalidInput(where, found=f"{len(tables)} tables of embeddings", expected="one, of floating point")
        self._model, self._table = model, tables[0]
        self._layers = int(checkpoint.config.get("num_hidden_layers", 1))
        try:
            self._tokenizer: Any = transformers.AutoTokenizer.from_pretrained(
                model.directory, local_files_only=True, trust_remote_code=False
            )
        except Exception as error:  # whatever a file of the checkpoint makes transformers raise
            cause = " ".join(str(error).split()) or type(error).__name__
            raise InvalidInput(
                where, found=f"no tokenizer: {cause[:300]}", expected="one that can be loaded"
            ) from error

    def sum(self, prompt: str) -> Array:
        import numpy as np

        rows, width = self._table.shape
        total = np.zeros(width)
        size = width * self._table.dtype.size
        with self._table.file.open("rb") as file:
            for token in _tokens(self._tokenizer, prompt, self._model.name):
                if not 0 <= token < rows:
                    raise InvalidInput(
                        f"{self._model.name}: the prompt {prompt[:40]!r}",
                        found=f"token {token}",
                        expected=f"ids below {rows}, the rows of the embeddings",
                    )
                row = np.empty(size, np.uint8)
                read_into(file.fileno(), row.data, self._table.offset + token * size, self._table.file)
                total += numbers(patterns(row, self._table.dtype), self._table.dtype)
        return np.tile(total, (self._layers, 1))


def _tokens(tokenizer: Any, prompt: str, where: str) -> list[int]:
    """A prompt's tokens behind begin of text, where the tokenizer has it."""
    tokens = [int(token) for token in tokenizer(prompt)["input_ids"]]
    begin = tokenizer.bos_token_id
    if begin is not None and tokens[:1] != [begin]:
        tokens = [int(begin), *tokens]
    if not tokens:
        raise InvalidInput(f"{where}: the prompt {prompt[:40]!r}", found="no tokens", expected="a text with some")
    return tokens
