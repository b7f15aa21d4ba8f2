"""Render the first document of a task as a model reads it, before anything is scored.

The preview lets a user inspect a prompt. It also reveals a tokenizer that cannot be loaded, or a chat template or task
function that fails. Prompts, few-shot examples and templates come from lm-eval, set up as for an evaluation
(``task_setup``). Only the tokenizer of the model is needed::

    result = preview(task, scoring, TokenizerPlace(name="chat", directory=..., digest=...), limit).value
    print(result.prompt, result.answer, result.tokens)
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict

from mergegate.merge_core.errors import InvalidInput, MergegateError
from mergegate.tasks.checkpoints import TellProgress
from mergegate.tasks.evaluation.document_order import order_documents
from mergegate.tasks.evaluation.process import call_with_task_data
from mergegate.tasks.evaluation.settings import Scoring, resolve_prompt_settings
from mergegate.tasks.evaluation.stage import CountLimit
from mergegate.tasks.evaluation.task_definition import EvalTask
from mergegate.tasks.stage import StageValue, value_stage
from mergegate.tasks.store import NotInKey

_LONGEST = 20_000  # characters of a prompt that are stored


class TokenizerPlace(BaseModel):
    """Location of the tokenizer and the chat template of a model, and their digest."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: Annotated[str, NotInKey]  # of the model
    directory: Annotated[Path, NotInKey]
    digest: str


class TaskPreview(StageValue):
    """The first document that would be scored."""

    leaf: str  # task of the document; for a group, the task below it
    prompt: str  # everything before the answer, truncated if it is very long
    answer: str  # first continuation whose likelihood is computed; for a generated answer, the expected one
    tokens: int  # number of tokens in the prompt
    room: int | None = None  # tokens left for a prompt next to the longest answer; None: no answer, or unknown

    def summary(self) -> str:
        return f"{self.tokens:,} tokens"


@value_stage("preview", version=2, subject="task")
def preview(task: EvalTask, scoring: Scoring, tokenizer: TokenizerPlace, limit: CountLimit) -> TaskPreview:
    """Render the first document of ``task``, whose data is pinned, as the model of ``tokenizer`` would read it.

    Raises:
        InvalidInput: If the tokenizer or the data cannot be loaded, if a template, a function of the task or the
            few-shot examples fail, or if answers may be longer than the model's context.
        Refused: If rendering takes longer than ``limit``.
    """
    return call_with_task_data(task, _render, (task, scoring, tokenizer), "its first document", limit.seconds)


def _render(task: EvalTask, scoring: Scoring, tokenizer: TokenizerPlace, on_progress: TellProgress) -> TaskPreview:
    """Render the document; runs in the process that holds models."""
    from lm_eval.models.huggingface import HFLM

    from mergegate.tasks.evaluation.harness import documents_in_set, load_task, quiet, user_errors
    from mergegate.tasks.evaluation.task_setup import require_known_generation, room_for_prompt, set_up_tasks
    from mergegate.tasks.evaluation.task_texts import text_of

    with quiet():
        loaded_tokenizer = _tokenizer_of(tokenizer)
        loaded = load_task(task)
        counted = documents_in_set(loaded, task)
        order = (key for key in order_documents(loaded.sizes, scoring.seed) if counted is None or key in counted)
        if (first := next(order, None)) is None:
            raise InvalidInput(f"task {task.name}", found="no document", expected="data with documents")
        name, position = first
        context = _context_of(tokenizer, loaded_tokenizer, scoring)
        # The same attributes as the ``LM`` of the backend.
        reader = SimpleNamespace(tokenizer=loaded_tokenizer, chat_template_args={}, max_length=context)
        how = resolve_prompt_settings(task.asked, scoring)
        require_known_generation(how, scoring.backend, task.name, loaded.generation)
        room = {
            each: room_for_prompt(loaded, each, how, context)
            for each, settings in loaded.generation.items()
            if settings is not None
        }
        leaf = set_up_tasks(loaded, {name: [position]}, reader, how, scoring.seed)[name]
        template = partial(HFLM.apply_chat_template, reader)
        with user_errors(task):
            leaf.build_all_requests(
                samples=[position],
                system_instruction=how.system_instruction,
                apply_chat_template=how.is_chat,
                fewshot_as_multiturn=how.is_multiturn,
                chat_template=_checked_template(template, tokenizer.name, task.name) if how.is_chat else None,
            )
            prompt, *rest = leaf.instances[0].args
            _require_instruction(how.system_instruction, str(prompt), tokenizer.name, task.name)
            answer = rest[0] if rest and isinstance(rest[0], str) else text_of(leaf, leaf.eval_docs[position]).target
        return TaskPreview(
            leaf=name,
            prompt=str(prompt)[:_LONGEST],
            answer=str(answer)[:_LONGEST],
            tokens=len(loaded_tokenizer(str(prompt))["input_ids"]),
            room=room.get(name),
        )


def _require_instruction(instruction: str | None, prompt: str, model: str, task: str) -> None:
    """Check that the prompt contains the system instruction: lm-eval drops it if a template rejects system messages."""
    if instruction and " ".join(instruction.split()) not in " ".join(prompt.split()):
        raise InvalidInput(
            f"evaluate.tasks: {task}: system_instruction",
            found=f"a chat template of {model} that leaves it out",
            expected="a template that takes a system message",
            remedy="say chat_template in the recipe, or put it into the doc_to_text of a YAML file of your own",
        )


def _tokenizer_of(source: TokenizerPlace) -> Any:
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(str(source.directory), trust_remote_code=False)
    except Exception as error:  # transformers promises no set of types
        raise InvalidInput(
            f"{source.name}: its tokenizer",
            found=f"cannot be loaded: {' '.join(str(error).split())[:300]}",
            expected="a tokenizer that transformers can load, beside the weights",
            remedy="download or copy its files (tokenizer.json, tokenizer_config.json, ...) from the base model",
        ) from error


def _context_of(source: TokenizerPlace, tokenizer: Any, scoring: Scoring) -> int | None:
    """Return the context length that the backend will use, None if only the backend can tell."""
    from lm_eval.models.utils import resolve_max_length
    from transformers import AutoConfig

    if scoring.max_length is not None:
        return scoring.max_length
    try:
        config = AutoConfig.from_pretrained(str(source.directory), trust_remote_code=False)
    except Exception:  # transformers promises no set of types; the check of file headers reports what is wrong
        return None
    if scoring.backend not in ("hf", "served"):  # vLLM computes a longer context for scaled positions
        return None
    return int(resolve_max_length(config, tokenizer))


def _checked_template(template: Callable[..., str], model: str, task: str) -> Callable[..., str]:
    """Wrap ``template`` so that its exceptions blame the model, not the task."""

    def fill_in(history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        try:
            return template(history, add_generation_prompt=add_generation_prompt)
        except MergegateError:
            raise
        except Exception as error:
            raise InvalidInput(
                f"{model}: chat template",
                found=f"fails on a document of {task}: {' '.join(str(error).split())[:300]}",
                expected="a template that takes the messages of a task",
                remedy="say chat_template in the recipe, correct the model's, or evaluate with chat_template: false",
            ) from error

    return fill_in
