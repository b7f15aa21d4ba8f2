"""Export the results in a release to the formats of other tools: inspect_ai logs, and the schema of Every Eval Ever.

A release contains no dates, and both formats require one. An export is therefore not part of a release. Anyone can
make it from the release, and it states the time of the export.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from datetime import datetime
from typing import Any

from mergegate.tasks.publish.exchange.every_eval_ever import evaluation_records
from mergegate.tasks.publish.exchange.inspect_log import inspect_logs
from mergegate.tasks.publish.exchange.release_results import ExportedRelease, read_release_results

EXPORT_FORMATS = ("inspect", "every-eval-ever")

__all__ = ["EXPORT_FORMATS", "ExportedRelease", "exported_files", "read_release_results"]


def exported_files(release: ExportedRelease, format: str, created: datetime) -> Iterator[tuple[str, bytes]]:
    """Yield relative path and content of each file of an export.

    Args:
        release: Results of the release.
        format: One of ``EXPORT_FORMATS``.
        created: Time of the export, in UTC. The files of both formats state it.
    """
    if format == "inspect":
        for path, log in inspect_logs(release, created):
            yield path, _json(log)
        return
    for record in evaluation_records(release, created):
        yield record.path, _json(record.content)
        if record.rows_path:
            yield record.rows_path, record.rows


def _json(content: Mapping[str, Any]) -> bytes:
    return (json.dumps(content, indent=1, ensure_ascii=False, allow_nan=False) + "\n").encode()
