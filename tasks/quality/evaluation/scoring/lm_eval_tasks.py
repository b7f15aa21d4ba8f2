"""Work with lm-eval's task objects: silence lm-eval, report errors in a task, read its texts, and set it up.

Task objects stay loaded between parts and are changed in place. Every evaluation sets few-shot examples, generation
settings and the random state again, because the preceding one may have used other settings.
"""

from __future__ import annotations

import json
import logging
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass, field
from difflib import get_close_matches
from inspect import signature
from traceback import extract_tb
from types import MappingProxyType
from typing import Any, NamedTuple

from mergegate.merge_core.errors import InvalidInput, MergegateError, suggest
from mergegate.tasks.quality.evaluation.backends import DEFAULT_BUDGET, find_backend, find_thought_end
from mergegate.tasks.quality.evaluation.backends.pictures import (
    describe_prompt,
    has_pictures,
    hash_document,
    pictures_of,
)
from mergegate.tasks.quality.evaluation.definitions.task import EvalTask
from mergegate.tasks.quality.evaluation.document_order import DataSource, DocumentSet
from mergegate.tasks.quality.evaluation.settings import ResolvedPromptSettings, Scoring, fewshot_count

# lm-eval's names for the largest number of tokens of an answer; if several are set, it uses the first.
BUDGET_NAMES = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")
FEWSHOT_SEED = 1234  # lm-eval's own default: with ``seed: 0`` the prompts are those of its command line


@contextmanager
def quiet() -> Iterator[None]:
    """Silence logs and progress bars of lm-eval, datasets and transformers inside the context."""
    import datasets  # type: ignore[import-untyped]  # ships no types

    loggers = [logging.getLogger(name) for name in ("lm_eval", "datasets", "transformers")]
    levels = [logger.level for logger in loggers]
    bars = datasets.is_progress_bar_enabled()
    datasets.disable_progress_bars()
    for logger in loggers:
        logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
        if bars:
            datasets.enable_progress_bars()


@contextmanager
def user_errors(task: EvalTask) -> Iterator[None]:
    """Convert exceptions from a task's own functions and templates, or from averaging its scores, to InvalidInput."""
    from jinja2 import TemplateError

    try:
        yield
    except MergegateError:
        raise
    except Exception as error:
        user_files = {str(file) for file in task.tree.files} if task.definition else set()
        frames = extract_tb(error.__traceback__)
        locations = [f"{frame.filename}: line {frame.lineno}" for frame in frames if frame.filename in user_files]
        if not locations and any(frame.filename.endswith("lm_eval/api/metrics.py") for frame in frames):
            raise InvalidInput(
                f"task {task.name}",
                found=f"document scores that lm-eval cannot average: {type(error).__name__}: {error!s:.200}",
                expected="one number per document for a metric with aggregation: mean",
                remedy="correct the task's process_results, or the aggregation of the metric",
            ) from error
        if not locations and not (task.definition and isinstance(error, TemplateError)):
            raise
        raise InvalidInput(
            locations[-1] if locations else str(task.definition),
            found=f"{type(error).__name__}: {' '.join(str(error).split())[:300]}",
            expected="a result for every document",
            remedy="correct the task; `lm-eval run --tasks` with it fails in the same way",
        ) from error


def judging_metrics(name: str, leaf: Any, scored_metrics: Iterable[str]) -> dict[str, bool]:
    """Return the metrics by which a leaf can be judged, and whether higher is better for each."""
    aggregations, directions = leaf.aggregation(), leaf.higher_is_better()
    metrics = {
        metric: bool(directions[metric])
        for metric, aggregation in aggregations.items()
        if getattr(aggregation, "__name__", "") == "mean" and directions.get(metric) is not None
    }
    if not metrics.keys() & set(scored_metrics):
        names = sorted({*scored_metrics, *aggregations})
        raise InvalidInput(
            f"task {name}",
            found=f"no metric that is a mean over documents with a direction, only {', '.join(names) or 'none at all'}",
            expected="a score per document whose mean is the score of the task",
            remedy="add one under metric_list (aggregation: mean, higher_is_better: ...), or remove the task",
        )
    return metrics


class DocumentText(NamedTuple):
    """Prompt and target of a document, without few-shot examples. Stored scores contain only hashes of these texts."""

    prompt: str
    target: str
    doc_hash: str  # as in ``DocumentScore``


def text_of(task: Any, document: Mapping[str, Any]) -> DocumentText:
    """Return the prompt and the expected answer that lm-eval's ``task`` builds for ``document``."""
    from lm_eval.utils import handle_non_serializable, hash_string

    prompt, target = (_as_text(task, document, of(document)) for of in (task.doc_to_text, task.doc_to_target))
    if has_pictures(task):
        pictures = pictures_of(task, document, f"task {task.config.task}")
        return DocumentText(describe_prompt(prompt, pictures), target, hash_document(document, pictures))
    serialized = json.dumps(document, indent=2, default=handle_non_serializable, ensure_ascii=False)
    return DocumentText(prompt, target, hash_string(serialized))


def _as_text(task: Any, document: Mapping[str, Any], value: Any) -> str:
    """Convert a prompt or target to text. A target may be the number of a choice, or a list of answers."""
    if isinstance(value, bool) or value is None:
        return str(value)
    if isinstance(value, int) and task.config.doc_to_choice is not None:
        choices = task.doc_to_choice(document)
        return str(choices[value]) if 0 <= value < len(choices) else str(value)
    if isinstance(value, (list, tuple)):
        return " | ".join(_as_text(task, document, each) for each in value)
    return str(value)


@dataclass(frozen=True)
class LoadedTask:
    """lm-eval's task objects for one task, and the original values of the settings that scoring overrides in them."""

    leaves: Mapping[str, Any]
    fewshot: Mapping[str, int | None]
    generation: Mapping[str, Mapping[str, Any] | None]  # settings of generation; None for a leaf that generates nothing
    scratch: Any  # directory into which local data was read; deleted together with this object
    sources: tuple[DataSource, ...]  # datasets that the task was loaded from
    revisions: tuple[str | None, ...]  # their revisions at that time
    digest: str  # digest of documents, examples, templates and settings
    examples: dict[tuple[str, int, int], list[Any]] = field(default_factory=dict)  # by leaf, number and seed
    sets: dict[DocumentSet, frozenset[tuple[str, int]]] = field(default_factory=dict)  # cache of document sets

    @property
    def sizes(self) -> dict[str, int]:
        """Number of documents in each leaf, by name."""
        return {name: len(leaf.eval_docs) for name, leaf in self.leaves.items()}


def set_up_tasks(
    loaded_task: LoadedTask, documents: Mapping[str, list[int]], lm: Any, prompting: ResolvedPromptSettings, seed: int
) -> dict[str, Any]:
    """Prepare lm-eval's task objects for an evaluation of selected documents, and return them by name.

    The few-shot examples and generation settings are changed in place, and the random generators are seeded.
    ``documents`` holds the ascending positions of the documents by leaf. lm-eval must then evaluate each one once, in
    this order. ``lm`` is lm-eval's ``LM``, of which only the tokenizer and the context length are read. Its attributes
    for the chat template and for thoughts are set (see ``backends.contract.Opened``).

    Raises:
        InvalidInput: If the chat template is missing, there are fewer examples than requested, or answers may be longer
            than the context of the model, or a token is missing that ends thoughts.
    """
    import numpy as np
    import torch

    if prompting.is_chat and not lm.tokenizer.chat_template:
        raise InvalidInput(
            "evaluate.chat_template",
            found=f"the tokenizer {lm.tokenizer.name_or_path} has no chat template",
            remedy="chat_template: false",
        )
    thought_end = find_thought_end(prompting.think_end_token, prompting.enable_thinking, lm.tokenizer)
    answering_lm = getattr(lm, "answering_lm", lm)
    answering_lm.chat_template_args = dict(prompting.template_arguments)
    answering_lm.think_end_token = prompting.think_end_token
    answering_lm.thought_end = thought_end
    leaves = {name: loaded_task.leaves[name] for name in documents}
    answering_lm.reads_pictures = any(map(has_pictures, leaves.values()))
    random.seed(seed)
    np.random.seed(seed)  # lm-eval's tasks draw from the global state
    torch.manual_seed(seed)
    for name, leaf in leaves.items():
        count = fewshot_count(loaded_task.fewshot[name], prompting.num_fewshot)
        if count and has_pictures(leaf):
            raise InvalidInput(
                f"evaluate.tasks: {name}: num_fewshot",
                found=f"{count} for a task with pictures",
                expected="0, because lm-eval passes no pictures of few-shot examples",
                remedy="set num_fewshot: 0 for this task",
            )
        leaf.set_config(key="num_fewshot", value=count or 0)
        if loaded_task.generation[name] is not None:
            context = getattr(lm, "shared_context", getattr(lm, "max_length", None))
            room_for_prompt(loaded_task, name, prompting, context)
            settings = _generation_settings(loaded_task, name, prompting)
            leaf.set_config(key="generation_kwargs", value=with_budget(settings, answer_budget(settings)))
        _fix_examples(loaded_task, name, documents[name], FEWSHOT_SEED + seed)
    return leaves


def build_requests(
    leaf: Any,
    positions: Sequence[int],
    prompting: ResolvedPromptSettings,
    template: Callable[..., str] | None,
    **names: str,
) -> list[Any]:
    """Let a leaf that is set up build its requests for the documents at ``positions`` (ascending), and return them."""
    leaf.build_all_requests(
        samples=list(positions),
        system_instruction=prompting.system_instruction,
        apply_chat_template=prompting.is_chat,
        fewshot_as_multiturn=prompting.is_multiturn,
        chat_template=template if prompting.is_chat else None,
        **names,
    )
    requests: list[Any] = leaf.instances
    return requests


def _generation_settings(loaded_task: LoadedTask, name: str, prompting: ResolvedPromptSettings) -> dict[str, Any]:
    """Return the generation settings of a leaf. Settings of the profile take precedence."""
    own = deepcopy(loaded_task.generation[name] or {})
    if any(key in prompting.gen_kwargs for key in BUDGET_NAMES):  # replace the task's own, under any of its names
        own = {key: value for key, value in own.items() if key not in BUDGET_NAMES}
    profile = {key: list(value) if isinstance(value, tuple) else value for key, value in prompting.gen_kwargs.items()}
    return {**own, **profile}


def answer_budget(settings: Mapping[str, Any]) -> int:
    """Return the largest number of tokens of an answer with these generation settings."""
    return int(next((value for name in BUDGET_NAMES if (value := settings.get(name)) is not None), DEFAULT_BUDGET))


def with_budget(settings: Mapping[str, Any], budget: int) -> dict[str, Any]:
    """Return generation settings with ``budget`` as ``max_gen_toks``, the name that every backend reads."""
    return {key: value for key, value in settings.items() if key not in BUDGET_NAMES} | {"max_gen_toks": budget}


def room_for_prompt(
    loaded_task: LoadedTask, name: str, prompting: ResolvedPromptSettings, context: int | None
) -> int | None:
    """Return how many tokens of a prompt fit into a model's context together with the longest answer.

    ``name`` is a leaf with generated answers, and ``context`` is the model's context length in tokens. None: it is
    unknown, or does not limit answers. The result is at least 1, or None without a context length.
    """
    settings = _generation_settings(loaded_task, name, prompting)
    key = next((key for key in BUDGET_NAMES if settings.get(key) is not None), "max_gen_toks")
    tokens = {key: settings.get(key, DEFAULT_BUDGET)}
    if settings.get("max_length") is not None:  # transformers' limit on prompt and answer together
        tokens["max_length"] = settings["max_length"]
    for each, value in tokens.items():
        try:
            count = None if isinstance(value, bool) else int(value)
        except (TypeError, ValueError, OverflowError):
            count = None
        if each in prompting.gen_kwargs:
            location = f"evaluate.tasks: {name}: gen_kwargs.{each}"
        else:
            location = f"task {name}: generation_kwargs.{each}"
        if count is None or count < 1:
            raise InvalidInput(location, found=f"{value!r:.60}", expected="a number of tokens, 1 or more")
        limit = None if context is None else context if each == "max_length" else context - 1
        if limit is not None and count > limit:
            default = "" if each in settings else ", lm-eval's default"
            raise InvalidInput(
                location,
                found=f"{count:,} tokens{default}; prompt and answer together may have {context:,}",
                expected=f"at most {limit:,} minus the length of the prompt",
                remedy=f"set gen_kwargs: {{{each}: …}} of this task in the profile; or evaluate.max_length, if the "
                "model supports more",
            )
        tokens[each] = count
    return None if context is None else context - tokens[key]


def require_known_generation(
    prompting: ResolvedPromptSettings,
    backend: str,
    task: str,
    task_settings: Mapping[str, Mapping[str, Any] | None] = MappingProxyType({}),
) -> None:
    """Check the generation settings of a profile and a task.

    If the backend declares the settings that it accepts, those in the profile must be among them. Neither the profile
    nor the task may set arguments of lm-eval's model classes. ``task_settings`` holds the generation settings of each
    leaf, or None for a leaf that generates nothing.
    """
    from lm_eval.models.huggingface import HFLM

    settings_of_backend = find_backend(backend).generation_settings
    accepted = settings_of_backend() if settings_of_backend else frozenset()
    model_arguments = signature(HFLM.__init__).parameters.keys() - accepted
    keys_by_location = {f"evaluate.tasks: {task}: gen_kwargs.{key}": key for key in prompting.gen_kwargs}
    keys_by_location |= {
        f"task {leaf}: generation_kwargs.{key}": key
        for leaf, settings in task_settings.items()
        for key in settings or ()
    }
    if location := next((location for location, key in keys_by_location.items() if key in model_arguments), None):
        key = keys_by_location[location]
        is_ours = key in Scoring.model_fields
        raise InvalidInput(
            location,
            found="an argument of lm-eval's models, which is not a generation setting",
            expected="until, max_gen_toks, do_sample, temperature, top_p, or another setting of the backend",
            remedy=f"set evaluate.{key} instead"
            if is_ours
            else f"delete the key: mergegate does not support {key} yet",
        )
    if settings_of_backend and (rejected := next((key for key in prompting.gen_kwargs if key not in accepted), None)):
        raise InvalidInput(
            f"evaluate.tasks: {task}: gen_kwargs",
            found=f"{rejected!r}, which is not a generation setting of backend {backend}",
            expected="until, max_gen_toks, do_sample, temperature, top_p, or another setting of the backend",
            remedy=suggest(rejected, accepted) if get_close_matches(rejected, accepted) else "delete the key",
        )


def _fix_examples(loaded_task: LoadedTask, name: str, documents: Sequence[int], seed: int) -> None:
    """Give every document the few-shot examples that it has in a full evaluation.

    lm-eval's sampler draws the examples of all documents from one random stream, so the prompt of a document would
    depend on which other documents are evaluated.
    """
    from lm_eval.api.samplers import ContextSampler

    leaf = loaded_task.leaves[name]
    leaf.set_fewshot_seed(seed=seed)
    sampler: Any = getattr(leaf, "sampler", None)
    n = leaf.get_config("num_fewshot")
    if not n or type(sampler) is not ContextSampler:  # other kinds do not draw, or are the task's own
        return
    if (name, n, seed) not in loaded_task.examples:
        vars(sampler).pop("sample", None)  # the override below, from other settings
        own = leaf.fewshot_cfg.split == leaf.config.test_split  # a document must not be its own example
        try:
            drawn = [sampler.sample(n, eval_doc=document if own else None) for document in leaf.eval_docs]
        except ValueError as error:
            raise InvalidInput(
                f"task {name}: num_fewshot",
                found=f"{n} examples, but the task has fewer",
                remedy="reduce evaluate.num_fewshot",
            ) from error
        loaded_task.examples[name, n, seed] = drawn
    drawn = loaded_task.examples[name, n, seed]
    queue = iter([drawn[position] for position in documents])
    sampler.sample = lambda *_, **__: next(queue)  # lm-eval calls it once per document, in ascending order
