"""One HTTP request: mlx_lm's handler between a check of what comes in and an answer to whatever goes wrong."""

from __future__ import annotations

import io
import json
import logging
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from mlx_lm.server import APIHandler, ModelDescription

from .checks import RequestError, checked
from .engine import Engine
from .metrics import Metrics, render

MIB = 2**20
MOST_BYTES = 64 * MIB  # of a request body: images included


class _Failed(BaseException):
    """Carries an error past mlx_lm's handler, which answers 404 to every Exception of a generation."""

    def __init__(self, error: Exception):
        super().__init__()
        self.error = error


class Handler(APIHandler):
    """Answers 4xx to what cannot be served, 5xx to what failed here, and stops computing when the client is gone."""

    timeout = 60  # seconds without a byte, while reading a request or writing an answer

    def __init__(self, engine: Engine, metrics: Metrics, *args: Any, **kwargs: Any):
        self.engine, self.metrics = engine, metrics
        self.context: Any = None  # of the generation that belongs to this request
        self._begun = False  # the head of an answer is on its way
        self._unread = False  # the client may still be sending
        view: Any = _Request(self, engine)
        super().__init__(view, *args, **kwargs)

    # ------------------------------------------------------------------------------------------------------- methods

    def do_POST(self) -> None:
        with self._answering():
            raw = self._body()
            if self.path.endswith("/completions"):
                provider, chat = self.engine.model_provider, self.path.endswith("/chat/completions")
                images = getattr(provider, "processor", None) is not None
                raw = checked(raw, chat, model_names(self.engine.cli_args.model), images)
            self.rfile = io.BytesIO(raw)
            self.headers.replace_header("Content-Length", str(len(raw)))
            super().do_POST()

    def do_GET(self) -> None:
        if self.path != "/metrics":
            with self._answering():
                super().do_GET()
            return
        text = render(self.metrics, self.engine).encode()  # not counted: looking changes nothing
        self._send(200, text, "text/plain; version=0.0.4; charset=utf-8")

    def _not_allowed(self) -> None:
        with self._answering():
            self._unread = True
            raise RequestError(f"{self.command} is not served; use GET or POST", 405)

    do_PUT = do_DELETE = do_PATCH = do_HEAD = _not_allowed

    def validate_model_parameters(self) -> None:
        try:
            super().validate_model_parameters()
        except ValueError as error:
            raise RequestError(str(error)) from None

    def handle_models_request(self) -> None:
        """The one model that is served, in place of every model on the disk."""
        name = served_name(self.engine.cli_args.model)
        model = {"id": name, "object": "model", "created": self.created, "owned_by": "veloxquant"}
        wanted = unquote(self.path.partition("/v1/models/")[2])
        if wanted and wanted not in model_names(self.engine.cli_args.model):
            raise RequestError(f"model {wanted!r} is not served here; served: {name}", 404)
        answer = model if wanted else {"object": "list", "data": [model]}
        self._send(200, json.dumps(answer).encode())

    # --------------------------------------------------------------------------------------------------------- parts

    def _body(self) -> bytes:
        length = self.headers.get("Content-Length")
        self._unread = True
        if length is None:
            raise RequestError("the header Content-Length is missing", 411)
        if not (length.isascii() and length.isdigit() and len(length) < 16):
            raise RequestError("the header Content-Length must be a number of bytes")
        if int(length) > MOST_BYTES:
            raise RequestError(f"the request body is larger than {MOST_BYTES // MIB} MiB", 413)
        try:
            body = self.rfile.read(int(length))
        except TimeoutError:
            raise RequestError(f"{length} bytes were announced but did not come", 408) from None
        self._unread = False
        if len(body) < int(length):
            raise RequestError(f"{length} bytes were announced; {len(body)} came")
        return body

    @contextmanager
    def _answering(self) -> Iterator[None]:
        """Count the request, and answer whatever goes wrong in it."""
        self.metrics.begin()
        self.status, outcome = 200, "failed"
        try:
            try:
                yield
            except _Failed as failed:
                raise failed.error from None
            outcome = "ok" if self.status < 400 else "refused"
        except RequestError as error:
            outcome = "refused"
            self._refuse(error.status, str(error))
        except (ConnectionError, TimeoutError) as error:
            outcome = "disconnected"
            self.close_connection = True
            logging.info("the client is gone: %s", error)
        except Exception as error:
            logging.error("%s failed: %s", self.path, error, exc_info=not self._begun)
            self._refuse(500, str(error))
        finally:
            if self.context is not None:
                self.context.stop()
            self.metrics.end(outcome)

    def _refuse(self, status: int, message: str) -> None:
        kind = "invalid_request_error" if status < 500 else "server_error"
        error = json.dumps({"error": {"message": message, "type": kind, "param": None, "code": None}}).encode()
        try:
            if self._begun:
                self.wfile.write(b"data: " + error + b"\n\n")
            else:
                self._headers_buffer: list[bytes] = []  # of the answer that was under way
                self._send(status, error)
            if self._unread:
                self._discard()
        except (ConnectionError, TimeoutError):
            logging.info("the client did not wait for the error: %s", message)

    def _send(self, status: int, body: bytes, kind: str = "application/json") -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self._set_cors_headers()
        self.end_headers()
        self.wfile.write(body)
        self.wfile.flush()

    def _discard(self) -> None:
        """Take what the client is still sending: closing on it would make its system drop our answer, too."""
        self.connection.shutdown(socket.SHUT_WR)
        self.connection.settimeout(1.0)
        for _ in range(4 * MOST_BYTES // MIB):
            if not self.connection.recv(MIB):
                return

    def check_client(self) -> None:
        """Raise ConnectionAbortedError if nobody is there to read the answer."""
        self.connection.settimeout(0)
        try:
            left = not self.connection.recv(1, socket.MSG_PEEK)
        except BlockingIOError:
            left = False
        finally:
            self.connection.settimeout(self.timeout)
        if left:
            raise ConnectionAbortedError("connection closed before the answer was complete")

    def send_response(self, code: int, message: str | None = None) -> None:
        self.status = int(code)
        super().send_response(code, message)

    def end_headers(self) -> None:
        self._begun = True
        super().end_headers()

    def log_message(self, format: str, *args: Any) -> None:
        logging.info("%s %r", self.client_address[0], format % args)


class _Request:
    """The engine as the handler of one request sees it."""

    def __init__(self, handler: Handler, engine: Engine):
        self._handler, self._engine = handler, engine

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def generate(self, request: Any, args: Any, progress_callback: Callable[[int, int], None]) -> tuple[Any, Any]:
        """mlx_lm's, with the served model whatever its name in the request, and an eye on the client."""

        def progress(done: int, total: int) -> None:
            self._handler.check_client()
            progress_callback(done, total)

        adapter: Any = None
        args.model = ModelDescription("default_model", "default_model", adapter)
        try:
            context, responses = self._engine.generate(request, args, progress)
        except Exception as error:
            raise _Failed(error) from error
        self._handler.context = context
        cached = max(0, context.prompt_cache_count)
        self._handler.metrics.count(prompt=len(context.prompt), prompt_cached=cached)
        return context, self._watched(responses)

    def _watched(self, responses: Iterator[Any]) -> Iterator[Any]:
        for response in responses:
            self._handler.check_client()
            self._handler.metrics.count(generated=1)
            yield response


def served_name(model: str) -> str:
    """The model's name for clients: a repository's name, or the full path of a folder."""
    path = Path(model)
    return str(path.resolve()) if path.exists() else model


def model_names(model: str) -> set[str]:
    """The names under which clients may ask for ``model``."""
    return {"default_model", model, served_name(model)}
