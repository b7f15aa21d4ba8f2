"""Decide which requests may be sent to a second server.

Only requests on an allowlist are copied, because the effects of other requests are unknown.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_GENERATION_PATHS = ("/chat/completions", "/completions")
# These fields make a server store or look up data, which a copy would do a second time.
_EFFECTS = ("store", "previous_response_id", "conversation", "container", "background")


def is_a_question(method: str, path: str) -> bool:
    """Return whether a request only generates text, judging by its method and path."""
    return method == "POST" and path.rstrip("/").endswith(_GENERATION_PATHS)


def may_be_copied(method: str, path: str, body: Mapping[str, Any] | None) -> bool:
    """Return whether the same request may be sent to a second server.

    Tools of type ``function`` run at the client and therefore only once. All other tools run at the server, so requests
    with such tools are not copied.
    """
    if not is_a_question(method, path) or body is None:
        return False
    if any(body.get(key) not in (None, False) for key in _EFFECTS):
        return False
    tools = body.get("tools") or ()
    return isinstance(tools, (list, tuple)) and all(
        isinstance(tool, Mapping) and tool.get("type", "function") == "function" for tool in tools
    )
