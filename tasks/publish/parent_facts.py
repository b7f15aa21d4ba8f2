"""Read what the card of a parent says about its training: datasets, and links to documents of its provider.

Cards are untrusted text. Only links with ``https`` or ``http`` are taken, and every text is escaped where it is shown.
"""

from __future__ import annotations

from dataclasses import dataclass

from mergegate.tasks.checkpoints import PinnedCheckpoint, card_directory, read_card
from mergegate.tasks.publish.provenance import hub_id


@dataclass(frozen=True)
class DocumentLink:
    """A link in a parent's card to a document of its provider: what it is called there, and its address."""

    text: str
    url: str


@dataclass(frozen=True)
class ParentFacts:
    """Facts about one parent of a merge, as far as its card states them.

    Attributes:
        name: Public reference, as in the recipe.
        role: ``base`` or ``parent``.
        identity: Commit on the Hub, or sha256 of the files.
        url: Page of the model on the Hub, or empty for a local model.
        supplier: Namespace on the Hub, or empty for a local model.
        license: License identifier, or empty if licenses were not checked.
        datasets: Training datasets that the card names (``datasets``).
        training_summaries: Links to summaries of the training content.
        copyright_policies: Links to policies on copyright.
        training_compute: Floating-point operations of its training, or None if neither profile nor card states it.
        training_compute_source: ``publish.about`` or the card. Empty if ``training_compute`` is None.
        energy: Energy of its training in kWh, if the card states it.
    """

    name: str
    role: str
    identity: str
    url: str = ""
    supplier: str = ""
    license: str = ""
    datasets: tuple[str, ...] = ()
    training_summaries: tuple[DocumentLink, ...] = ()
    copyright_policies: tuple[DocumentLink, ...] = ()
    training_compute: float | None = None
    training_compute_source: str = ""
    energy: float | None = None


def parent_facts(parent: PinnedCheckpoint, license: str, training_compute: float | None = None) -> ParentFacts:
    """Return the facts about ``parent``, which has its public name.

    ``training_compute`` is the value in the profile, in floating-point operations.
    """
    repository = hub_id(parent) if parent.revision is not None else ""
    value = read_card(card_directory(parent.directory)).metadata.get("datasets")
    datasets = value if isinstance(value, list) else [value]
    return ParentFacts(
        name=parent.ref,
        role="base" if parent.is_base else "parent",
        identity=parent.revision or parent.digest,
        url=f"https://huggingface.co/{repository}" if repository else "",
        supplier=repository.partition("/")[0],
        license=license,
        datasets=tuple(name for name in datasets if isinstance(name, str)),
        training_compute=training_compute,
        training_compute_source="publish.about" if training_compute is not None else "",
    )
