"""lm-eval's own task objects made ready for what is asked next: examples, settings of generation, all that is drawn.

Task objects stay loaded from part to part and are changed in place, so everything is set anew each time: the same task
may be asked in another way in between.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from copy import deepcopy
from difflib import get_close_matches
from inspect import signature
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from mergegate.merge_core.errors import InvalidInput, suggest
from mergegate.tasks.evaluation.backends import find_backend
from mergegate.tasks.evaluation.prompt_settings import ResolvedPromptSettings
from mergegate.tasks.evaluation.scoring import Scoring

if TYPE_CHECKING:
    from mergegate.tasks.evaluation.harness import LoadedTask

# Names that lm-eval has for the largest number of tokens of an answer; of several that are set it takes the first.
BUDGET_NAMES = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")
_DEFAULT_BUDGET = 256  # lm-eval's, where none is set
FEWSHOT_SEED = 1234  # lm-eval's own default: with ``seed: 0`` the prompts are those of its command line


def arrange(
    loaded: LoadedTask, documents: Mapping[str, list[int]], lm: Any, how: ResolvedPromptSettings, seed: int
) -> dict[str, Any]:
    """lm-eval's own task objects for ``documents``, with the few-shot examples and settings of generation of ``how``.

    Args:
        documents: Positions by task, ascending; they are then to be asked once, in that order.
        lm: lm-eval's ``LM``, of which the tokenizer is looked at.
        seed: Of everything that is drawn.

    Raises:
        InvalidInput: for a chat template that is not there, more examples than there are, or answers that may be longer
            than the model's context.
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
        if loaded.generation[name] is not None:
            room_for_prompt(loaded, name, how, getattr(lm, "max_length", None))
            leaf.set_config(key="generation_kwargs", value=_generation_settings(loaded, name, how))
        _fix_examples(loaded, name, documents[name], FEWSHOT_SEED + seed)
    return leaves


def _generation_settings(loaded: LoadedTask, name: str, how: ResolvedPromptSettings) -> dict[str, Any]:
    """Return the generation settings of a leaf, with those of the profile laid over them."""
    own = deepcopy(loaded.generation[name] or {})
    if any(key in how.gen_kwargs for key in BUDGET_NAMES):  # under whatever name the task has its own
        own = {key: value for key, value in own.items() if key not in BUDGET_NAMES}
    return {**own, **{key: list(value) if isinstance(value, tuple) else value for key, value in how.gen_kwargs.items()}}


def room_for_prompt(loaded: LoadedTask, name: str, how: ResolvedPromptSettings, context: int | None) -> int | None:
    """Return how many tokens of a prompt fit into a model's context, with the answer that may follow.

    Args:
        name: Leaf with generated answers.
        context: Tokens that the model takes in all; None: unknown.

    Returns:
        At least 1; None if the context is unknown.

    Raises:
        InvalidInput: for a budget that is not a number of tokens, or leaves no token of the context to the prompt.
    """
    settings = _generation_settings(loaded, name, how)
    key = next((key for key in BUDGET_NAMES if settings.get(key) is not None), "max_gen_toks")
    tokens = {key: settings.get(key, _DEFAULT_BUDGET)}
    if settings.get("max_length") is not None:  # transformers' name for prompt and answer together
        tokens["max_length"] = settings["max_length"]
    for each, value in tokens.items():
        try:
            count = None if isinstance(value, bool) else int(value)
        except (TypeError, ValueError, OverflowError):
            count = None
        if each in how.gen_kwargs:
            where = f"evaluate.tasks: {name}: gen_kwargs.{each}"
        else:
            where = f"task {name}: generation_kwargs.{each}"
        if count is None or count < 1:
            raise InvalidInput(where, found=f"{value!r:.60}", expected="a number of tokens, 1 or more")
        limit = None if context is None else context if each == "max_length" else context - 1
        if limit is not None and count > limit:
            default = "" if each in settings else ", lm-eval's default"
            raise InvalidInput(
                where,
                found=f"{count:,} tokens{default}; the model takes {context:,} of prompt and answer together",
                expected=f"at most {limit:,}, less what the prompt takes",
                remedy=f"set gen_kwargs: {{{each}: …}} of this task in the profile; or evaluate.max_length, if the "
                "model can take more",
            )
        tokens[each] = count
    return None if context is None else context - tokens[key]


def require_known_generation(
    how: ResolvedPromptSettings,
    backend: str,
    task: str,
    own: Mapping[str, Mapping[str, Any] | None] = MappingProxyType({}),
) -> None:
    """Check that a backend takes the generation settings that a profile names, if it can tell, and that neither profile
    nor task has an argument of lm-eval's models among them.

    Args:
        own: Settings of each leaf itself, None for one without generated answers.

    Raises:
        InvalidInput: naming the first that it does not take.
    """
    from lm_eval.models.huggingface import HFLM

    known = find_backend(backend).generation_settings
    taken = known() if known else frozenset()
    of_models = signature(HFLM.__init__).parameters.keys() - taken
    places = {f"evaluate.tasks: {task}: gen_kwargs.{key}": key for key in how.gen_kwargs}
    places |= {f"task {leaf}: generation_kwargs.{key}": key for leaf, settings in own.items() for key in settings or ()}
    if where := next((where for where, key in places.items() if key in of_models), None):
        key = places[where]
        is_ours = key in Scoring.model_fields
        raise InvalidInput(
            where,
            found="an argument of lm-eval's models, which is not a setting of generation",
            expected="until, max_gen_toks, do_sample, temperature, top_p, or another that the backend takes",
            remedy=f"set evaluate.{key} instead"
            if is_ours
            else f"delete the key: mergegate does not support {key} yet",
        )
    if known and (odd := next((key for key in how.gen_kwargs if key not in taken), None)):
        raise InvalidInput(
            f"evaluate.tasks: {task}: gen_kwargs",
            found=f"{odd!r}, which is not a generation setting of backend {backend}",
            expected="until, max_gen_toks, do_sample, temperature, top_p, or another that it takes",
            remedy=suggest(odd, taken) if get_close_matches(odd, taken) else "delete the key",
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
