"""Find code that would travel with a release: Python files of a parent, and references to code in its configurations.

mergegate runs none of it: it always loads models with ``trust_remote_code`` off. But users of the release may switch
it on, because its files require it. This code is therefore a finding, which a profile accepts by name. mergegate runs
it only in the confined model process, and only for a repository that the profile names at its commit, or for a merge
that gets its code from such a repository::

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

# Key under which transformers finds classes next to the weights or in another repository.
_MAP = "auto_map"
_AT_A_COMMIT = r"^[\w.-]+/[\w.-]+@[0-9a-f]{40}$"
_CONFIGURATIONS = ("tokenizer_config.json", "processor_config.json", "preprocessor_config.json")


class CodeSettings(BaseModel):
    """Code that may travel with a release."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    accepted: tuple[str, ...] = Field(
        default=(), description="Python files, and classes of 'auto_map', that may be in the release, by name."
    )
    trusted: tuple[Annotated[str, Field(pattern=_AT_A_COMMIT)], ...] = Field(
        default=(), description="Repositories whose own code may be run, each at a commit: org/name@<40 hex digits>."
    )


def custom_code_findings(plan: MergePlan, accepted: Collection[str] | None) -> tuple[Finding, ...]:
    """Return one finding for each code file and each reference. A finding blocks unless its code is accepted.

    Args:
        accepted: Code that the profile accepts. None means that no profile exists, so code leads only to a warning.

    Raises:
        InvalidInput: If a configuration is not JSON.
    """
    return tuple(_finding(location, code, accepted) for location, code in dict.fromkeys(_code(plan)))


def _finding(location: str, code: str, accepted: Collection[str] | None) -> Finding:
    if accepted is not None and code in accepted:
        return Finding("info", location, f"the code {code}, which the profile accepts")
    return Finding(
        "warn" if accepted is None else "block",
        location,
        found=f"the code {code}, which would travel with the release",
        expected="a model that needs no code of its own",
        remedy=f"read it, then accept it in the profile: checks.code.accepted: [{code}]; run it is only if"
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


def _referenced(location: str, configuration: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    references = configuration.get(_MAP)
    if references is None:
        return
    pending = [references]
    while pending:
        reference = pending.pop()
        if isinstance(reference, str):
            yield f"{location}: {_MAP}", reference
        elif isinstance(reference, Mapping):
            pending += reference.values()
        elif isinstance(reference, list):
            pending += reference
