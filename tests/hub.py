"""A small hub on 127.0.0.1: the routes by which huggingface_hub lists and downloads a repository."""

import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from hashlib import sha1
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from socket import SHUT_RDWR
from threading import Thread
from typing import Any

COMMIT = "0123456789abcdef0123456789abcdef01234567"
_API = re.compile(r"/api/(?:models|datasets)/([^/]+/[^/]+)/(revision|tree)/([^/?]+)/?(.*)")
_FILE = re.compile(r"(?:/datasets)?/([^/]+/[^/]+)/resolve/([^/]+)/(.+)")


class Hub:
    """Repositories by id, as files by name. `gated` ones need a token that starts with "ok"; any other token is refused
    everywhere. Downloads of a file in `cut` break off in the middle as often as it says."""

    def __init__(self, repositories: Mapping[str, Mapping[str, bytes]]) -> None:
        self.repositories = {repo: dict(files) for repo, files in repositories.items()}
        self.gated: set[str] = set()
        self.cut: dict[str, int] = {}
        self.downloads: Counter[str] = Counter()
        self.url = ""

    @contextmanager
    def served(self) -> "Iterator[Hub]":
        handler = type("Handler", (_Handler,), {"hub": self})
        server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self.url = f"http://127.0.0.1:{server.server_port}"
        Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        try:
            yield self
        finally:
            server.shutdown()
            server.server_close()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: Hub

    def do_HEAD(self) -> None:
        self.answer()

    def do_GET(self) -> None:
        self.answer()

    def log_message(self, *args: Any) -> None:
        """Nothing is printed."""

    def answer(self) -> None:
        path = self.path.partition("?")[0]
        api, file = _API.fullmatch(path), _FILE.fullmatch(path)
        repo, revision = (api[1], api[3]) if api else (file[1], file[2]) if file else ("", "")
        token = self.headers.get("Authorization", "").removeprefix("Bearer ")
        files = self.hub.repositories.get(repo)
        if token and not token.startswith("ok"):
            self.refuse(401, "")
        elif files is None:
            self.refuse(404 if token else 401, "RepoNotFound")
        elif revision not in ("main", "v1", COMMIT):
            self.refuse(404, "RevisionNotFound")
        elif repo in self.hub.gated and not token and file:
            self.refuse(403, "GatedRepo")
        elif api and api[2] == "revision":
            self.send_json({"id": repo, "sha": COMMIT, "siblings": [{"rfilename": name} for name in files]})
        elif api:
            entries = [(name, body) for name, body in files.items() if name.startswith(api[4])]
            self.send_json(
                [{"type": "file", "path": n, "size": len(b), "oid": sha1(b).hexdigest()} for n, b in entries]
            )
        elif file and file[3] in files:
            self.send_file(file[3], files[file[3]])
        else:
            self.refuse(404, "EntryNotFound")

    def refuse(self, status: int, code: str) -> None:
        self.send_response(status)
        if code:
            self.send_header("X-Error-Code", code)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def send_json(self, value: Any) -> None:
        body = json.dumps(value).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def send_file(self, name: str, body: bytes) -> None:
        first = int((re.match(r"bytes=(\d+)-", self.headers.get("Range", "")) or [0, 0])[1])
        self.send_response(206 if first else 200)
        self.send_header("ETag", f'"{sha1(body).hexdigest()}"')
        self.send_header("X-Repo-Commit", COMMIT)
        self.send_header("Accept-Ranges", "bytes")
        self.send_header("Content-Length", str(len(body) - first))
        if first:
            self.send_header("Content-Range", f"bytes {first}-{len(body) - 1}/{len(body)}")
        self.end_headers()
        if self.command == "HEAD":
            return
        self.hub.downloads[name] += 1
        if self.hub.cut.get(name, 0) > 0:
            self.hub.cut[name] -= 1
            self.wfile.write(body[first : (first + len(body)) // 2])
            self.wfile.flush()
            self.connection.shutdown(SHUT_RDWR)
            self.close_connection = True
        else:
            self.wfile.write(body[first:])
