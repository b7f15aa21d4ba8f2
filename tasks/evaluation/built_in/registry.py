"""List the kinds of built-in tasks."""

from typing import Annotated, TypeAlias

from pydantic import Field

from mergegate.tasks.evaluation.built_in.retrieval import RetrievalTask
from mergegate.tasks.evaluation.built_in.transcription import TranscriptionTask

AnyBuiltInTask: TypeAlias = Annotated[RetrievalTask | TranscriptionTask, Field(discriminator="kind")]
