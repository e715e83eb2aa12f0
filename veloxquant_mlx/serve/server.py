"""The server: one model, one method, one port."""

from __future__ import annotations

import logging
import socket
import threading
import time
from functools import partial
from http.server import ThreadingHTTPServer
from pathlib import Path
from types import TracebackType
from typing import Any

import mlx.core as mx
from mlx_lm.server import get_system_fingerprint

from ..cache.base import ModelConfig
from ..core.exceptions import VeloxError
from .engine import Engine, PromptCache, Provider
from .handler import Handler
from .live import LiveCaches
from .metrics import Metrics
from .options import ServeOptions


class _HTTPServer(ThreadingHTTPServer):
    request_queue_size = 128  # connections that may wait to be accepted
    daemon_threads = True

    def __init__(self, host: str, port: int):
        address: Any
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        self.address_family, *_, address = found[0]  # version 4 or 6 of the protocol
        super().__init__(address, Handler, bind_and_activate=False)

    def handle_error(self, request: Any, client_address: Any) -> None:
        logging.info("connection of %s ended early", client_address, exc_info=True)


class Server:
    """mlx_lm's OpenAI-compatible server with caches compressed by ``config``; None leaves the model its own.

    Construction loads the model and opens the port (0: any free one, see ``url``); requests are answered inside the
    ``with`` block or in ``serve_forever``. Raises VeloxError for a port that cannot be had, and whatever loading the
    model or building its caches raises. There is no authentication: whoever reaches the port may use it.

    >>> with Server(ServeOptions("./my-model", port=0), KVCacheConfig(method="kivi")) as server:  # doctest: +SKIP
    ...     print(server.url)
    """

    def __init__(self, options: ServeOptions, config: ModelConfig | None):
        self.options, self.metrics = options, Metrics()
        self._http = self._bind() if mx.distributed.init().rank() == 0 else None
        self._thread: threading.Thread | None = None
        live = LiveCaches()
        most = 2**63 if options.prompt_cache_bytes is None else options.prompt_cache_bytes
        provider = Provider(options, config, live)
        self.engine = Engine(provider, PromptCache(options.prompt_cache_size, most, live, self.metrics))
        try:
            while not provider.loaded.wait(0.5):  # waiting without end would leave Ctrl-C unheard on some systems
                pass
            if provider.failure is not None:
                raise provider.failure
        except BaseException:
            self.close()
            raise
        if self._http is not None:
            fingerprint = get_system_fingerprint()
            handler: Any = partial(Handler, self.engine, self.metrics, system_fingerprint=fingerprint)
            self._http.RequestHandlerClass = handler
            self._http.server_activate()

    def _bind(self) -> _HTTPServer:
        host, port, http = self.options.host, self.options.port, None
        try:
            http = _HTTPServer(host, port)
            http.server_bind()
        except OSError as error:
            if http is not None:
                http.server_close()
            raise VeloxError(
                f"--host {host} --port {port} cannot be opened ({error}). Choose another port, or 0 for any free one."
            ) from None
        return http

    @property
    def url(self) -> str:
        """``http://host:port``; the base URL of an OpenAI client is this with ``/v1``."""
        if self._http is None:
            raise VeloxError("this process computes for another one, which has the port")
        host, port = self._http.server_address[:2]
        return f"http://[{host}]:{port}" if ":" in str(host) else f"http://{host}:{port}"

    def serve_forever(self) -> None:
        """Answer until KeyboardInterrupt, then close."""
        try:
            if self._http is None:
                self.engine.join()
            else:
                method = self.engine.model_provider.method
                logging.info("%s serves %s; method of its caches: %s", self.url, self.options.model, method)
                self._http.serve_forever()
        except KeyboardInterrupt:
            logging.info("stopping")
        finally:
            self.close()

    def close(self) -> None:
        """Answer nothing more, end what is running, free the model. A second call does nothing."""
        if self._http is not None:
            if self._thread is not None:
                self._http.shutdown()
                self._thread.join()
                self._thread = None
            self._http.server_close()
        self.engine.stop_and_join()
        _wait_for_end(self.engine._generation_thread)

    def __enter__(self) -> Server:
        assert self._http is not None
        self._thread = threading.Thread(target=self._http.serve_forever, kwargs={"poll_interval": 0.05})
        self._thread.start()
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


def _wait_for_end(thread: threading.Thread) -> None:
    """Wait until ``thread``, already joined, is gone for the operating system, too.

    What MLX compiled in it is freed after Python has let go of the thread, and needs the interpreter: a process that
    ends at this moment is aborted.
    """
    task, until = Path(f"/proc/self/task/{thread.native_id}"), time.monotonic() + 2.0
    if not task.parent.exists():  # no such list on macOS
        time.sleep(0.1)
    while task.exists() and time.monotonic() < until:
        time.sleep(0.005)
