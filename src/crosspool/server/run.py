"""Serving until a signal: listen, load, drain, end.

The first SIGTERM, Ctrl-C or SIGHUP turns readiness to 503 and refuses new requests; running ones may finish within
shutdown_timeout; what is left ends with an error event and `[DONE]`, and the process exits with 0. A second signal
skips the wait.
"""

import asyncio
import logging
import signal
import socket
import ssl
import threading
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from contextlib import contextmanager
from ipaddress import ip_address
from types import FrameType
from typing import Any, TypeVar

import uvicorn
from fastapi import FastAPI
from uvicorn.loops.auto import auto_loop_factory

from crosspool.config import ServerConfig
from crosspool.engine.stats import EngineStats
from crosspool.errors import CrossPoolError
from crosspool.server.engine_client import EngineClient
from crosspool.server.garbage import rare_collections, settle_memory
from crosspool.server.loop_errors import LoopErrors

logger = logging.getLogger(__name__)

T = TypeVar("T")

BACKLOG = 2048
KEEP_ALIVE_S = 75
"""How long a connection may be idle: longer than clients and proxies keep theirs (a minute, most), so that none of them
sends a request on one that is just being closed."""
PROBES = {"TCP_KEEPIDLE": 60, "TCP_KEEPINTVL": 15, "TCP_KEEPCNT": 4}
"""When a silent connection is probed, how often, and how many probes may stay unanswered: seconds, seconds, number."""
DRAIN_POLL_S = 0.05
LAST_WORDS_S = 5
"""How long connections may take to send what is left once the engine has ended every request; then they are cut."""
CUT_S = 5
"""How long requests may take to end once their connections are cut; then uvicorn cancels them."""


class SignalledServer(uvicorn.Server):
    """uvicorn, but a signal asks for an orderly end instead of cutting streams and the exit code."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.stop_asked = asyncio.Event()
        self.hurry = asyncio.Event()
        self._loop = asyncio.get_running_loop()

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Those that uvicorn knows, and the terminal's end, unless whoever started this process had it ignored."""
        with super().capture_signals():
            hears = threading.current_thread() is threading.main_thread()
            if not hears or signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
                yield
                return
            before = signal.signal(signal.SIGHUP, self.handle_exit)
            try:
                yield
            finally:
                signal.signal(signal.SIGHUP, before)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self._loop.call_soon_threadsafe(self.ask_to_stop)

    def ask_to_stop(self) -> None:
        """Begin to drain; when asked again, stop waiting."""
        if self.stop_asked.is_set():
            self.hurry.set()
        self.stop_asked.set()

    async def end(self, serving: asyncio.Task[None]) -> None:
        """Take no more connections, and end those there are: `serving` has ended then.

        NOTE: uvicorn would cancel the requests of clients that do not read, each with a traceback in the log.
        """
        self.should_exit = True
        await asyncio.wait({serving}, timeout=LAST_WORDS_S)
        unread = [connection.transport for connection in self.server_state.connections]
        if unread:
            logger.warning("%d connection(s) that did not read their answers are cut", len(unread))
        for transport in unread:
            transport.abort()
        await serving


def listen(config: ServerConfig) -> socket.socket:
    """A listening socket. Raises CrossPoolError, naming address and remedy, where it cannot be had."""
    listener = _bound(config) if config.listen_fd is None else _handed_over(config.listen_fd)
    _probe_silent(listener)
    host = listener.getsockname()[0]
    if not config.api_keys and not ip_address(host).is_loopback:
        where = config.host if config.listen_fd is None else host
        logger.warning("no api_key is set, and other machines may reach %s: whoever does may use it", where)
    return listener


def _probe_silent(listener: socket.socket) -> None:
    """Have the system ask whether clients still are there: a machine that lost its network tells nobody that it left,
    and what it asked for, half sent, would be waited for without an end. Connections inherit it."""
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in PROBES.items():
        if hasattr(socket, name):  # as far as the system lets this be set
            listener.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def _bound(config: ServerConfig) -> socket.socket:
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            config.host, config.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind, protocol)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)
            listener.listen(BACKLOG)
        except OSError:
            listener.close()
            raise
    except OSError as error:
        reason = error.strerror or str(error)
        raise CrossPoolError(
            f"cannot listen on {config.host}:{config.port}: {reason}; choose another --host or --port"
        ) from None
    return listener


def _handed_over(descriptor: int) -> socket.socket:
    """The socket of whoever started this process, kept from the processes that this one starts."""
    try:
        listener = socket.socket(fileno=descriptor)
    except OSError as error:
        raise CrossPoolError(f"listen_fd is {descriptor}: {error.strerror}; hand over a listening TCP socket") from None
    is_tcp = listener.family in (socket.AF_INET, socket.AF_INET6) and listener.type == socket.SOCK_STREAM
    if not is_tcp or not listener.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
        listener.detach()
        raise CrossPoolError(f"listen_fd is {descriptor}, no TCP socket that listens; hand over one")
    listener.set_inheritable(False)
    return listener


def check_tls(config: ServerConfig) -> None:
    """Raises CrossPoolError, naming the files, if there is to be HTTPS and they do not make a pair."""
    if config.ssl_certfile is None or config.ssl_keyfile is None:
        return
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(config.ssl_certfile, config.ssl_keyfile)
    except (OSError, ssl.SSLError) as error:
        raise CrossPoolError(
            f"cannot serve HTTPS with certificate {config.ssl_certfile} and key {config.ssl_keyfile}: {error}; "
            "give a readable pair in PEM"
        ) from None


def run_loop(main: Coroutine[Any, Any, T]) -> T:
    """`asyncio.run` on uvloop where it is installed (extra `speed`): each turn of the event loop takes less there."""
    with asyncio.Runner(loop_factory=auto_loop_factory()) as runner:
        return runner.run(main)


async def serve(
    app: FastAPI,
    engine: EngineClient,
    load: Callable[[], Awaitable[None]],
    listener: socket.socket,
    config: ServerConfig,
) -> None:
    """Serve `app` on `listener` while `load` brings the models up, until a signal or until loading fails.

    Raises what `load` raises. The engine is closed however this ends.
    """
    asyncio.get_running_loop().set_exception_handler(LoopErrors())
    server = SignalledServer(_uvicorn_config(app, config))
    serving = asyncio.create_task(server.serve(sockets=[listener]), name="http server")
    loading = asyncio.ensure_future(load())
    stopping = asyncio.create_task(server.stop_asked.wait(), name="wait for a signal")
    try:
        await asyncio.wait({serving, loading, stopping}, return_when=asyncio.FIRST_COMPLETED)
        if loading.done():
            loading.result()
            settle_memory()
            with rare_collections():
                await asyncio.wait({serving, stopping}, return_when=asyncio.FIRST_COMPLETED)
        app.state.draining = True
        if server.stop_asked.is_set():
            logger.info("stopping: running requests have up to %.0f s", config.shutdown_timeout_s)
            await _drain(engine, server.hurry, config.shutdown_timeout_s)
    finally:
        app.state.draining = True
        loading.cancel()
        stopping.cancel()
        await asyncio.gather(loading, stopping, return_exceptions=True)
        await engine.close()
        await server.end(serving)


async def _drain(engine: EngineClient, hurry: asyncio.Event, timeout_s: float) -> None:
    """Wait until nothing runs, `hurry` is set, or the time is over."""
    loop = asyncio.get_running_loop()
    deadline = loop.time() + timeout_s
    while loop.time() < deadline and not hurry.is_set() and num_unfinished(engine.stats()):
        await asyncio.sleep(DRAIN_POLL_S)
    if left := num_unfinished(engine.stats()):
        logger.warning("%d unfinished sequence(s) end with an error", left)


def num_unfinished(stats: EngineStats) -> int:
    """Sequences that wait, run or are parked."""
    return sum(
        model.num_queued + model.num_prefilling + model.num_decoding + model.num_parked for model in stats.models
    )


def _uvicorn_config(app: FastAPI, config: ServerConfig) -> uvicorn.Config:
    options: dict[str, Any] = {"lifespan": "off", "access_log": False, "log_config": None}
    return uvicorn.Config(
        app,
        root_path=config.root_path.rstrip("/"),
        log_level="warning",
        timeout_keep_alive=KEEP_ALIVE_S,
        timeout_graceful_shutdown=LAST_WORDS_S + CUT_S,
        server_header=False,
        ssl_certfile=config.ssl_certfile,
        ssl_keyfile=config.ssl_keyfile,
        **options,
    )
