"""Render the documents of a task as a model reads them: as text for a preview, and as tokens for a search.

Prompts, few-shot examples and templates are those of an evaluation (``lm_eval_tasks``). The preview, before any
document is scored, lets a user inspect a prompt. It also reveals a tokenizer that cannot be loaded, or a chat template
or task function that fails. Only the tokenizer of the model is loaded::

    result = preview(task, scoring, TokenizerSource(name="chat", directory=..., digest=...), limit).value
    print(result.prompt, result.answer, result.tokens)

A search scores many models on the same documents in memory. lm-eval provides the requests and the boundary between
context and answer, so numbers that are computed from these tokens equal those of the evaluation to the last digit::

    tokenized = tokenize_task(task, scoring, loaded)
    tokenized.documents[0].pairs[0].continuation                    # tokens of the first answer
    tokenized.outcomes(loaded, "exact_match,none", range(100))      # scores of answers that lm-eval generates
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Annotated, Any, NamedTuple

from pydantic import BaseModel, ConfigDict

from mergegate.merge_core.architecture import kind_of_directory
from mergegate.merge_core.checkpoint import find_thinking
from mergegate.merge_core.errors import InvalidInput, MergegateError
from mergegate.merge_core.parsing import flow_yaml
from mergegate.tasks.base.stage import StageValue, value_stage
from mergegate.tasks.base.store import NotInKey
from mergegate.tasks.models.checkpoints import LoadedModel, TellProgress, accept_plain_content
from mergegate.tasks.quality.evaluation.backends.answer_ends import require_visible
from mergegate.tasks.quality.evaluation.backends.hf import BACKEND, wrap_model
from mergegate.tasks.quality.evaluation.backends.picture_processor import encode_prompts, load_processor
from mergegate.tasks.quality.evaluation.backends.pictures import (
    PicturePrompt,
    as_picture_prompt,
    has_pictures,
    split_at_placeholders,
)
from mergegate.tasks.quality.evaluation.definitions.task import EvalTask
from mergegate.tasks.quality.evaluation.scoring.document_scores import BUDGET_FACTOR
from mergegate.tasks.quality.evaluation.scoring.harness import progress_to, score_loaded_documents
from mergegate.tasks.quality.evaluation.scoring.lm_eval_tasks import (
    LoadedTask,
    answer_budget,
    build_requests,
    quiet,
    require_known_generation,
    room_for_prompt,
    set_up_tasks,
    text_of,
    user_errors,
)
from mergegate.tasks.quality.evaluation.scoring.loading import (
    CountLimit,
    call_with_task_data,
    evaluated_documents,
    load_task,
)
from mergegate.tasks.quality.evaluation.scoring.metrics import choices_of, choose_metrics
from mergegate.tasks.quality.evaluation.settings import ResolvedPromptSettings, Scoring, resolve_prompt_settings

_LONGEST = 20_000  # characters of a prompt that are stored


class TokenizerSource(BaseModel):
    """Location of the tokenizer and the chat template of a model, and the digest of both."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: Annotated[str, NotInKey]  # of the model
    directory: Annotated[Path, NotInKey]
    digest: str


class PromptWarning(BaseModel):
    """Reason why the prompts of a task may not have the expected effect."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    found: str
    expected: str
    remedy: str
    setting: str = ""  # setting that this model's template does not read; no problem if another model's does


class TaskPreview(StageValue):
    """The first document of a task, as the model would read it."""

    leaf: str  # task of the document; for a group, the task below it
    prompt: str  # everything before the answer, truncated if it is very long
    answer: str  # first continuation whose likelihood is computed; for a generated answer, the expected one
    tokens: int  # number of tokens in the prompt
    room: int | None = None  # tokens left for a prompt next to the longest answer; None: no answer, or unknown
    warnings: tuple[PromptWarning, ...] = ()
    budget: int | None = None  # largest number of tokens of a generated answer; None: no answer is generated

    def describe_budget(self, limit: int | None) -> str:
        """Return how many tokens an answer may have, or an empty text. ``limit`` is ``evaluate.max_answer_tokens``."""
        if self.budget is None:
            return ""
        longest = BUDGET_FACTOR * self.budget if limit is None else limit
        again = f"up to {longest:,} if it is cut off" if longest > self.budget else f"max_answer_tokens {longest:,}"
        return f"at most {self.budget:,} tokens in an answer ({again})"

    def summary(self) -> str:
        return f"{self.tokens:,} tokens"


class TaskPrompts(StageValue):
    """Texts that a model reads when it is evaluated on the first documents of a task, each with one continuation."""

    texts: tuple[str, ...]

    def summary(self) -> str:
        return f"{len(self.texts):,} texts"


@value_stage("preview", version=3, subject="task")
def preview(task: EvalTask, scoring: Scoring, tokenizer: TokenizerSource, limit: CountLimit) -> TaskPreview:
    """Render the first document of ``task``, whose data is pinned, as the model of ``tokenizer`` would read it.

    Raises:
        InvalidInput: If the tokenizer or the data cannot be loaded, if a template, a function of the task or the
            few-shot examples fail, or if answers may be longer than the model's context.
        Refused: If rendering takes longer than ``limit``.
    """
    return call_with_task_data(task, _render, (task, scoring, tokenizer), "its first document", limit.seconds)


@value_stage("prompts", version=1, subject="task")
def task_prompts(
    task: EvalTask, scoring: Scoring, tokenizer: TokenizerSource, documents: int, limit: CountLimit
) -> TaskPrompts:
    """Render the first documents of ``task``, whose data is pinned, as the model of ``tokenizer`` would read them.

    The errors are those of ``preview``.
    """
    arguments = (task, scoring, tokenizer, documents)
    return call_with_task_data(task, _render_many, arguments, "its first documents", limit.seconds)


def _render(task: EvalTask, scoring: Scoring, tokenizer: TokenizerSource, on_progress: TellProgress) -> TaskPreview:
    """Render the document. Runs in the model process."""
    from lm_eval.models.utils import resolve_max_length
    from transformers import AutoConfig

    with quiet():
        loaded_tokenizer = _load_tokenizer(tokenizer)
        loaded = load_task(task)
        if (first := next(evaluated_documents(loaded, task, scoring.seed), None)) is None:
            raise InvalidInput(f"task {task.name}", found="no document", expected="data with documents")
        name, position = first
        if task.built_in is not None:
            task.built_in.check_model(tokenizer.name, tokenizer.directory, loaded.leaves[name].eval_docs)
            document = loaded.leaves[name].eval_docs[position]
            asked, target = task.built_in.prompt_of(document), task.built_in.target_of(document)
            tokens = len(loaded_tokenizer(asked)["input_ids"])
            return TaskPreview(leaf=name, prompt=asked[:_LONGEST], answer=target[:_LONGEST], tokens=tokens)
        # The context length that the backend will use; None if only the backend can tell, as vLLM computes a longer one
        # for scaled positions. The check of file headers reports what is wrong with a configuration.
        context = scoring.max_length
        if scoring.backend in ("hf", "served"):
            try:
                config = AutoConfig.from_pretrained(str(tokenizer.directory), trust_remote_code=False)
            except Exception:  # transformers promises no set of types
                pass
            else:
                if config.is_encoder_decoder:  # it reads the prompt apart from its answer
                    context = None
                elif context is None:
                    context = int(resolve_max_length(config, loaded_tokenizer))
        # The same attributes as the ``LM`` of the backend.
        reader = SimpleNamespace(tokenizer=loaded_tokenizer, max_length=context)
        prompting = resolve_prompt_settings(task.prompt_settings, scoring)
        require_known_generation(prompting, scoring.backend, task.name, loaded.generation)
        room = {
            leaf_name: room_for_prompt(loaded, leaf_name, prompting, context)
            for leaf_name, settings in loaded.generation.items()
            if settings is not None
        }
        leaf = set_up_tasks(loaded, {name: [position]}, reader, prompting, scoring.seed)[name]

        if scoring.backend == "served":
            require_visible(reader.thought_end, loaded_tokenizer, tokenizer.name)

        with user_errors(task):
            request = build_requests(leaf, [position], prompting, _template_of(reader, task, tokenizer))[0]
            as_picture_prompt(request)
            prompt, *continuations = request.args
            tokens = len(loaded_tokenizer(str(prompt))["input_ids"])
            if isinstance(prompt, PicturePrompt):
                processor = load_processor(tokenizer.name, tokenizer.directory)
                tokens = encode_prompts(processor, [prompt])["input_ids"].shape[1]
            instruction = " ".join((prompting.system_instruction or "").split())
            if instruction not in " ".join(str(prompt).split()):  # lm-eval drops it if a template rejects it
                raise InvalidInput(
                    f"evaluate.tasks: {task.name}: system_instruction",
                    found=f"the chat template of {tokenizer.name} drops it",
                    expected="a template that accepts a system message",
                    remedy="set chat_template in the recipe, or add the instruction to the doc_to_text of your own "
                    "YAML file",
                )
            answer = continuations[0] if continuations and isinstance(continuations[0], str) else None
            if answer is None:
                answer = text_of(leaf, leaf.eval_docs[position]).target
        return TaskPreview(
            leaf=name,
            prompt=str(prompt)[:_LONGEST],
            answer=str(answer)[:_LONGEST],
            tokens=tokens,
            room=room.get(name),
            budget=answer_budget(leaf.get_config("generation_kwargs")) if name in room else None,
            warnings=tuple(_warnings(loaded_tokenizer, prompting, leaf, tokenizer.name)),
        )


def _load_tokenizer(source: TokenizerSource) -> Any:
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(str(source.directory), trust_remote_code=False)
        with suppress(InvalidInput):  # the check of file headers reports what is wrong with a configuration
            accept_plain_content(tokenizer, kind_of_directory(source.directory))
        return tokenizer
    except Exception as error:  # transformers promises no set of types
        raise InvalidInput(
            f"{source.name}: its tokenizer",
            found=f"cannot be loaded: {' '.join(str(error).split())[:300]}",
            expected="a tokenizer that transformers can load, next to the weights",
            remedy="download or copy its files (tokenizer.json, tokenizer_config.json, ...) from the base model",
        ) from error


def _template_of(reader: Any, task: EvalTask, source: TokenizerSource) -> Callable[..., str]:
    """Return a function that applies the chat template, with errors that blame the model and not the task."""
    from lm_eval.models.huggingface import HFLM

    def apply_template(history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        try:
            if reader.reads_pictures:
                history = split_at_placeholders(history)
            return str(HFLM.apply_chat_template(reader, history, add_generation_prompt=add_generation_prompt))
        except MergegateError:
            raise
        except Exception as error:
            raise InvalidInput(
                f"{source.name}: chat template",
                found=f"fails on a document of {task.name}: {' '.join(str(error).split())[:300]}",
                expected="a template that accepts the messages of a task",
                remedy="set chat_template in the recipe, correct the model's template, or evaluate with "
                "chat_template: false",
            ) from error

    return apply_template


def _render_many(
    task: EvalTask, scoring: Scoring, tokenizer: TokenizerSource, documents: int, on_progress: TellProgress
) -> TaskPrompts:
    """Render several documents. Runs in the model process."""
    with quiet():
        reader = SimpleNamespace(tokenizer=_load_tokenizer(tokenizer), max_length=scoring.max_length)
        loaded = load_task(task)
        positions: dict[str, list[int]] = {}
        for leaf_name, position in islice(evaluated_documents(loaded, task, scoring.seed), documents):
            positions.setdefault(leaf_name, []).append(position)
        prompting = resolve_prompt_settings(task.prompt_settings, scoring)
        texts: list[str] = []
        with user_errors(task):
            for leaf_name, leaf in set_up_tasks(loaded, positions, reader, prompting, scoring.seed).items():
                template = _template_of(reader, task, tokenizer)
                for request in build_requests(leaf, positions[leaf_name], prompting, template):
                    texts.append("".join(argument for argument in request.args if isinstance(argument, str)))
        return TaskPrompts(texts=tuple(dict.fromkeys(texts)))


def _warnings(tokenizer: Any, prompting: ResolvedPromptSettings, leaf: Any, model: str) -> Iterator[PromptWarning]:
    """Yield warnings about settings for thinking that are missing or have no effect."""
    template = str(tokenizer.get_chat_template()) if prompting.is_chat else ""
    for name in prompting.template_arguments:
        if name not in template:
            yield PromptWarning(
                found=f"{name} has no effect: the chat template of {model} does not read it",
                expected="a setting that changes the prompt",
                remedy=f"remove {name}, or set chat_template in the recipe to a template that reads it",
                setting=name,
            )
    if leaf.OUTPUT_TYPE != "generate_until" or prompting.enable_thinking is False:
        return
    thinking = find_thinking(template, tokenizer.get_vocab()) if prompting.is_chat else None
    if thinking and prompting.think_end_token is None:
        end, switch = thinking.end or "…", ", enable_thinking: true" if thinking.has_switch else ""
        yield PromptWarning(
            found=f"{model} is a thinking model, but think_end_token is not set: its thoughts are scored as answers",
            expected="think_end_token, and a token limit for thought and answer; or enable_thinking: false",
            remedy=f"think_end_token: {flow_yaml(end)}{switch} and a larger max_gen_toks "
            "(docs/how-to/evaluate-chat-and-thinking.md)",
        )
    prefix = leaf.get_config("gen_prefix")
    if prefix and prompting.think_end_token is not None:
        yield PromptWarning(
            found=f"every answer begins with the task's gen_prefix {str(prefix)[:60]!r}, so {model} cannot think first",
            expected="a task without gen_prefix for a thinking model",
            remedy="gen_prefix: '' in your own YAML file that includes the task, or enable_thinking: false",
        )


class PromptTokens(NamedTuple):
    """Tokens of a prompt, and of a continuation whose likelihood is computed."""

    context: tuple[int, ...]  # at least one token; truncated on the left if both exceed the model's context
    continuation: tuple[int, ...]  # at least one token


@dataclass(frozen=True)
class TokenizedDocument:
    """A document in the tokens of one model."""

    leaf: str  # task of the document; for a group, the task below it
    doc_id: int  # position in that task's data
    pairs: tuple[PromptTokens, ...]  # prompt with each choice, or with each right answer if there are no choices
    right: frozenset[int]  # positions of the right answers in ``pairs``; empty if the label is not among the choices
    is_choice: bool  # whether ``pairs`` also contains wrong answers


@dataclass(frozen=True)
class TokenizedTask:
    """The documents in a task's document set, in scoring order."""

    task: EvalTask
    scoring: Scoring
    order: tuple[tuple[str, int], ...]  # (leaf, position) of each document
    documents: tuple[TokenizedDocument, ...]  # empty if tokens were not requested
    _loaded: LoadedTask

    def outcomes(
        self, loaded_model: LoadedModel, metric: str, part: range, alive: Callable[[], None] = lambda: None
    ) -> list[float]:
        """Return lm-eval's scores of some documents under ``metric``, negated if lower is better.

        ``metric`` is lm-eval's label, or empty for the task's default metric. ``part`` holds positions in ``order``.
        ``alive`` is called whenever answers arrive.
        """
        positions: dict[str, list[int]] = {}
        for leaf, document in sorted(self.order[index] for index in part):
            positions.setdefault(leaf, []).append(document)
        with quiet(), _no_bars(alive):
            lm = wrap_model(loaded_model, self.scoring)
            scores = score_loaded_documents(self._loaded, positions, lm, "trial", self.task, self.scoring)
        location = f"task {self.task.name}"
        metrics = choose_metrics(scores, metric or None, location)
        sign = 1.0 if metrics.higher_is_better else -1.0
        judged = {(row.task, row.doc_id): sign * row.outcome for row in metrics.judge(scores, location)}
        return [judged[self.order[index]] for index in part]


def tokenize_task(task: EvalTask, scoring: Scoring, loaded_model: LoadedModel, *, tokens: bool = True) -> TokenizedTask:
    """Load a task, or a document set of it, and convert it to the tokens of a model.

    The tokenizer and the context length are those of ``loaded_model``. If ``tokens`` is false, the task is only loaded.
    """
    with quiet(), _no_bars():
        loaded_task = load_task(task)
        order = list(evaluated_documents(loaded_task, task, scoring.seed))
        documents: dict[tuple[str, int], TokenizedDocument] = {}
        if tokens:
            lm = wrap_model(loaded_model, scoring)
            by_leaf: dict[str, list[int]] = {}
            for leaf, document in sorted(order):
                by_leaf.setdefault(leaf, []).append(document)
            prompting = resolve_prompt_settings(task.prompt_settings, scoring)
            leaves = set_up_tasks(loaded_task, by_leaf, lm, prompting, scoring.seed)
            if any(map(has_pictures, leaves.values())):
                raise InvalidInput(
                    f"task {task.name}",
                    found="documents with pictures",
                    expected="a task with text only, whose prompts are tokenized once for all candidates",
                    remedy="search with text tasks, and guard the release with the pictures",
                )
            with user_errors(task):
                for name, leaf in leaves.items():
                    documents |= _tokenize_leaf(name, leaf, by_leaf[name], lm, prompting)
    return TokenizedTask(task, scoring, tuple(order), tuple(documents[key] for key in order if tokens), loaded_task)


def _no_bars(alive: Callable[[], None] = lambda: None) -> AbstractContextManager[None]:
    return progress_to(lambda done, of: alive(), BACKEND.draws_progress)


def _tokenize_leaf(
    name: str, leaf: Any, positions: Sequence[int], lm: Any, prompting: ResolvedPromptSettings
) -> dict[tuple[str, int], TokenizedDocument]:
    """Return the documents at ``positions`` (ascending) as tokens, by (leaf, position)."""
    requests: dict[int, list[Any]] = {}
    tokenizer_name = lm.tokenizer_name if prompting.is_chat else ""
    template = lm.apply_chat_template if prompting.is_chat else None
    # lm-eval numbers only the selected documents.
    for instance in build_requests(leaf, positions, prompting, template, tokenizer_name=tokenizer_name):
        requests.setdefault(positions[instance.doc_id], []).append(instance)
    texts: list[tuple[str, str]] = []
    entries: list[tuple[int, int, frozenset[int], bool]] = []  # document, number of pairs, right pairs, is_choice
    for document, instances in requests.items():
        pairs, right, is_choice = _pairs(name, leaf, instances, prompting.is_chat)
        texts += pairs
        entries.append((document, len(pairs), right, is_choice))
    # lm-eval tokenizes and scores in one method, which passes the tokens to another. Replace that one to get them.
    lm._loglikelihood_tokens = lambda tokenized, disable_tqdm: tokenized
    try:
        tokenized = lm.loglikelihood([SimpleNamespace(args=pair) for pair in texts], disable_tqdm=True)
    finally:
        del lm._loglikelihood_tokens
    longest = int(lm.max_length)
    tokens = []
    for (_, text), context, continuation in tokenized:
        if not 0 < len(continuation) <= longest:
            raise InvalidInput(
                f"task {name}: {text[:60]!r}",
                found=f"an answer of {len(continuation)} tokens",
                expected=f"1 to {longest}, the context length of the model",
                remedy="" if continuation else "an answer that is not empty after its question",
            )
        room = longest + 1 - len(continuation)
        tokens.append(PromptTokens(tuple(context)[-room:], tuple(continuation)))
    encoded = iter(tokens)
    return {
        (name, document): TokenizedDocument(
            name, document, tuple(next(encoded) for _ in range(count)), right, is_choice
        )
        for document, count, right, is_choice in entries
    }


def _pairs(
    name: str, leaf: Any, instances: Sequence[Any], is_chat: bool
) -> tuple[list[tuple[str, str]], frozenset[int], bool]:
    """Return (context, answer) for each choice or right answer, the right positions, and whether they are choices."""
    document, prompt = instances[0].doc, instances[0].args[0]
    if (choices := choices_of(leaf, document)) is not None:
        count, right = choices
        by_position = sorted(instances, key=lambda instance: int(instance.idx))
        return [(str(each.args[0]), str(each.args[1])) for each in by_position[:count]], right, True
    if leaf.OUTPUT_TYPE == "loglikelihood" and len(instances) == 1:
        return [(str(prompt), str(instances[0].args[1]))], frozenset([0]), False
    if leaf.OUTPUT_TYPE == "generate_until" and isinstance(prompt, str):
        target = leaf.doc_to_target(document)
        if leaf.get_config("doc_to_choice") is not None and isinstance(target, int):
            target = leaf.doc_to_choice(document)[target]
        targets = target if isinstance(target, (list, tuple)) else [target]
        answers = [text for text in map(str, targets) if text.strip()]
        # Between a prompt and a generated answer is what lm-eval puts before a choice.
        prefix = leaf.get_config("gen_prefix")
        is_attached = is_chat and (not prefix or str(prefix)[-1].isspace())
        delimiter = "" if is_attached else str(leaf.get_config("target_delimiter") or "")
        if answers:
            return [(prompt, f"{delimiter}{answer}") for answer in answers], frozenset(range(len(answers))), False
    raise InvalidInput(
        f"task {name}",
        found="documents that the task scores with its own function",
        expected="documents with a right answer, whose likelihood can be computed",
        remedy="measure: metric, which uses the task's own score",
    )
