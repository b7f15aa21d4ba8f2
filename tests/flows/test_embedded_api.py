"""Only a run itself can use its embedded API. Other programs that know the port are rejected."""

from __future__ import annotations

import urllib.error
import urllib.request

import pytest
from prefect.client.orchestration import get_client
from prefect.settings import get_current_settings

FOREIGN = "http://somebody.example"


def asked(path: str, method: str, headers: dict[str, str]) -> tuple[int, str | None]:
    """Send a request and return its status and the origin that may read the response."""
    url = f"{get_current_settings().api.url}/{path}"
    request = urllib.request.Request(url, data=b"{}", method=method, headers={**headers, "Origin": FOREIGN})
    try:
        with urllib.request.urlopen(request) as answer:
            return answer.status, answer.headers.get("Access-Control-Allow-Origin")
    except urllib.error.HTTPError as error:
        return error.code, error.headers.get("Access-Control-Allow-Origin")


@pytest.mark.parametrize("path", ["flow_runs/filter", "block_documents/filter", "deployments/filter", "flows/"])
@pytest.mark.parametrize("secret", [{}, {"Authorization": "Basic bWVyZ2VnYXRlOmd1ZXNzZWQ="}], ids=["none", "guessed"])
def test_without_the_secret_nothing_is_read_or_made(prefect_api: None, path: str, secret: dict[str, str]) -> None:
    assert asked(path, "POST", {"Content-Type": "application/json", **secret}) == (401, None)


def test_no_page_of_another_origin_is_let_in(prefect_api: None) -> None:
    status, allowed = asked("flow_runs/filter", "OPTIONS", {"Access-Control-Request-Method": "POST"})
    assert status >= 400
    assert allowed is None


def test_the_run_itself_knows_the_secret(prefect_api: None) -> None:
    with get_client(sync_client=True) as client:
        assert isinstance(client.read_flow_runs(), list)
