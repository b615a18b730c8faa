"""A small HTTP client of a running server, on the standard library: for commands and load generator."""

import http.client
import json
import ssl
import urllib.error
import urllib.request
from collections.abc import Iterator
from typing import Any

from crosspool.errors import CrossPoolError

TIMEOUT_S = 10.0
STREAM_TIMEOUT_S = 600.0


class ServerClient:
    """Talks to one server. Every failure is a CrossPoolError in one line."""

    def __init__(self, base_url: str, api_key: str | None = None) -> None:
        if not base_url.lower().startswith(("http://", "https://")):
            raise CrossPoolError(f"{base_url} is no base URL; one begins with http:// or https://")
        self._base_url = base_url.rstrip("/").removesuffix("/v1")
        self._headers = {"Content-Type": "application/json"}
        if api_key:
            self._headers["Authorization"] = f"Bearer {api_key}"

    def get(self, path: str) -> Any:
        with self._open(path, None, TIMEOUT_S) as response:
            return json.load(response)

    def patch(self, path: str, body: dict[str, Any]) -> Any:
        with self._open(path, json.dumps(body).encode(), TIMEOUT_S, "PATCH") as response:
            return json.load(response)

    def post(self, path: str, body: dict[str, Any]) -> Any:
        """May take as long as a stream: a model may have to be downloaded first."""
        with self._open(path, json.dumps(body).encode(), STREAM_TIMEOUT_S) as response:
            return json.load(response)

    def post_events(self, path: str, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """Data of the server-sent events that answer `body`, until `[DONE]`. An error event is raised."""
        with self._open(path, json.dumps({**body, "stream": True}).encode(), STREAM_TIMEOUT_S) as response:
            for line in response:
                data = line.decode("utf-8").strip().removeprefix("data: ")
                if data == "[DONE]":
                    return
                if not data or data.startswith(":"):
                    continue
                event = json.loads(data)
                if "error" in event:
                    raise CrossPoolError(str(event["error"]["message"]))
                yield event

    def _open(self, path: str, data: bytes | None, timeout_s: float, method: str | None = None) -> Any:
        request = urllib.request.Request(self._base_url + path, data=data, headers=self._headers, method=method)
        try:
            return urllib.request.urlopen(request, timeout=timeout_s)
        except urllib.error.HTTPError as error:
            raise CrossPoolError(_message(error)) from None
        except (urllib.error.URLError, http.client.HTTPException, OSError, ValueError) as error:
            reason = getattr(error, "reason", error)
            if isinstance(reason, ssl.SSLCertVerificationError):
                raise CrossPoolError(
                    f"the certificate of {self._base_url} is not trusted here ({reason.verify_message}); name the file "
                    "of who signed it, or its own, in the variable SSL_CERT_FILE"
                ) from None
            raise CrossPoolError(
                f"no server answers at {self._base_url} ({reason}); run `crosspool serve`, or give --base-url"
            ) from None


def _message(error: urllib.error.HTTPError) -> str:
    try:
        told = json.load(error)["error"]["message"]
        if error.code == 401:
            told = f"{told.partition(';')[0]}; give one with --api-key, or in the variable that --help names"
        return f"{told} (HTTP {error.code})"
    except (ValueError, KeyError, TypeError):
        return f"the server answered HTTP {error.code}"
