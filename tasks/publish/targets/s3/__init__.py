"""Publish to a bucket of S3 or a compatible store: settings, choice of the next step, requests, reading releases."""

from mergegate.tasks.publish.targets.s3.target import S3Target

__all__ = ["S3Target"]
