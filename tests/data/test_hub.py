"""What is said where a name on the hub leads nowhere; the hub is a server on this machine."""

from __future__ import annotations

import http.server
import subprocess
import sys
import threading

import pytest

ANSWERS = {  # by the name asked for: what the hub answers
    "locked": (403, "GatedRepo"),
    "absent": (401, "RepoNotFound"),
    "present": (404, "RevisionNotFound"),
}
PROGRAM = """
from jaxgrpo.core.errors import InputError
from jaxgrpo.models.hf.folders import find_folder
from jaxgrpo.data.sources import Source, read
for name in ("locked", "absent", "present"):
    for fetch in (
        lambda: find_folder(f"owner/{name}", "v9"),
        lambda: read(Source(f"owner/{name}", revision="v9")),
    ):
        try:
            fetch()
        except InputError as error:
            print(error)
"""


class Hub(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        name = next(name for name in (*ANSWERS, "") if name in self.path)
        status, code = ANSWERS.get(name, (404, "EntryNotFound"))
        self.send_response(status)
        self.send_header("X-Error-Code", code)
        self.send_header("Content-Length", "0")
        self.end_headers()

    do_HEAD = do_GET

    def log_message(self, *_):
        pass


@pytest.fixture
def address():
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Hub) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def messages(environment, tmp_path, **variables):
    places = {"HF_HOME": str(tmp_path), "HF_DATASETS_CACHE": str(tmp_path / "datasets")}
    run = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        env=environment(**places, **variables),
        capture_output=True,
        text=True,
        check=True,
    )
    return run.stdout.splitlines()


@pytest.mark.full
def test_gated_absent_and_other_revisions_are_told_apart(environment, tmp_path, address):
    problems = messages(environment, tmp_path, HF_ENDPOINT=address, HF_HUB_OFFLINE="0")
    assert problems == [
        f"{key} = 'owner/{name}' is no local path, and as a {kind} on the hub it {problem}"
        for name, message in {
            "locked": "is gated: accept its terms at {page}, then log in with `hf auth login` or "
            "set HF_TOKEN",
            "absent": "does not exist, or is private: check the name, or log in with `hf auth "
            "login` or set HF_TOKEN",
            "present": "has no revision 'v9': name a branch, tag or commit of {page}",
        }.items()
        for key, kind, page in (
            ("model.path", "model", f"{address}/owner/{name}"),
            ("data.path", "data set", f"{address}/datasets/owner/{name}"),
        )
        for problem in [message.format(page=page)]
    ]


@pytest.mark.slow
def test_without_a_network_the_message_says_how_to_bring_the_files(environment, tmp_path):
    model, rows, *_ = messages(environment, tmp_path, HF_HUB_OFFLINE="1")
    assert model == (
        "model.path = 'owner/locked' is no local path, and as a model on the hub it is not in the "
        "local cache, and HF_HUB_OFFLINE is set: give a local path, or run `hf download "
        "owner/locked` where there is a network"
    )
    assert "`hf download owner/locked --repo-type dataset`" in rows
