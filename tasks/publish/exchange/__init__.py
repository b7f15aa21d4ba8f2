"""Export the results in a release as logs of inspect_ai."""

from mergegate.tasks.publish.exchange.inspect_log import inspect_logs, read_release_results
