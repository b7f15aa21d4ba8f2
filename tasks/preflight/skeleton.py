"""Report where the stored tensors of each model, and of the planned merge, differ from those that its class builds.

This finds what the models of a merge have in common: a weight that an exporter left out or wrote several times, or a
configuration that describes another network.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from mergegate.merge_core import Checkpoint, Finding, MergePlan
from mergegate.merge_core.architecture import is_head, is_of_head, is_optional
from mergegate.merge_core.checkpoint import class_of
from mergegate.merge_core.errors import Severity, to_printable
from mergegate.merge_core.plan import network_shards
from mergegate.tasks.checkpoints import Differences, compare_with_classes

_EXPORT = "save the model again with the library that trained it, or download it again"


def skeleton_findings(plan: MergePlan, checkpoints: Mapping[str, Checkpoint]) -> list[Finding]:
    """Return a finding for each tensor in which a model differs from its class.

    The result of ``plan`` is compared too. It is reported only if no model has a finding.
    """
    models: dict[str, tuple[Mapping[str, Any], list[Any]]] = {
        name: (checkpoint.config, list(checkpoint.tensors.values())) for name, checkpoint in checkpoints.items()
    }
    if plan.recipe.output is None:  # An adapter is no model.
        stored = [tensor for shard in network_shards(plan.shards) for tensor in shard.stored]
        models["the result"] = (plan.config, stored)
    findings: list[Finding] = []
    for name, differences in zip(models, compare_with_classes(list(models.values())), strict=True):
        if name in checkpoints or not findings:
            findings += _findings(name, models[name][0], differences)
    return findings


def _findings(model: str, config: Mapping[str, Any], differences: Differences) -> Iterator[Finding]:
    class_name = to_printable(class_of(config))
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
