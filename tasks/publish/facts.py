"""Collect the facts about a release that the card, the compliance sheet and the bills of materials state.

Each fact has a source: the profile (``publish.about``), the merged checkpoint, the evaluation, or the card of a parent.
A fact without a source is missing: it is empty or None, and the documents list it as missing. The same inputs give the
same facts, so they contain no dates and no measured times.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from mergegate.tasks.publish.compute import ComputeEstimate
from mergegate.tasks.publish.parent_facts import ParentFacts
from mergegate.tasks.publish.settings import AboutRelease


@dataclass(frozen=True)
class DatasetFacts:
    """A dataset that a release was evaluated on or calibrated with.

    Attributes:
        name: Name of the task, or public path of a text.
        purpose: ``evaluation``, ``perplexity`` or ``calibration``.
        digest: 64 hex digits that pin the data, or empty.
        documents: Number of documents that were used, or None if unknown.
        sources: Datasets on the Hub, as ``id@revision``. Empty for local data.
    """

    name: str
    purpose: str
    digest: str = ""
    documents: int | None = None
    sources: tuple[str, ...] = ()


@dataclass(frozen=True)
class ReleaseFacts:
    """Facts about a release.

    Attributes:
        name: Name of the release.
        address: Reference for ``mergegate verify``. '.' for a local directory.
        hub_id: Id ``org/name`` of the repository on the Hub, or None.
        about: Statements of the publisher, with the supplier filled in from the Hub repository if it is known.
        architecture: Class of the model, such as ``LlamaForCausalLM``, or empty.
        model_type: Type in ``config.json``, such as ``llama``, or empty.
        hyperparameters: Sizes in ``config.json``, such as ``hidden_size``.
        parameters: Number of parameters of the released weights, or None if unknown.
        dtypes: Types of the stored weights, such as ``BF16``.
        method: Description of the merge, such as ``ties of 2 over base``.
        parents: Facts about each parent, in the recipe's order.
        datasets: Datasets of the evaluation, the perplexity check and the calibration.
        compute: Estimate of computation and energy.
    """

    name: str
    address: str
    hub_id: str | None
    about: AboutRelease
    architecture: str
    model_type: str
    hyperparameters: Mapping[str, int | float | str]
    parameters: int | None
    dtypes: tuple[str, ...]
    method: str
    parents: tuple[ParentFacts, ...]
    datasets: tuple[DatasetFacts, ...]
    compute: ComputeEstimate
