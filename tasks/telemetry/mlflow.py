"""Call MLflow's REST API, to log runs and to register models.

mergegate needs about ten requests. MLflow's own client would pin other versions of half of mergegate's dependencies.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import TracebackType
from typing import Any, Self
from urllib.parse import urlencode

from mergegate.tasks.http import TRANSIENT_STATUSES, JsonClient, Unreachable

_MAX_PARAM, _MAX_TAG, _MAX_KEY = 6000, 5000, 250  # MLflow's limits, in characters


class MlflowError(Exception):
    """The server did not answer (``status`` is None), or rejected a request. The message gives the reason."""

    def __init__(self, reason: str, status: int | None = None) -> None:
        super().__init__(reason)
        self.status = status

    @property
    def is_transient(self) -> bool:
        """Whether the request may succeed if it is repeated."""
        return self.status is None or self.status in TRANSIENT_STATUSES


class MlflowClient:
    """Client of one MLflow server. As a context manager, it closes its connection.

    ``timeout`` is the longest time without a byte, in seconds. ``token`` is a bearer token.
    """

    def __init__(self, url: str, timeout: float, token: str = "") -> None:
        self._http = JsonClient(url, timeout, token, connections=1)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self._http.close()

    def get(self, path: str, **parameters: str) -> dict[str, Any]:
        """Send GET and return the answer, or an empty dict if the requested object does not exist.

        Raises:
            MlflowError: The server did not answer, or rejected the request.
        """
        return self._request(f"{path}?{urlencode(parameters)}", None)

    def post(self, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
        """Send POST and return the answer, or an empty dict if the object exists already.

        Raises:
            MlflowError: The server did not answer, or rejected the request.
        """
        return self._request(path, body)

    def experiment_id(self, name: str) -> str:
        """Return the ID of an experiment, or an empty string if it does not exist."""
        return str(member(self.get("experiments/get-by-name", experiment_name=name), "experiment", "experiment_id"))

    def _request(self, path: str, body: Mapping[str, Any] | None) -> dict[str, Any]:
        try:
            answer = self._http.request(f"/api/2.0/mlflow/{path}", body)
        except Unreachable as error:
            raise MlflowError(str(error)) from None
        content = answer.body if isinstance(answer.body, Mapping) else {}
        if answer.ok:
            return dict(content)
        is_missing_alias = path.startswith("registered-models/alias?") and answer.status in (400, 404)
        if is_missing_alias or content.get("error_code") in ("RESOURCE_DOES_NOT_EXIST", "RESOURCE_ALREADY_EXISTS"):
            return {}
        raise MlflowError(answer.complaint, answer.status)


def member(value: object, *path: str) -> Any:
    """Return the value at the nested keys ``path`` of an answer, or an empty string if it is missing."""
    for key in path:
        value = value.get(key, "") if isinstance(value, Mapping) else ""
    return value


def metric_entries(numbers: Mapping[str, float], timestamp_ms: int) -> list[dict[str, object]]:
    """Return metrics in MLflow's format, with invalid characters in their names replaced."""
    return [
        {"key": mlflow_key(name), "value": number, "timestamp": timestamp_ms, "step": 0}
        for name, number in numbers.items()
    ]


def param_entries(params: Mapping[str, str]) -> list[dict[str, str]]:
    """Return the non-empty parameters of a run in MLflow's format, cut to its length limits."""
    return [{"key": mlflow_key(key), "value": value[:_MAX_PARAM]} for key, value in params.items() if value]


def tag_entries(tags: Mapping[str, str]) -> list[dict[str, str]]:
    """Return the non-empty tags of a run or a model version in MLflow's format, cut to its length limit."""
    return [{"key": key, "value": value[:_MAX_TAG]} for key, value in tags.items() if value]


def mlflow_key(name: str) -> str:
    """Return ``name`` cut to MLflow's length limit, with each character that MLflow rejects replaced by ``_``."""
    accepted = (character if character.isalnum() or character in "_-. /" else "_" for character in name)
    return "".join(accepted)[:_MAX_KEY]
