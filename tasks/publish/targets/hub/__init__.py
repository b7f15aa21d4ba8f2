"""Publish to the Hugging Face Hub: settings, the choice of the next step, API calls, and reading published releases."""

from mergegate.tasks.publish.targets.hub.target import HubTarget

__all__ = ["HubTarget"]
