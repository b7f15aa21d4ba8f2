"""Which requests may be asked twice. A list of what may, because what a server does with the rest nobody can know."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_ASKED = ("/chat/completions", "/completions")
# Whatever a server keeps or looks up for one of these would be kept or looked up twice.
_EFFECTS = ("store", "previous_response_id", "conversation", "container", "background")


def is_a_question(method: str, path: str) -> bool:
    """Whether a request asks a model for text, and does nothing else by its address."""
    return method == "POST" and path.rstrip("/").endswith(_ASKED)


def may_be_copied(method: str, path: str, body: Mapping[str, Any] | None) -> bool:
    """Whether a second server may be asked the same.

    Tools of the kind ``function`` run at the client, once, whatever two servers say of them; tools of any other kind
    run at the server.
    """
    if not is_a_question(method, path) or body is None:
        return False
    if any(body.get(key) not in (None, False) for key in _EFFECTS):
        return False
    tools = body.get("tools") or ()
    return isinstance(tools, (list, tuple)) and all(
        isinstance(tool, Mapping) and tool.get("type", "function") == "function" for tool in tools
    )
