"""List the kinds of built-in tasks."""

from typing import Annotated

from pydantic import Field

from mergegate.tasks.evaluation.built_in.contract import BuiltInTask
from mergegate.tasks.evaluation.built_in.mteb_task import MtebTask
from mergegate.tasks.evaluation.built_in.retrieval import RetrievalTask

BUILT_IN_TASKS: tuple[type[BuiltInTask], ...] = (RetrievalTask, MtebTask)

AnyBuiltInTask = Annotated[RetrievalTask | MtebTask, Field(discriminator="kind")]
"""Settings of a built-in task in a profile: one of ``BUILT_IN_TASKS``."""
