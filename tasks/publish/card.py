"""The model card of a merge: metadata that the Hub understands, and a page that a person can decide by."""

from __future__ import annotations

from collections.abc import Sequence

import yaml

from tasks.licenses.algebra import Combination
from tasks.pin import Parent
from tasks.report.content import ReportContent
from tasks.report.table import as_markdown


def model_card(content: ReportContent, parents: Sequence[Parent], licence: Combination) -> str:
    """README.md of the release. Deterministic: no dates, no paths of this machine."""
    front = yaml.safe_dump(_metadata(content, parents, licence), sort_keys=False, allow_unicode=True)
    sources = "\n".join(
        f"| {model.ref} | {model.licence} | `{model.revision or model.digest[:16]}` |" for model in content.parents
    )
    asked = "\n".join(f"* {obligation}" for obligation in content.obligations) or "No obligations."
    return f"""---
{front}---

# {content.name}

A merge made without training: {content.method}. It was checked, evaluated and gated by mergegate before it was
released. The evidence is in [report.html](report.html), where it comes from in [provenance.json](provenance.json).
The weights are not those of any parent: they were modified by merging.

## Made from

| model | licence | commit or digest |
| --- | --- | --- |
{sources}

```yaml
{content.recipe.strip()}
```

{as_markdown(content)}
## Licence

{content.licence}

{asked}

## Check it

`sha256sum --check SHA256SUMS` compares every file; `mergegate verify` compares also what they say about each other;
`mergegate reproduce` makes the weights again from recipe and parents, to the byte.
"""


def _metadata(content: ReportContent, parents: Sequence[Parent], licence: Combination) -> dict[str, object]:
    metadata: dict[str, object] = {
        **licence.card,
        "library_name": "transformers",
        "pipeline_tag": "text-generation",
        "tags": ["merge", "mergegate"],
    }
    # The Hub takes only its own ids as base_model; a path of the machine that merged would be refused there.
    if hub := [parent.ref.partition("@")[0] for parent in parents if parent.revision is not None]:
        metadata |= {"base_model": hub, "base_model_relation": "merge"}
    merged = next(model for model in content.models if model.role == "merge")
    if merged.scores and merged.scores.tasks:
        metadata["model-index"] = [
            {
                "name": content.name,
                "results": [
                    {
                        "task": {"type": "text-generation"},
                        "dataset": {"name": score.task, "type": score.task},
                        "metrics": [{"type": score.metric, "value": round(score.score, 4), "name": score.task}],
                    }
                    for score in merged.scores.tasks
                ],
            }
        ]
    return metadata
