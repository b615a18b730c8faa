"""HTTPS from files, and limits of what is let in. The certificate is self-signed, for localhost and tests only."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable
from pathlib import Path

import httpx2
import pytest

from crosspool.config import ServerConfig
from crosspool.errors import CrossPoolError
from crosspool.server.run import check_tls, listen, serve
from crosspool.server_client import ServerClient
from tests.support.fake_engine import FakeEngine
from tests.support.server_fixtures import fake_app

TLS = Path(__file__).parent.parent / "support" / "tls"


class ClosableFake(FakeEngine):
    async def close(self, *, drain_s: float = 0.0) -> None:
        """Nothing to close."""


async def test_with_a_certificate_and_a_key_the_server_is_https(tmp_path: Path) -> None:
    config = ServerConfig(port=0, ssl_certfile=str(TLS / "cert.pem"), ssl_keyfile=str(TLS / "key.pem"))
    check_tls(config)
    engine, release = ClosableFake(), asyncio.Event()

    async def load() -> None:
        await release.wait()
        raise CrossPoolError("enough seen")

    with listen(config) as bound:
        serving = asyncio.create_task(serve(fake_app(engine, tmp_path), engine, load, bound, config))
        address = f"127.0.0.1:{bound.getsockname()[1]}"
        trusted = ssl.create_default_context(cafile=str(TLS / "cert.pem"))
        with pytest.raises(CrossPoolError, match=r"is not trusted here .*self.signed.* SSL_CERT_FILE"):
            await asyncio.to_thread(ServerClient(f"https://{address}").get, "/health")
        async with httpx2.AsyncClient(verify=trusted) as http:
            assert (await http.get(f"https://{address}/health")).status_code == 200
            with pytest.raises(httpx2.HTTPError):
                await http.get(f"http://{address}/health")
        release.set()
        with pytest.raises(CrossPoolError, match="enough seen"):
            await serving


def test_files_that_make_no_pair_are_told_in_one_line(tmp_path: Path) -> None:
    with pytest.raises(CrossPoolError, match=r"cannot serve HTTPS with certificate .*nope.*give a readable pair"):
        check_tls(ServerConfig(ssl_certfile=str(tmp_path / "nope"), ssl_keyfile=str(TLS / "key.pem")))
    (tmp_path / "text").write_text("no certificate")
    with pytest.raises(CrossPoolError, match="cannot serve HTTPS"):
        check_tls(ServerConfig(ssl_certfile=str(tmp_path / "text"), ssl_keyfile=str(TLS / "key.pem")))
    with pytest.raises(ValueError, match="one of ssl_certfile and ssl_keyfile is missing"):
        ServerConfig(ssl_certfile="cert.pem")


def test_a_server_that_strangers_may_use_says_so(caplog: pytest.LogCaptureFixture) -> None:
    for config in (ServerConfig(port=0), ServerConfig(host="0.0.0.0", port=0, api_keys=("k",))):
        listen(config).close()
    assert not caplog.records
    listen(ServerConfig(host="0.0.0.0", port=0)).close()
    assert "no api_key is set, and other machines may reach 0.0.0.0" in caplog.text


async def test_large_headers_are_refused(http_with: Callable[..., httpx2.AsyncClient]) -> None:
    async with http_with(max_header_bytes=2048) as http:
        assert (await http.get("/version", headers={"X-Mine": "x" * 1500})).status_code == 200
        refused = await http.get("/version", headers={"X-Mine": "x" * 2048})
        assert (refused.status_code, refused.json()["error"]["code"]) == (431, "request_headers_too_large")
        assert refused.headers["x-request-id"]
        assert (await http.get("/version", headers={"X-" + "n" * 2048: "x"})).status_code == 431  # names count too
