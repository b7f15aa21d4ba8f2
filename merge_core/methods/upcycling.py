"""Create the weights of an expert from those of a dense model: add noise, so that copies can diverge, and scale them.

A recipe cannot select this method: :mod:`merge_core.plan` assigns it to the tensors of a mixture. Noise comes from the
generator of the masks (:mod:`.masks`), so it depends only on seed, tensor and element.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from mergegate.merge_core.methods.combination import combine
from mergegate.merge_core.methods.contract import Block, Costs, Map, Method, Parameter, TensorTask, Traits, map_only
from mergegate.merge_core.methods.masks import mask_words

if TYPE_CHECKING:
    import torch

# Constant that turns a key into another key, for a second stream of random words.
_SECOND_STREAM = 0x5BD1E995
_WORDS = 2.0**32


def _upcycle(task: TensorTask) -> Map:
    """Return the map ``(x + noise * z) * scale``, with ``z`` uniform between -1 and 1 or standard normal."""
    (values,), (key,) = task.per_input, task.seeds
    scale, noise = float(values["scale"]), float(values["noise"])
    if noise == 0:
        return combine([scale])

    def map_block(block: Block) -> torch.Tensor:
        import torch

        numbers = block.inputs[0]
        if values["draw"] == "uniform":
            draws = (mask_words(key, block.start, len(numbers), numbers.device).double() + 0.5) * (2 / _WORDS) - 1
        else:
            # The transform of Box and Muller (1958). A draw depends only on the key and its index, so blocks of any
            # size get the same numbers.
            second_key = (key[0] ^ _SECOND_STREAM, key[1])
            radius = (mask_words(key, block.start, len(numbers), numbers.device).double() + 0.5) / _WORDS
            angle = (mask_words(second_key, block.start, len(numbers), numbers.device).double() + 0.5) / _WORDS
            draws = torch.sqrt(-2 * torch.log(radius)) * torch.cos(2 * math.pi * angle)
        return ((numbers.double() + noise * draws) * scale).to(numbers.dtype)

    return Map(map_block)


UPCYCLING = Method(
    name="mixture",
    summary="Dense models as the experts of a mixture",
    paper="Sparse upcycling, Komatsuzaki et al. 2022, https://arxiv.org/abs/2212.05055",
    base="ordinary",
    models=(1, 1),
    parameters=(
        Parameter("scale", "float", "input", 1.0, "factor for every element"),
        Parameter("noise", "float", "input", 0.0, "size of the noise to add to every element", minimum=0.0),
        Parameter("draw", "choice", "input", "normal", "distribution of the noise", choices=("normal", "uniform")),
    ),
    steps=map_only(_upcycle),
    costs=Costs(map=0.5),
    traits=Traits(may_zero=True, merges_base=True),
)
