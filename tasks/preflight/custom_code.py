"""Code that would travel with a release: Python files of a parent, and references to such in its configurations.

mergegate runs none of it: ``trust_remote_code`` is off wherever a model is loaded. But whoever loads the release may
switch it on because its files ask for that. So it is a finding, and a profile accepts it by name. It is run, in the
confined process that holds models, only of a repository that the profile names at its commit; and of a merge to which
such a one gives its code::

    checks:
      code:
        accepted: [modeling_acme.py, modeling_acme.AcmeForCausalLM]
        trusted: [acme/model@0123456789abcdef0123456789abcdef01234567]
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

from mergegate.merge_core import Finding, MergePlan
from mergegate.merge_core.checkpoint.vocabulary import TOKENIZER_BOUNDS

# Where transformers looks for classes that lie beside the weights, or in another repository.
_MAP = "auto_map"
_AT_A_COMMIT = r"^[\w.-]+/[\w.-]+@[0-9a-f]{40}$"
_CONFIGURATIONS = ("tokenizer_config.json", "processor_config.json", "preprocessor_config.json")


class CodeSettings(BaseModel):
    """What code may travel with a release."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    accepted: tuple[str, ...] = Field(
        default=(), description="Python files, and classes of 'auto_map', that may be in the release, by name."
    )
    trusted: tuple[Annotated[str, Field(pattern=_AT_A_COMMIT)], ...] = Field(
        default=(), description="Repositories whose own code may be run, each at a commit: org/name@<40 hex digits>."
    )


def custom_code_findings(plan: MergePlan, accepted: Collection[str] | None) -> tuple[Finding, ...]:
    """A finding for each file and each reference: it blocks unless it is accepted.

    Args:
        accepted: By the profile; None: there is none, and it is only said.

    Raises:
        InvalidInput: A configuration that is not JSON.
    """
    return tuple(_finding(where, found, accepted) for where, found in dict.fromkeys(_code(plan)))


def _finding(where: str, found: str, accepted: Collection[str] | None) -> Finding:
    if accepted is not None and found in accepted:
        return Finding("info", where, f"the code {found}, which the profile accepts")
    return Finding(
        "warn" if accepted is None else "block",
        where,
        found=f"the code {found}, which would travel with the release",
        expected="a model that needs no code of its own",
        remedy=f"read it, then accept it in the profile: checks.code.accepted: [{found}]; run it is only if"
        " checks.code.trusted names its repository at its commit",
    )


def _code(plan: MergePlan) -> Iterator[tuple[str, str]]:
    donor = plan.donor.directory.name
    for name in plan.companions:
        if name.endswith(".py"):
            yield f"{donor}: {name}", name
    yield from _referenced(f"{donor}: config.json", plan.config)
    for name in _CONFIGURATIONS:
        if (content := plan.companions.json(name, TOKENIZER_BOUNDS)) is not None:
            source = plan.companions.sources[name]
            owner = donor if isinstance(source, bytes) else source.name
            yield from _referenced(f"{owner}: {name}", content)


def _referenced(where: str, configuration: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    found = configuration.get(_MAP)
    if found is None:
        return
    waiting = [found]
    while waiting:
        one = waiting.pop()
        if isinstance(one, str):
            yield f"{where}: {_MAP}", one
        elif isinstance(one, Mapping):
            waiting += one.values()
        elif isinstance(one, list):
            waiting += one
