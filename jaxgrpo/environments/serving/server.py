"""JSON over HTTP: reads a query, has it answered, and writes the answer or the error.

A query that cannot be used gets an error as OpenAI's clients read it, and the server goes on. What
a path means is not known here: see `dialect`.
"""

from __future__ import annotations

import http.server
import json
import socket
import socketserver
import sys
import threading
import traceback
from collections.abc import Callable
from typing import Any, NamedTuple

from jaxgrpo.core.errors import InputError

LARGEST = 32 * 2**20  # bytes of a query
IDLE = 60.0  # seconds that a connection may say nothing
RETRIES = "x-stainless-retry-count"
"""The header in which OpenAI's clients write how often they have sent a query before."""

KINDS = {
    400: "BadRequestError",
    401: "AuthenticationError",
    404: "NotFoundError",
    405: "MethodNotAllowedError",
    409: "ConflictError",
    411: "LengthRequiredError",
    413: "RequestTooLargeError",
    500: "InternalServerError",
    503: "ServiceUnavailableError",
}
"""Status -> the type that the error names."""


class Refusal(Exception):
    """A query that is not answered.

    Args:
      field: of the document, if one is to blame.
    """

    def __init__(self, status: int, message: str, field: str | None = None):
        super().__init__(message)
        self.status, self.field = status, field


class Query(NamedTuple):
    """What a client sends."""

    method: str  # "GET" or "POST"
    path: str  # without what follows "?"
    bearer: str  # of the header Authorization; empty: none
    document: dict[str, Any]  # empty with GET
    is_retry: bool = False  # the client says that it sends it again


Document = dict[str, Any] | list[dict[str, Any]]
"""JSON; several are the events of a stream."""

Answer = Callable[[Query], Document]
"""Raises: Refusal, or InputError for status 400."""

Admit = Callable[[str, str, str], None]
"""(method, path, bearer); called before a document is read. Raises: Refusal."""


class Server:
    """Listens from now on, and from `start` on answers, each connection in a thread of its own.

    Args:
      host: an address of this machine; "127.0.0.1": no other machine reaches it.
      port: 0 takes a free one.

    Raises: InputError where the address cannot be taken.
    """

    def __init__(self, host: str, port: int, answer: Answer, admit: Admit):
        kind = type("Handler", (_Handler,), {"answer": staticmethod(answer)})
        kind.admit = staticmethod(admit)
        try:
            self._server = _Listener(host, port, kind)
        except (OSError, OverflowError) as error:
            reason = getattr(error, "strerror", None) or str(error)
            raise InputError(
                f"{host}:{port} cannot be listened at ({reason}): name another --host or --port; "
                "--port 0 takes a free one"
            ) from error
        self.host: str = host
        self.port: int = self._server.server_address[1]
        self._thread = threading.Thread(
            target=self._server.serve_forever, args=(0.1,), name="jaxgrpo-http", daemon=True
        )

    def start(self) -> None:
        """Begins to answer. Clients that connected before have waited."""
        self._thread.start()

    @property
    def url(self) -> str:
        """Without a path."""
        return f"http://{f'[{self.host}]' if ':' in self.host else self.host}:{self.port}"

    def close(self) -> None:
        """Takes no further connections. Those that are open end by themselves."""
        if self._thread.is_alive():
            self._server.shutdown()
            self._thread.join()
        self._server.server_close()


class _Listener(socketserver.ThreadingMixIn, socketserver.TCPServer):
    allow_reuse_address = True
    daemon_threads = True
    block_on_close = False
    request_queue_size = 128

    def __init__(self, host: str, port: int, handler: type[_Handler]):
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        super().__init__((host, port), handler)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A connection that breaks is the client's affair."""
        if not isinstance(sys.exc_info()[1], OSError):
            traceback.print_exc()


class _Handler(http.server.BaseHTTPRequestHandler):
    answer: Answer
    admit: Admit
    protocol_version = "HTTP/1.1"
    server_version = "jaxgrpo"
    sys_version = ""
    timeout = IDLE
    disable_nagle_algorithm = True

    def do_GET(self) -> None:
        self._respond()

    def do_POST(self) -> None:
        self._respond()

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing is printed of each query."""

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """What the base class refuses: lines and headers that are no HTTP, other methods."""
        self.close_connection = True
        self.request_version = self.protocol_version  # or there is no status, as in HTTP/0.9
        status = 405 if code == 501 else code
        self._write(status, _problem(status, message or "this is no HTTP", None))

    def _respond(self) -> None:
        try:
            status, document = 200, self.answer(self._query())
        except Refusal as refusal:
            status = refusal.status
            document = _problem(status, str(refusal), refusal.field)
        except InputError as error:
            status, document = 400, _problem(400, str(error), None)
        except OSError:
            raise  # the connection
        except Exception as error:
            traceback.print_exc()
            message = f"{type(error).__name__}; the server's output says more"
            status, document = 500, _problem(500, message, None)
        self._write(status, document)

    def _query(self) -> Query:
        path, self._read = self.path.partition("?")[0], 0
        scheme, _, bearer = (self.headers.get("Authorization") or "").partition(" ")
        bearer = bearer.strip() if scheme.lower() == "bearer" else ""
        # Until the document is read, what follows on the connection is no query.
        self.close_connection, closing = True, self.close_connection
        try:
            self.admit(self.command, path, bearer)
            document = {} if self.command == "GET" else self._document()
        except Refusal:
            self._discard()
            raise
        # The document of a GET is no query: a proxy that shares the connection among its clients
        # would hand the answer to one of them.
        if has_rest := self.command == "GET" and self._has_document():
            self._discard()
        self.close_connection = closing or has_rest
        retries = (self.headers.get(RETRIES) or "").strip("0")
        return Query(self.command, path, bearer, document, retries.isdecimal())

    def _has_document(self) -> bool:
        """Whether the headers announce a document."""
        names = "Content-Length", "Transfer-Encoding"
        return any(name in self.headers for name in names) and self._length() != 0

    def _length(self) -> int | None:
        """Bytes of the document; None: the headers do not say it, or say several numbers."""
        texts = {text.strip() for text in self.headers.get_all("Content-Length", [])}
        text = texts.pop() if len(texts) == 1 else ""
        is_number = text.isascii() and text.isdigit() and len(text) < 16
        return int(text) if is_number and "Transfer-Encoding" not in self.headers else None

    def _discard(self) -> None:
        """Reads what a refused client sends: it looks for an answer only then."""
        rest = min(self._length() or 0, 2 * LARGEST) - self._read
        while rest > 0 and (part := self.rfile.read(min(rest, 2**16))):
            rest -= len(part)

    def _document(self) -> dict[str, Any]:
        length = self._length()
        if length is None:
            problem = "Content-Length is missing, or no single number of bytes"
            raise Refusal(411, f"{problem}: send the document in one piece with it")
        if length > LARGEST:
            raise Refusal(413, f"{length} bytes: at most {LARGEST} are read; send less at once")
        content = self.rfile.read(length)
        self._read = len(content)
        try:
            document = json.loads(content)
            json.dumps(document, ensure_ascii=False).encode()  # JSON writes halves of characters
        except UnicodeEncodeError:
            problem = "a text in the document has half of a surrogate pair: write the character"
            raise Refusal(400, problem) from None
        except (ValueError, RecursionError) as error:
            raise Refusal(400, f"the document is no JSON: {error}") from None
        if not isinstance(document, dict):
            kind = type(document).__name__
            raise Refusal(400, f"the document is a {kind}: send an object with named fields")
        return document

    def _write(self, status: int, document: Document) -> None:
        content, kind = json.dumps(document), "application/json"
        if isinstance(document, list):
            events = [*map(json.dumps, document), "[DONE]"]
            content, kind = "".join(f"data: {event}\n\n" for event in events), "text/event-stream"
        try:
            self.send_response(status)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(content)))
            if status == 401:
                self.send_header("WWW-Authenticate", "Bearer")
            if self.close_connection:
                self.send_header("Connection", "close")
            self.end_headers()
            self.wfile.write(content.encode())  # JSON in ASCII, a byte for each character
        except (ConnectionError, TimeoutError):
            self.close_connection = True  # behind half of an answer no other one can stand


def _problem(status: int, message: str, field: str | None) -> dict[str, Any]:
    kind = KINDS.get(status, KINDS[400])
    return {"error": {"message": message, "type": kind, "param": field, "code": status}}
