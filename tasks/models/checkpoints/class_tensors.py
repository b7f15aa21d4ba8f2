"""Compare the stored tensors of models with the tensors of their classes.

transformers builds the class without weights and loads the stored names, shapes and formats through its own
conversions, in the confined process and before any weight is read. Importing it takes seconds, so the store keeps each
answer, and models of one configuration with equal tables share it.
"""

from __future__ import annotations

import copy
import json
import logging
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.metadata import version
from typing import Any, NamedTuple, TypeAlias

from pydantic import BaseModel, ValidationError

from mergegate.merge_core.checkpoint import class_of, config_parts
from mergegate.merge_core.errors import MergegateError
from mergegate.tasks.base.stage import record_stage, store
from mergegate.tasks.base.store import digest
from mergegate.tasks.models.checkpoints.model_cache import import_lean
from mergegate.tasks.models.checkpoints.model_process import CallNeeds, TellProgress, call_model_process

_VERSION = 1  # Increase it when the meaning of an answer changes.
_TIME_LIMIT = 120.0  # Seconds.
# Keys that choose how a library runs the network, and record where it comes from.
_NOT_BUILT = ("quantization_config", "auto_map", "dtype", "torch_dtype", "transformers_version")
# Line of transformers' report for a parameter that it cannot join from stored tensors.
_CONVERSION = re.compile(r"^([\w.{}, #*-]+?)\s*\|.*CONVERSION")

Table: TypeAlias = tuple[tuple[str, str, tuple[int, ...]], ...]
"""Name, format and shape of each stored tensor."""


class Differences(NamedTuple):
    """Differences between stored tensors and those of the class. Plain types, because a process returns them."""

    missing: tuple[str, ...] = ()  # Names of parameters that no stored tensor fills.
    # Name, stored shape and expected shape of each parameter with another shape.
    shapes: tuple[tuple[str, tuple[int, ...], tuple[int, ...]], ...] = ()
    # Names of parameters that the class joins from stored tensors, which do not fit each other.
    unjoined: tuple[str, ...] = ()
    ignored: tuple[str, ...] = ()  # Names of stored tensors that the class does not load.
    reason: str = ""  # Why the class could not be built, or an empty string.
    unknown: bool = False  # Whether the reason is that transformers has no class of this name.


class _Answer(BaseModel, frozen=True):
    """Stored result of a comparison."""

    differences: Differences


class _NotBuilt(Exception):
    """The class could not be built. Another environment or more memory may help, so the reason is not stored."""


def compare_with_classes(models: Sequence[tuple[Mapping[str, Any], Iterable[Any]]]) -> list[Differences]:
    """Return the differences of each model. A model is its ``config.json`` and its stored tensors.

    Equal models are compared once.
    """
    questions = [
        (
            json.dumps(_structure(config), sort_keys=True),
            tuple(sorted((tensor.name, tensor.dtype.torch_name, tensor.shape) for tensor in tensors)),
        )
        for config, tensors in models
    ]
    answers = {question: _answer(*question) for question in dict.fromkeys(questions)}
    return [answers[question] for question in questions]


def _answer(config: str, table: Table) -> Differences:
    def ask() -> _Answer:
        needs = CallNeeds(gpu=False, time_limit=_TIME_LIMIT)
        answer: object = call_model_process(build_class, (config, table), location="classes", needs=needs)
        # Untrusted code in that process may have sent something else.
        result = _Answer.model_validate({"differences": answer})
        if result.differences.reason:
            raise _NotBuilt(result.differences)
        return result

    key = digest([_VERSION, version("transformers"), config, table])
    record_stage("classes", key, "")
    try:
        value, _ = store().build_value("classes", key, _Answer, ask)
    except MergegateError as error:
        return Differences(reason=error.found)
    except _NotBuilt as error:
        return error.args[0]  # type: ignore[no-any-return]
    except ValidationError:
        return Differences(reason="the process returned no result")
    store().mark_used("classes", key)
    return value.value.differences


def _structure(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return what ``config`` says about the network."""
    result: dict[str, Any] = copy.deepcopy(dict(config))
    parts: list[Any] = config_parts(result)
    for part in parts:
        for key in [key for key in part if key in _NOT_BUILT or key.startswith("_") or "attn_impl" in key]:
            del part[key]
    return result


def build_class(config_text: str, table: Table, on_progress: TellProgress) -> Differences:
    """Return the differences between the tensors of ``table`` and the class that the text of a configuration names.

    Runs in the model process. ``on_progress`` is never called.
    """
    try:
        return _build(json.loads(config_text, object_hook=_with_infinity), table)
    except Exception as error:  # transformers raises plain exceptions for settings that it does not support.
        return Differences(reason=" ".join(f"{type(error).__name__}: {error}".split())[:200])


def _build(config: dict[str, Any], table: Table) -> Differences:
    import_lean("torch", "transformers.modeling_utils")
    import torch
    import transformers

    class_name = class_of(config)
    if not class_name:
        return Differences()
    settings = transformers.CONFIG_MAPPING[config["model_type"]].from_dict(config)
    model_class: Any = getattr(transformers, class_name, None)
    if not hasattr(model_class, "config_class"):
        reason = f"transformers {transformers.__version__} has no class {class_name!r}"
        return Differences(reason=reason, unknown=True)
    # A text model may be stored with the configuration of its multimodal base.
    text_settings = settings.get_text_config()
    if not isinstance(settings, model_class.config_class) and isinstance(text_settings, model_class.config_class):
        settings = text_settings
    stored = {
        name: torch.empty(shape, dtype=getattr(torch, dtype, torch.float32), device="meta")
        for name, dtype, shape in table
    }
    with _report() as lines:
        try:
            _, loaded = model_class.from_pretrained(
                None, config=settings, state_dict=stored, device_map="meta", attn_implementation="eager",
                ignore_mismatched_sizes=True, output_loading_info=True,
            )  # fmt: skip
        except RuntimeError:
            if unjoined := tuple(name for line in lines for name in _CONVERSION.findall(line)):
                return Differences(unjoined=unjoined)
            raise
    shapes = ((name, tuple(found), tuple(built)) for name, found, built in loaded["mismatched_keys"])
    return Differences(
        missing=tuple(sorted(loaded["missing_keys"])),
        shapes=tuple(sorted(shapes)),
        ignored=tuple(sorted(loaded["unexpected_keys"])),
    )


def _with_infinity(value: dict[str, Any]) -> Any:
    """Return the number that transformers writes as ``{"__float__": "Infinity"}``, or ``value`` for other objects."""
    return float(value["__float__"]) if value.keys() == {"__float__"} else value


@contextmanager
def _report() -> Iterator[list[str]]:
    """Collect the lines that transformers logs, instead of printing them, and show no progress bar."""
    from transformers.utils import logging as library_logging

    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.extend(record.getMessage().splitlines())  # type: ignore[method-assign]
    has_bar, verbosity = library_logging.is_progress_bar_enabled(), library_logging.get_verbosity()
    library_logging.set_verbosity_warning()
    library_logging.disable_progress_bar()
    library_logging.disable_default_handler()
    library_logging.add_handler(handler)
    try:
        yield lines
    finally:
        library_logging.remove_handler(handler)
        library_logging.enable_default_handler()
        library_logging.set_verbosity(verbosity)
        if has_bar:
            library_logging.enable_progress_bar()
