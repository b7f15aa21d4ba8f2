"""Find code that a release would contain: Python files of a parent, and references to code in its configurations.

mergegate always loads models with ``trust_remote_code`` off. But users of the release may switch it on, because its
files require it. So each piece of code is a finding, which a profile accepts by name. The one exception is ``trusted``
code: the confined model process runs the code of a repository that the profile names at its commit, also for a merge
that gets its code from such a repository::

    checks:
      code:
        accepted: [modeling_acme.py, modeling_acme.AcmeForCausalLM]
        trusted: [acme/model@0123456789abcdef0123456789abcdef01234567]
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any

from mergegate.merge_core import Finding, MergePlan
from mergegate.merge_core.checkpoint.vocabulary import TOKENIZER_BOUNDS

_CONFIGURATIONS = ("tokenizer_config.json", "processor_config.json", "preprocessor_config.json")


def custom_code_findings(plan: MergePlan, accepted_code: Collection[str] | None) -> tuple[Finding, ...]:
    """Return one finding for each code file and each reference to code. A finding blocks unless the code is accepted.

    ``accepted_code`` names the code that the profile accepts. None means that no profile exists, so code leads only to
    a warning.

    Raises:
        InvalidInput: A configuration is not JSON.
    """
    donor = plan.donor.directory.name
    code = [(f"{donor}: {name}", name) for name in plan.companions if name.endswith(".py")]
    code += _auto_map_references(f"{donor}: config.json", plan.config)
    for name in _CONFIGURATIONS:
        if (content := plan.companions.json(name, TOKENIZER_BOUNDS)) is not None:
            source = plan.companions.sources[name]
            owner = donor if isinstance(source, bytes) else source.name
            code += _auto_map_references(f"{owner}: {name}", content)
    return tuple(
        Finding("info", location, f"the code {name}, which the profile accepts")
        if accepted_code is not None and name in accepted_code
        else Finding(
            "warn" if accepted_code is None else "block",
            location,
            found=f"the code {name}, which would be part of the release",
            expected="a model without code of its own",
            remedy=f"review the code, then set checks.code.accepted: [{name}] in the profile. mergegate runs it only "
            "if checks.code.trusted names its repository at its commit",
        )
        for location, name in dict.fromkeys(code)
    )


def _auto_map_references(location: str, configuration: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield the location and name of each class that transformers would load from a code file or another repository."""
    pending = [configuration.get("auto_map")]
    while pending:
        reference = pending.pop()
        if isinstance(reference, str):
            yield f"{location}: auto_map", reference
        elif isinstance(reference, Mapping):
            pending += reference.values()
        elif isinstance(reference, list):
            pending += reference
