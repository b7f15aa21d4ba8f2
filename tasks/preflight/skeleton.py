"""Compare the stored tensors of each model, and of the planned merge, with those that its class builds.

transformers builds the class without weights and loads the stored names, shapes and formats through its own
conversions, in the confined process and before any weight is read. This finds what the models of a merge have in
common: a weight that an exporter left out or wrote several times, or a configuration that describes another network.
"""

from __future__ import annotations

import copy
import json
import logging
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import lru_cache
from typing import Any, NamedTuple, TypeAlias

from mergegate.merge_core import Checkpoint, Finding, MergePlan
from mergegate.merge_core.architecture import is_head, is_of_head, is_optional
from mergegate.merge_core.checkpoint import config_parts
from mergegate.merge_core.errors import MergegateError, Severity, to_printable
from mergegate.merge_core.plan import network_shards
from mergegate.tasks.checkpoints import CLASS_LIBRARIES, CallNeeds, TellProgress, call_model_process, import_lean

_TIME_LIMIT = 120.0  # Seconds.
_RESULT = "the result"
# Keys that choose how a library runs the network, and record where it comes from.
_NOT_BUILT = ("quantization_config", "auto_map", "dtype", "torch_dtype", "transformers_version")
# Line of transformers' report for a parameter that it cannot join from stored tensors.
_CONVERSION = re.compile(r"^([\w.{}, #*-]+?)\s*\|.*CONVERSION")
_EXPORT = "save the model again with the library that trained it, or download it again"

Table: TypeAlias = tuple[tuple[str, str, tuple[int, ...]], ...]
"""Name, format and shape of each stored tensor."""


class Differences(NamedTuple):
    """Differences between stored tensors and those of the class. Plain types, because a process returns them.

    Args:
        missing: Names of parameters that no stored tensor fills.
        shapes: Name, stored shape and expected shape of each parameter with another shape.
        unjoined: Names of parameters that the class joins from stored tensors, which do not fit each other.
        ignored: Names of stored tensors that the class does not load.
        reason: Why the class could not be built, or an empty string.
    """

    missing: tuple[str, ...] = ()
    shapes: tuple[tuple[str, tuple[int, ...], tuple[int, ...]], ...] = ()
    unjoined: tuple[str, ...] = ()
    ignored: tuple[str, ...] = ()
    reason: str = ""


def skeleton_findings(plan: MergePlan, checkpoints: Mapping[str, Checkpoint]) -> list[Finding]:
    """Return a finding for each tensor in which a model differs from its class.

    The result of ``plan`` is compared too. It is reported only if no model has a finding.
    """
    models = {
        name: (checkpoint.config, _table(checkpoint.tensors.values())) for name, checkpoint in checkpoints.items()
    }
    if plan.recipe.output is None:  # An adapter is no model.
        models[_RESULT] = (plan.config, _table(each for shard in network_shards(plan.shards) for each in shard.stored))
    groups: dict[tuple[str, Table], list[str]] = {}
    for name, (config, table) in models.items():
        groups.setdefault((json.dumps(_structure(config), sort_keys=True), table), []).append(name)
    try:
        needs = CallNeeds(gpu=False, time_limit=_TIME_LIMIT)
        answer: object = call_model_process(compare_with_classes, (tuple(groups),), location="classes", needs=needs)
    except MergegateError as error:
        answer = [Differences(reason=error.found)] * len(groups)
    # Untrusted code in that process may have sent something else.
    if (
        not isinstance(answer, list)
        or len(answer) != len(groups)
        or not all(isinstance(differences, Differences) for differences in answer)
    ):
        answer = [Differences(reason="the process returned no result")] * len(groups)
    findings: list[Finding] = []
    for names, differences in zip(groups.values(), answer, strict=True):
        for name in [name for name in names if name != _RESULT] or (names if not findings else []):
            findings += _findings(name, models[name][0], differences)
    return findings


def _table(tensors: Iterable[Any]) -> Table:
    return tuple(sorted((tensor.name, tensor.dtype.torch_name, tensor.shape) for tensor in tensors))


def _class_of(config: Mapping[str, Any]) -> str:
    classes = config.get("architectures")
    return str(classes[0]) if isinstance(classes, list) and classes else ""


def _structure(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return what ``config`` says about the network."""
    result: dict[str, Any] = copy.deepcopy(dict(config))
    parts: list[Any] = config_parts(result)
    for part in parts:
        for key in [key for key in part if key in _NOT_BUILT or key.startswith("_") or "attn_impl" in key]:
            del part[key]
    return result


def _findings(model: str, config: Mapping[str, Any], differences: Differences) -> Iterator[Finding]:
    class_name = to_printable(_class_of(config))
    if differences.reason:
        reason = to_printable(differences.reason)
        expected = f"tensors of the class {class_name}"
        yield Finding("info", f"{model}: tensors", f"not compared with their class: {reason}", expected)
    # Code of the model may define another class of this name.
    worst: Severity = "warn" if config.get("auto_map") else "block"
    rows: list[tuple[Severity, str, str, str]] = []
    expected = f"every tensor that {class_name} builds from config.json"
    for name in differences.missing:
        # A head or a pooler may be new. Training alone uses tensors such as a mask.
        severity = "warn" if is_of_head(name) and not is_head(name) else worst
        rows.append((severity, name, f"missing: {class_name} would fill it with random numbers", expected))
    for name, stored, built in differences.shapes:
        rows.append(
            (worst, name, f"shape {list(stored)}", f"{list(built)}, as {class_name} builds it from config.json")
        )
    for name in differences.unjoined:
        found = f"{class_name} cannot join the stored tensors of this parameter"
        rows.append((worst, name, found, "all of them, such as one for each expert, with one shape"))
    for name in filter(lambda name: not is_optional(name), differences.ignored):
        rows.append(("info", name, f"{class_name} does not load this tensor", f"only tensors of {class_name}"))
    for severity, name, found, expected in rows:
        remedy = "nothing to do, unless other software needs it" if severity == "info" else _EXPORT
        cause = f"{model}: {severity}, {found.partition(' ')[0]}"
        yield Finding(severity, f"{model}: {to_printable(name)}", found, expected, remedy, cause)


def compare_with_classes(models: Sequence[tuple[str, Table]], on_progress: TellProgress) -> list[Differences]:
    """Return the differences of each model. A model is the text of its ``config.json`` and the table of its tensors.

    Runs in the model process.
    """
    results = []
    for number, (config, table) in enumerate(models, start=1):
        try:
            results.append(_compare(config, table))
        except Exception as error:  # transformers raises plain exceptions for settings that it does not support.
            results.append(Differences(reason=" ".join(f"{type(error).__name__}: {error}".split())[:200]))
        on_progress(number, len(models))
    return results


@lru_cache(maxsize=64)
def _compare(config_text: str, table: Table) -> Differences:
    import_lean(*CLASS_LIBRARIES)
    import torch
    import transformers

    config: dict[str, Any] = json.loads(config_text, object_hook=_with_infinity)
    class_name = _class_of(config)
    model_class: Any = getattr(transformers, class_name, None)
    if not class_name:
        return Differences()
    if not hasattr(model_class, "config_class"):
        return Differences(reason=f"transformers {transformers.__version__} has no class {class_name!r}")
    settings = transformers.CONFIG_MAPPING[config["model_type"]].from_dict(config)
    if not isinstance(settings, model_class.config_class):
        settings = settings.get_text_config()
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
