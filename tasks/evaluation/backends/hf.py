"""``hf``: transformers in this process."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from mergegate.tasks.checkpoints import load_model
from mergegate.tasks.evaluation.backends.contract import Backend, BackendScoring
from mergegate.tasks.evaluation.backends.shared_prefix import shared_prefix_type

if TYPE_CHECKING:
    from mergegate.tasks.checkpoints import LoadedModel, Model


@contextmanager
def _opened(model: Model, scoring: BackendScoring, device: str) -> Iterator[Any]:
    with load_model(model, dtype=scoring.dtype, device=device) as loaded:
        yield wrapped(loaded, scoring)


def wrapped(loaded: LoadedModel, scoring: BackendScoring) -> Any:
    """lm-eval's ``LM`` of a model that is in memory."""
    return shared_prefix_type()(
        pretrained=loaded.network,
        tokenizer=copy.deepcopy(loaded.tokenizer),  # it may be given a padding token, and others read with it, too
        backend="causal",
        # In the model's own dtype, its default, a bf16 model's likelihoods are rounded by up to half a nat.
        softmax_dtype="float32",
        batch_size=scoring.batch_size,
        max_length=scoring.max_length,
    )


def _generation_settings() -> frozenset[str]:
    from transformers import GenerationConfig

    # lm-eval takes these itself, the number of tokens under any of its names.
    own = ("until", "max_gen_toks", "max_tokens", "max_completion_tokens")
    known: dict[str, Any] = GenerationConfig().to_dict()
    return frozenset([*known, *own])


BACKEND = Backend(
    "hf",
    "transformers here",
    _opened,
    loads_here=True,
    draws_progress=("lm_eval.models.huggingface",),
    computes_in=("answer_row", "_model_call", "_model_generate"),
    generation_settings=_generation_settings,
)
