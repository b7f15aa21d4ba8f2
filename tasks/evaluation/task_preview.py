"""Render the first document of a task as a model reads it, before any document is scored.

The preview lets a user inspect a prompt. It also reveals a tokenizer that cannot be loaded, or a chat template or
task function that fails. Prompts, few-shot examples and templates are those of an evaluation (``task_setup``). Only
the tokenizer of the model is loaded::

    result = preview(task, scoring, TokenizerSource(name="chat", directory=..., digest=...), limit).value
    print(result.prompt, result.answer, result.tokens)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict

from mergegate.merge_core.architecture import kind_of_directory
from mergegate.merge_core.checkpoint import find_thinking
from mergegate.merge_core.errors import InvalidInput, MergegateError
from mergegate.merge_core.parsing import flow_yaml
from mergegate.tasks.checkpoints import TellProgress, accept_plain_content
from mergegate.tasks.evaluation.backends.answer_ends import require_visible
from mergegate.tasks.evaluation.backends.picture_processor import encode_prompts, load_processor
from mergegate.tasks.evaluation.document_scores import BUDGET_FACTOR
from mergegate.tasks.evaluation.lm_eval_tasks import quiet, text_of, user_errors
from mergegate.tasks.evaluation.pictures import PicturePrompt, as_picture_prompt, split_at_placeholders
from mergegate.tasks.evaluation.process import call_with_task_data
from mergegate.tasks.evaluation.settings import ResolvedPromptSettings, Scoring, resolve_prompt_settings
from mergegate.tasks.evaluation.stage import CountLimit
from mergegate.tasks.evaluation.task_definition import EvalTask
from mergegate.tasks.evaluation.task_loading import evaluated_documents, load_task
from mergegate.tasks.evaluation.task_setup import answer_budget, require_known_generation, room_for_prompt, set_up_tasks
from mergegate.tasks.stage import StageValue, value_stage
from mergegate.tasks.store import NotInKey

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
            leaf.build_all_requests(
                samples=[position],
                system_instruction=prompting.system_instruction,
                apply_chat_template=prompting.is_chat,
                fewshot_as_multiturn=prompting.is_multiturn,
                chat_template=_template_of(reader, task, tokenizer) if prompting.is_chat else None,
            )
            as_picture_prompt(leaf.instances[0])
            prompt, *continuations = leaf.instances[0].args
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
                leaf.build_all_requests(
                    samples=positions[leaf_name],
                    system_instruction=prompting.system_instruction,
                    apply_chat_template=prompting.is_chat,
                    fewshot_as_multiturn=prompting.is_multiturn,
                    chat_template=_template_of(reader, task, tokenizer) if prompting.is_chat else None,
                )
                for instance in leaf.instances:
                    texts.append("".join(argument for argument in instance.args if isinstance(argument, str)))
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
