"""A registry of OCI artifacts as a target: the few requests of its protocol, the pure next step, the release there."""

from mergegate.tasks.publish.targets.oci.target import OciTarget

__all__ = ["OciTarget"]
