"""List the kinds of built-in tasks."""

from mergegate.tasks.evaluation.built_in.retrieval import RetrievalTask

# With several kinds, this is a union whose discriminator is ``kind``.
AnyBuiltInTask = RetrievalTask
