"""The Hugging Face Hub as a target: its settings, the pure next step, the talking, and a release as it stands there."""

from mergegate.tasks.publish.targets.hub.target import HubTarget

__all__ = ["HubTarget"]
