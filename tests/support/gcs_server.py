"""A small Google Cloud Storage: the part of its JSON API that gcsfs and tensorstore use.

Objects are whole or absent, have no folders, and cannot be appended to or renamed, as there. The
clients are the real ones; `environment` points them here.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import itertools
import json
import re
import threading
import urllib.parse
from collections.abc import Iterator, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, NamedTuple

DATE = "2026-01-01T00:00:00.000Z"
BOUNDARY = "batch_of_answers"


class Stored(NamedTuple):
    """One object."""

    data: bytes
    generation: int


class Refused(Exception):
    """An answer other than success: its status."""

    def __init__(self, status: int):
        super().__init__(status)
        self.status = status


class Bucket(ThreadingHTTPServer):
    """One bucket and its server, on a port of its own.

    `objects` may be read and damaged by a test. While `refuses` is a status, each request that
    writes is answered with it, if its address holds `refused`; `requests` lists all of them.
    """

    daemon_threads = True
    request_queue_size = 128  # tensorstore opens many connections at once

    def __init__(self, name: str = "bucket"):
        super().__init__(("127.0.0.1", 0), _Handler)
        self.name = name
        self.objects: dict[str, Stored] = {}
        self.refuses: int | None = None
        self.refused = ""
        self.requests: list[str] = []
        self.generations = itertools.count(1)
        self.lock = threading.Lock()
        self.uploads: dict[str, tuple[str, bytearray, dict[str, str]]] = {}

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    @property
    def environment(self) -> dict[str, str]:
        """Variables with which gcsfs and tensorstore take this server for Google's."""
        return {
            "STORAGE_EMULATOR_HOST": self.address,
            "TENSORSTORE_GCS_HTTP_URL": self.address,
            "GOOGLE_AUTH_TOKEN_FOR_TESTING": "any",
            "FSSPEC_GCS_TOKEN": "anon",
            # Asks Google's own servers about the bucket, by another protocol.
            "GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT": "false",
            "NO_GCE_CHECK": "true",
        }

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that hangs up is no error; others are raised in the client anyway."""

    def put(self, key: str, data: bytes, query: Mapping[str, str]) -> dict[str, Any]:
        """Writes an object; `query` may hold a precondition."""
        with self.lock:
            stored = self.objects.get(key)
            expected = query.get("ifGenerationMatch")
            if expected is not None and int(expected) != (stored.generation if stored else 0):
                raise Refused(412)
            self.objects[key] = Stored(data, next(self.generations))
        return self.describe(key)

    def delete(self, key: str, query: Mapping[str, str]) -> None:
        with self.lock:
            stored = self.objects.get(key)
            if stored is None:
                raise Refused(404)
            if int(query.get("ifGenerationMatch", stored.generation)) != stored.generation:
                raise Refused(412)
            del self.objects[key]

    def describe(self, key: str) -> dict[str, Any]:
        """The metadata of an object. Raises: Refused where it is missing."""
        stored = self.objects.get(key)
        if stored is None:
            raise Refused(404)
        return {
            "kind": "storage#object",
            "id": f"{self.name}/{key}/{stored.generation}",
            "bucket": self.name,
            "name": key,
            "size": str(len(stored.data)),
            "generation": str(stored.generation),
            "metageneration": "1",
            "md5Hash": base64.b64encode(hashlib.md5(stored.data).digest()).decode(),
            "contentType": "application/octet-stream",
            "timeCreated": DATE,
            "updated": DATE,
        }

    def list(self, query: Mapping[str, str]) -> dict[str, Any]:
        """Objects by prefix; with a delimiter, what lies deeper as prefixes."""
        prefix, cut = query.get("prefix", ""), query.get("delimiter")
        names = sorted(key for key in list(self.objects) if key.startswith(prefix))
        names = [key for key in names if key >= query.get("startOffset", "")]
        if end := query.get("endOffset"):
            names = [key for key in names if key < end]
        deeper = {
            prefix + key[len(prefix) :].split(cut)[0] + cut
            for key in names
            if cut and cut in key[len(prefix) :]
        }
        direct = [key for key in names if not cut or cut not in key[len(prefix) :]]
        items = []
        for key in direct:
            with contextlib.suppress(Refused):  # deleted meanwhile
                items.append(self.describe(key))
        answer: dict[str, Any] = {"kind": "storage#objects", "items": items}
        return answer | ({"prefixes": sorted(deeper)} if deeper else {})


@contextlib.contextmanager
def serving() -> Iterator[Bucket]:
    """A bucket that is served until the end of the block."""
    bucket = Bucket()
    thread = threading.Thread(target=bucket.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    try:
        yield bucket
    finally:
        bucket.shutdown()
        bucket.server_close()


class _Handler(BaseHTTPRequestHandler):
    server: Bucket  # pyright: ignore[reportIncompatibleVariableOverride]
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing: a test's output is its own."""

    def do_GET(self) -> None:
        self._answer(self._get)

    def do_POST(self) -> None:
        self._answer(self._post)

    def do_PUT(self) -> None:
        self._answer(self._continue)

    def do_DELETE(self) -> None:
        self._answer(self._delete)

    def _answer(self, how: Any) -> None:
        length = int(self.headers.get("Content-Length") or 0)
        self.body = self.rfile.read(length)
        if "chunked" in self.headers.get("Transfer-Encoding", ""):
            self.body = self._chunks()
        parsed = urllib.parse.urlsplit(self.path)
        self.route = parsed.path
        self.query = dict(urllib.parse.parse_qsl(parsed.query))
        self.server.requests.append(f"{self.command} {self.path}")
        try:
            refused = self.server.refused in urllib.parse.unquote(self.path)
            if self.command != "GET" and self.server.refuses is not None and refused:
                raise Refused(self.server.refuses)
            how()
        except Refused as error:
            text = {"error": {"code": error.status, "message": f"status {error.status}"}}
            # What follows "not modified" would be taken for the next answer.
            self._send(error.status, b"" if error.status == 304 else json.dumps(text).encode())

    def _chunks(self) -> bytes:
        parts = []
        while size := int(self.rfile.readline().split(b";")[0], 16):
            parts.append(self.rfile.read(size))
            self.rfile.readline()
        self.rfile.readline()
        return b"".join(parts)

    def _send(self, status: int, data: bytes = b"", **headers: str) -> None:
        self.send_response(status)
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        for name, value in ({"Content-Type": "application/json"} | named).items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def _json(self, value: Any, **headers: str) -> None:
        self._send(200, json.dumps(value).encode(), **headers)

    def _key(self) -> str | None:
        """The object that the path names; None for the bucket. Raises: Refused."""
        parts = re.fullmatch(r"(?:/download)?/storage/v1/b/([^/]+)(/o(?:/(.+))?)?", self.route)
        if parts is None or parts[1] != self.server.name:
            raise Refused(404)
        return urllib.parse.unquote(parts[3]) if parts[3] else None

    def _get(self) -> None:
        key = self._key()
        if key is None:
            listing = self.route.endswith("/o")
            bucket = {"kind": "storage#bucket", "name": self.server.name, "location": "US"}
            self._json(self.server.list(self.query) if listing else bucket)
            return
        stored = self.server.objects.get(key)
        described = self.server.describe(key)
        if stored is None or self.query.get("alt") != "media":
            self._json(described)
            return
        generation, matches = str(stored.generation), self.query.get
        if matches("ifGenerationMatch", generation) != generation:
            raise Refused(412)
        if matches("ifGenerationNotMatch") == generation:
            raise Refused(304)
        first, end = 0, len(stored.data)
        status, headers = 200, {"X_Goog_Generation": generation}
        if span := re.fullmatch(r"bytes=(\d*)-(\d*)", self.headers.get("Range", "")):
            status = 206
            if span[1]:
                first, end = int(span[1]), min(end, int(span[2]) + 1 if span[2] else end)
            else:
                first = max(0, end - int(span[2]))
            if first >= end:
                raise Refused(416)
            headers["Content_Range"] = f"bytes {first}-{end - 1}/{len(stored.data)}"
        self._send(status, stored.data[first:end], **headers)

    def _post(self) -> None:
        if self.route.startswith("/batch/"):
            self._batch()
        elif "upload_id" in self.query:
            self._continue()
        elif self.route == f"/upload/storage/v1/b/{self.server.name}/o":
            self._upload()
        else:
            raise Refused(404)

    def _upload(self) -> None:
        kind = self.query.get("uploadType")
        if kind == "media":
            self._json(self.server.put(self.query["name"], self.body, self.query))
        elif kind == "multipart":
            boundary = re.search(r'boundary="?([^";]+)"?', self.headers["Content-Type"])
            assert boundary, self.headers["Content-Type"]
            mark = b"--" + boundary[1].encode()
            _, described, rest = self.body.split(mark, 2)
            # Data may hold the mark: the last one ends it.
            content = rest[: rest.rindex(b"\n" + mark)].removesuffix(b"\r")
            fields = json.loads(re.split(rb"\r?\n\r?\n", described, maxsplit=1)[1])
            data = re.split(rb"\r?\n\r?\n", content, maxsplit=1)[1]
            self._json(self.server.put(fields["name"], data, self.query))
        else:
            key = self.query.get("name") or json.loads(self.body)["name"]
            number = str(next(self.server.generations))
            self.server.uploads[number] = key, bytearray(), self.query
            place = f"{self.server.address}{self.route}?uploadType=resumable&upload_id={number}"
            self._send(200, b"{}", Location=place)

    def _continue(self) -> None:
        """A part of an upload, which gcsfs sends by POST and others by PUT."""
        key, data, query = self.server.uploads[self.query["upload_id"]]
        data += self.body
        if self.headers.get("Content-Range", "/*").endswith("/*"):
            self._send(308, Range=f"bytes=0-{len(data) - 1}")
            return
        del self.server.uploads[self.query["upload_id"]]
        self._json(self.server.put(key, bytes(data), query))

    def _delete(self) -> None:
        if key := self._key():
            self.server.delete(key, self.query)
        self._send(204)

    def _batch(self) -> None:
        """Several requests to delete, in one."""
        answers = []
        for name in re.findall(
            r"DELETE /storage/v1/b/[^/]+/o/(\S+?)(?:\?\S*)? ", self.body.decode()
        ):
            try:
                self.server.delete(urllib.parse.unquote(name), {})
                answers.append("204 No Content")
            except Refused as error:
                answers.append(f'{error.status} Refused\r\n\r\n{{"error": {{}}}}')
        parts = [f"--{BOUNDARY}\r\n\r\nHTTP/1.1 {answer}\r\n" for answer in answers]
        text = "".join(parts) + f"--{BOUNDARY}--"
        self._send(200, text.encode(), Content_Type=f"multipart/mixed; boundary={BOUNDARY}")
