"""A Hugging Face hub of one machine: serves a directory as a repository, over the few routes a download needs."""

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@contextmanager
def fake_hub(repositories: dict[str, Path], *, gated: frozenset[str] = frozenset()) -> Iterator[str]:
    """Serve each repository's directory; yields the endpoint's URL, as HF_ENDPOINT takes it."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_HEAD(self) -> None:
            self._answer(with_body=False)

        def do_GET(self) -> None:
            self._answer(with_body=True)

        def log_message(self, format: str, *args: object) -> None:
            return

        def _answer(self, *, with_body: bool) -> None:
            path = self.path.split("?")[0].strip("/")
            if path.startswith("api/models/"):
                self._model("/".join(path.split("/")[2:4]), tree="/tree/" in path)
                return
            repository, _, rest = path.partition("/resolve/")
            directory = repositories.get(repository)
            file = directory / rest.partition("/")[2] if directory else None
            if repository in gated:
                self._error("GatedRepo", 403)
                return
            if file is None or not file.is_file():
                self._error("RepoNotFound" if directory is None else "EntryNotFound", 404)
                return
            body = file.read_bytes()
            headers = {"ETag": f'"{hashlib.sha256(body).hexdigest()}"', "X-Repo-Commit": COMMIT}
            self._send(200, body if with_body else b"", {**headers, "Content-Length": str(len(body))})

        def _model(self, repository: str, *, tree: bool) -> None:
            directory = repositories.get(repository)
            if repository in gated:
                self._error("GatedRepo", 403)
            elif directory is None:
                self._error("RepoNotFound", 404)
            else:
                files = [file for file in sorted(directory.iterdir()) if file.is_file()]
                siblings = [{"rfilename": file.name} for file in files]
                info = {"id": repository, "modelId": repository, "sha": COMMIT, "siblings": siblings}
                entries = [{"type": "file", "path": f.name, "size": f.stat().st_size, "oid": f.name} for f in files]
                self._send(200, json.dumps(entries if tree else info).encode(), {"Content-Type": "application/json"})

        def _error(self, code: str, status: int) -> None:
            self._send(status, b"", {"X-Error-Code": code, "X-Error-Message": code})

        def _send(self, status: int, body: bytes, headers: dict[str, str]) -> None:
            self.send_response(status)
            for name, value in ({"Content-Length": str(len(body))} | headers).items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(body)

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
