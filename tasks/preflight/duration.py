"""How long a night will take on a machine on which it has never run: from sizes, documents, tokens and what a short
measurement found the machine to do. Good to a factor of three; what has run once is told by how long that took.

A model that is asked multiplies: two operations for each parameter and token. What it writes it writes token by token,
and goes through all of its weights for each. Small models spend their time between the products, which is counted by
calls and requests. Pure: nothing is measured here.
"""

from __future__ import annotations

from dataclasses import dataclass

from mergegate.merge_core.engine.forecast import Rates

# Of what a large product alone reaches, with all that lies between the products of a network.
_REACHED = 0.6
# A GPU moves a byte of its own memory in the time of so many operations of its products (A100, H100: 160 to 210).
_OPERATIONS_A_BYTE = 200.0
# Seconds between the products: of a call, of each of a model's tensors in it, and of a request before and after.
_CALL, _TENSOR, _REQUEST = 2e-3, 1e-4, 2e-4
_LOADING = 0.1  # of a model, beside its bytes
STARTING = 3.0  # the process that holds models, with its libraries; once a night
MERGING = 1.5  # the engine, before it reads
AROUND = 3.0  # what looks, judges, explains, reports and publishes


@dataclass(frozen=True)
class NetworkSize:
    """Of a model that is asked: its parameters, the bytes of its weights, how many tensors they are."""

    parameters: int
    nbytes: int
    tensors: int


@dataclass(frozen=True)
class PromptLoad:
    """What a model is asked in one go.

    Args:
        requests: Texts that it reads.
        tokens: Of all of them.
        written: Tokens that it writes.
        batch: Texts that it reads at once.
    """

    requests: float
    tokens: float
    written: float = 0.0
    batch: int = 1


def evaluation_seconds(size: NetworkSize, asked: PromptLoad, rates: Rates) -> float:
    """What it takes to load a model and to ask it.

    Args:
        rates: Of this machine, with ``products``; a ``bus`` says that they are those of a GPU.
    """
    memory = rates.products / _OPERATIONS_A_BYTE if rates.bus else rates.copy
    calls = (asked.requests + asked.written) / asked.batch
    arithmetic = 2 * size.parameters * (asked.tokens + asked.written) / (_REACHED * rates.products)
    between = calls * (_CALL + _TENSOR * size.tensors) + asked.requests * _REQUEST
    return _LOADING + size.nbytes / rates.read + max(arithmetic, calls * size.nbytes / memory) + between


def merge_seconds(nbytes_read: int, nbytes_written: int, rates: Rates) -> float:
    """What it takes to merge, if reading and writing do not overlap."""
    return MERGING + nbytes_read / rates.read + nbytes_written / rates.write + nbytes_written / rates.hash
