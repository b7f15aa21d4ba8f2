"""lm-eval's own task objects made ready for what is asked next: examples, settings of generation, all that is drawn.

Task objects stay loaded from part to part and are changed in place, so everything is set anew each time: the same task
may be asked in another way in between.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from copy import deepcopy
from typing import TYPE_CHECKING, Any

from merge_core.errors import InvalidInput, suggest
from tasks.evaluation.asking import Asking
from tasks.evaluation.backends import find_backend

if TYPE_CHECKING:
    from tasks.evaluation.harness import LoadedTask

FEWSHOT_SEED = 1234  # lm-eval's own default: with ``seed: 0`` the prompts are those of its command line


def arrange(loaded: LoadedTask, documents: Mapping[str, list[int]], lm: Any, how: Asking, seed: int) -> dict[str, Any]:
    """lm-eval's own task objects for ``documents``, with the few-shot examples and settings of generation of ``how``.

    Args:
        documents: Positions by task, ascending; they are then to be asked once, in that order.
        lm: lm-eval's ``LM``, of which the tokenizer is looked at.
        seed: Of everything that is drawn.

    Raises:
        InvalidInput: for a chat template that is not there, or more examples than there are.
    """
    import numpy as np
    import torch

    if how.is_chat and not lm.tokenizer.chat_template:
        raise InvalidInput(
            "evaluate.chat_template",
            found=f"a tokenizer without one ({lm.tokenizer.name_or_path})",
            remedy="chat_template: false",
        )
    leaves = {name: loaded.leaves[name] for name in documents}
    random.seed(seed)
    np.random.seed(seed)  # the global state, because lm-eval's tasks draw from it
    torch.manual_seed(seed)
    for name, leaf in leaves.items():
        # A task that sets no examples at all keeps none, as on lm-eval's command line.
        own = loaded.fewshot[name]
        asked = how.num_fewshot if how.num_fewshot is not None and own != 0 else own
        leaf.set_config(key="num_fewshot", value=asked or 0)
        if (generation := loaded.generation[name]) is not None:
            leaf.set_config(key="generation_kwargs", value={**deepcopy(generation), **_plain_settings(how)})
        _fix_examples(loaded, name, documents[name], FEWSHOT_SEED + seed)
    return leaves


def _plain_settings(how: Asking) -> dict[str, Any]:
    return {key: list(value) if isinstance(value, tuple) else value for key, value in how.gen_kwargs.items()}


def require_known_generation(how: Asking, backend: str, task: str) -> None:
    """See that a backend takes the settings of generation that a profile names, where it can say so.

    Raises:
        InvalidInput: naming the first that it does not know.
    """
    known = find_backend(backend).generation_settings
    if known is None or not how.gen_kwargs:
        return
    taken = known()
    if odd := next((key for key in how.gen_kwargs if key not in taken), None):
        raise InvalidInput(
            f"evaluate.tasks: {task}: gen_kwargs",
            found=f"{odd!r}, which is no setting of generation of backend {backend}",
            expected="until, max_gen_toks, do_sample, temperature, top_p, or another that it takes",
            remedy=suggest(odd, taken),
        )


def _fix_examples(loaded: LoadedTask, name: str, documents: Sequence[int], seed: int) -> None:
    """Give every document the few-shot examples that it has when all are asked, whatever part it is asked in.

    lm-eval's sampler draws for one document after another from one stream, so that a document's prompt would hang on
    which others are asked with it.
    """
    from lm_eval.api.samplers import ContextSampler

    leaf = loaded.leaves[name]
    leaf.set_fewshot_seed(seed=seed)
    sampler: Any = getattr(leaf, "sampler", None)
    n = leaf.get_config("num_fewshot")
    if not n or type(sampler) is not ContextSampler:  # any other kind chooses without drawing, or is a task's own
        return
    if (name, n, seed) not in loaded.examples:
        vars(sampler).pop("sample", None)  # of other settings
        own = leaf.fewshot_cfg.split == leaf.config.test_split  # then a document must not be its own example
        try:
            drawn = [sampler.sample(n, eval_doc=document if own else None) for document in leaf.eval_docs]
        except ValueError as error:
            raise InvalidInput(
                f"task {name}: num_fewshot",
                found=f"{n} examples, more than there are to draw from",
                remedy="a smaller evaluate.num_fewshot",
            ) from error
        loaded.examples[name, n, seed] = drawn
    drawn = loaded.examples[name, n, seed]
    queue = iter([drawn[position] for position in documents])
    sampler.sample = lambda *_, **__: next(queue)  # lm-eval asks once a document, in ascending order
