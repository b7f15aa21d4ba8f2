"""Export the results in a release to the formats of other tools: inspect_ai logs, and the schema of Every Eval Ever."""

from mergegate.tasks.publish.exchange.export import ExportFormat, exported_files
from mergegate.tasks.publish.exchange.release_results import ExportedRelease, read_release_results

__all__ = ["ExportFormat", "ExportedRelease", "exported_files", "read_release_results"]
