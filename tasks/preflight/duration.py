"""Predict how long a run takes on a machine that has no earlier run, from sizes, documents, tokens and a benchmark.

The prediction is good to a factor of three. After a first run, its measured duration replaces the prediction. The model
assumes that an evaluation computes two operations for each parameter and token. To generate, it also reads all weights
for each token. Small models spend most of their time between the matrix products, so the prediction adds a constant per
call and per request. The functions are pure: this module measures nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

from mergegate.merge_core.engine.forecast import Rates

# Share of the speed of a large matrix product that a network reaches, including all work between its products.
_REACHED = 0.6
# Operations that a GPU computes in the time it takes to move one byte of its own memory (A100, H100: 160 to 210).
_OPERATIONS_A_BYTE = 200.0
# Seconds outside the matrix products: per call, per tensor of the model in a call, and per request.
_CALL, _TENSOR, _REQUEST = 2e-3, 1e-4, 2e-4
_LOADING = 0.1  # Seconds to load a model, in addition to reading its bytes.
STARTING = 3.0  # Seconds to start the model process with its libraries, once per run.
MERGING = 1.5  # Seconds until the engine starts reading.
AROUND = 3.0  # Seconds for checks, judging, explanation, report and publication.


@dataclass(frozen=True)
class NetworkSize:
    """Number of parameters, bytes and tensors of a model to evaluate."""

    parameters: int
    nbytes: int
    tensors: int


@dataclass(frozen=True)
class PromptLoad:
    """Amount of text in one evaluation pass.

    Args:
        requests: Number of texts that the model reads.
        tokens: Number of tokens in all texts.
        written: Number of tokens that the model generates.
        batch: Number of texts per batch.
    """

    requests: float
    tokens: float
    written: float = 0.0
    batch: int = 1


def evaluation_seconds(size: NetworkSize, load: PromptLoad, rates: Rates) -> float:
    """Return the seconds to load a model and to evaluate it.

    ``rates`` are measured on this machine, including ``products``. If ``bus`` is not zero, they are the rates of a GPU.
    """
    memory = rates.products / _OPERATIONS_A_BYTE if rates.bus else rates.copy
    calls = (load.requests + load.written) / load.batch
    arithmetic = 2 * size.parameters * (load.tokens + load.written) / (_REACHED * rates.products)
    overhead = calls * (_CALL + _TENSOR * size.tensors) + load.requests * _REQUEST
    return _LOADING + size.nbytes / rates.read + max(arithmetic, calls * size.nbytes / memory) + overhead


def merge_seconds(nbytes_read: int, nbytes_written: int, rates: Rates) -> float:
    """Return the seconds to merge, if reading and writing do not overlap."""
    return MERGING + nbytes_read / rates.read + nbytes_written / rates.write + nbytes_written / rates.hash
