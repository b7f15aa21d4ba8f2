"""Compute the router rows of a mixture of experts from prompts.

A router row decides which hidden states the router sends to an expert. It is the mean state of the expert's positive
prompts minus the mean state of its negative prompts, scaled to length one. In a layer where the two means are equal,
the row is the mean of the positive prompts alone. This happens in the first layer, which sees only the last token, if
all prompts end with the same token.

The gate mode defines the state of a prompt in layer ``l``:

* ``hidden``, ``hidden_last``: the hidden state of the last token at the input of the layer;
* ``hidden_avg``: the mean of these hidden states over all tokens;
* ``cheap_embed``: the sum of the embeddings of all tokens, the same in every layer. No layer is computed, and both
  means are scaled to length one before they are subtracted.

The base reads one prompt at a time, so no mean contains padding. It runs in the model process, because its tokenizer is
untrusted code.
"""

from __future__ import annotations

import base64
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel

from mergegate.merge_core.architecture import is_embedding
from mergegate.merge_core.checkpoint import numbers, open_checkpoint, patterns
from mergegate.merge_core.errors import InvalidInput
from mergegate.merge_core.recipe import GateRows
from mergegate.tasks.base.stage import Runtime, StageValue, advance, value_stage
from mergegate.tasks.models.checkpoints import Model, TellProgress, call_model_process, load_model
from mergegate.tasks.models.checkpoints.hub import element_reader

Array: TypeAlias = NDArray[np.floating[Any]]

# A difference shorter than this share of the positive mean is rounding error, so its direction is meaningless.
_MIN_LENGTH = 1e-6


class PromptPair(BaseModel, frozen=True, extra="forbid"):
    """Prompts that the router should send to an expert (positive) and prompts that it should not send (negative)."""

    positive: tuple[str, ...]
    negative: tuple[str, ...]


class GateRequest(BaseModel, frozen=True, extra="forbid"):
    """Request for the router rows of all experts, with one pair of prompt lists per expert.

    The answer has one row per pair and layer. The rows of an expert without positive prompts are zero.
    """

    mode: str
    experts: tuple[PromptPair, ...]


class RouterRows(StageValue):
    """Router rows of all layers. Each row has length one or is zero.

    ``data`` is the Base64 form of ``[layers, rows, width]`` in little-endian float32.
    """

    layers: int
    rows: int
    width: int
    data: str

    def summary(self) -> str:
        return f"{self.rows} rows of {self.width} in {self.layers} layers"


@value_stage("gates", version=1, subject="model")
def router_rows(model: Model, question: GateRequest, runtime: Runtime) -> RouterRows:
    """Return the router rows that ``question`` requests from ``model``.

    Raises:
        InvalidInput: The model cannot be loaded, or its states do not distinguish positive from negative prompts.
    """
    result = call_model_process(
        compute_rows,
        (model, question, runtime.device),
        location=f"router rows of {model.name}",
        models=[model],
        on_progress=lambda done, total: advance(done, total, "prompts"),
    )
    data = base64.b64encode(result.data).decode()
    return RouterRows(layers=result.layers, rows=result.rows, width=result.width, data=data)


def compute_rows(model: Model, request: GateRequest, device: str, on_progress: TellProgress) -> GateRows:
    """Return the router rows of all experts. This function runs in the model process."""
    with _open_state_reader(model, request.mode, device) as read_states:
        total = sum(len(pair.positive) + len(pair.negative) for pair in request.experts)
        prompts_done, rows = 0, []
        for number, pair in enumerate(request.experts):
            means = []
            for prompts in (pair.positive, pair.negative):
                states = []
                for prompt in prompts:
                    states.append(read_states(prompt))
                    on_progress(prompts_done := prompts_done + 1, total)
                means.append(np.mean(states, axis=0) if states else None)
            rows.append(
                _router_row(means, f"{model.name}: prompts of expert {number}", of_sums=request.mode == "cheap_embed")
            )
        computed = next(row for row in rows if row is not None)
        stacked = np.stack([np.zeros_like(computed) if row is None else row for row in rows], axis=1)
    layers, count, width = stacked.shape
    return GateRows(layers, count, width, stacked.astype("<f4").tobytes())


def _router_row(means: Sequence[Array | None], location: str, *, of_sums: bool) -> Array | None:
    """Return the rows of one expert, ``[layers, width]`` of length one, or None if it has no positive prompts.

    ``means`` are the mean states of the positive and of the negative prompts. With ``of_sums``, they are sums of
    embeddings, which are scaled to length one before subtraction.
    """
    positive, negative = means
    if positive is None:
        return None
    direction = _normalized(positive, location)
    if negative is None:
        return direction
    difference = direction - _normalized(negative, location) if of_sums else positive - negative
    is_significant = _lengths(difference) > _MIN_LENGTH * (1.0 if of_sums else _lengths(positive))
    if not is_significant.any():
        raise InvalidInput(
            location,
            found="positive and negative prompts with the same states",
            expected="prompts that the base distinguishes",
            remedy="change the prompts, or set gate_mode: random",
        )
    return np.where(is_significant, difference / np.where(is_significant, _lengths(difference), 1.0), direction)


def _lengths(states: Array) -> Array:
    lengths: Array = np.linalg.norm(states, axis=-1, keepdims=True)
    return lengths


def _normalized(states: Array, location: str) -> Array:
    lengths = _lengths(states)
    if not np.isfinite(lengths).all() or (lengths == 0).any():
        raise InvalidInput(
            location, found="hidden states that are zero, NaN or infinite", expected="finite hidden states"
        )
    return states / lengths


@contextmanager
def _open_state_reader(model: Model, mode: str, device: str) -> Iterator[Callable[[str], Array]]:
    """Yield a function that returns the model's states for a prompt: float64 ``[layers, width]``."""
    if mode == "cheap_embed":
        yield _embedding_reader(model)
        return
    import torch

    with load_model(model, dtype="auto", device=device) as loaded:

        def hidden_states(prompt: str) -> Array:
            tokens = _tokens(loaded.tokenizer, prompt, model.name)
            if loaded.context is not None and len(tokens) > loaded.context:
                raise InvalidInput(
                    f"{model.name}: the prompt {prompt[:40]!r}",
                    found=f"{len(tokens)} tokens",
                    expected=f"at most {loaded.context}, the context length of the model",
                    remedy="shorten the prompt",
                )
            with torch.inference_mode():
                ids = torch.tensor([tokens], device=device)
                layer_inputs = loaded.network(ids, output_hidden_states=True, use_cache=False).hidden_states[:-1]
                states = torch.stack([layer[0].double() for layer in layer_inputs])
            states = states.mean(dim=1) if mode == "hidden_avg" else states[:, -1]
            result: Array = states.cpu().numpy()
            return result

        yield hidden_states


def _embedding_reader(model: Model) -> Callable[[str], Array]:
    """Return a function that sums the embeddings of a prompt and reads only the rows of the table that it needs."""
    import transformers

    location = f"{model.name} ({model.directory})"
    checkpoint = open_checkpoint(model.directory)
    tables = [tensor for tensor in checkpoint.stored_tensors() if is_embedding(tensor.name)]
    if len(tables) != 1 or tables[0].dtype.kind != "float":
        raise InvalidInput(
            location,
            found=f"{len(tables)} embedding tables",
            expected="one embedding table in a floating-point format",
        )
    table, layers = tables[0], int(checkpoint.config.get("num_hidden_layers", 1))
    rows, width = table.shape
    row, read_elements = np.empty(width * table.dtype.size, np.uint8), element_reader(None)
    try:
        tokenizer: Any = transformers.AutoTokenizer.from_pretrained(
            model.directory, local_files_only=True, trust_remote_code=False
        )
    except Exception as error:  # A damaged checkpoint can make transformers raise any exception.
        cause = " ".join(str(error).split()) or type(error).__name__
        raise InvalidInput(
            location, found=f"no tokenizer: {cause[:300]}", expected="a tokenizer that transformers can load"
        ) from error

    def sum_embeddings(prompt: str) -> Array:
        total = np.zeros(width)
        for token in _tokens(tokenizer, prompt, model.name):
            if not 0 <= token < rows:
                raise InvalidInput(
                    f"{model.name}: the prompt {prompt[:40]!r}",
                    found=f"token {token}",
                    expected=f"ids below {rows}, the rows of the embeddings",
                )
            read_elements(table, token * width, row)
            total += numbers(patterns(row, table.dtype), table.dtype)
        return np.tile(total, (layers, 1))

    return sum_embeddings


def _tokens(tokenizer: Any, prompt: str, model: str) -> list[int]:
    """Return the tokens of a prompt, with the beginning-of-text token first if the tokenizer has one."""
    tokens = [int(token) for token in tokenizer(prompt)["input_ids"]]
    begin = tokenizer.bos_token_id
    if begin is not None and tokens[:1] != [begin]:
        tokens = [int(begin), *tokens]
    if not tokens:
        raise InvalidInput(
            f"{model}: the prompt {prompt[:40]!r}", found="no tokens", expected="a prompt with at least one token"
        )
    return tokens
