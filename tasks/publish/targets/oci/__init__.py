"""Publish to an OCI registry: the protocol's requests, the choice of the next step, and reading published releases."""

from mergegate.tasks.publish.targets.oci.target import OciTarget

__all__ = ["OciTarget"]
