"""A bucket of S3, or of whatever speaks its language, as a target: its settings, the pure next step, the talking, and a
release as it stands there.
"""

from mergegate.tasks.publish.targets.s3.target import S3Target

__all__ = ["S3Target"]
