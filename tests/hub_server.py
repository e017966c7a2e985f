"""A Hub in memory, over real HTTP: the part of its protocol that downloading and pushing a model needs."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import socket
import threading
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlsplit

TOKEN = "hf_secret"


@dataclass
class Repository:
    """Commits by hash, branches by name; what goes wrong with it."""

    commits: dict[str, dict[str, bytes]] = field(default_factory=dict)
    branches: dict[str, str] = field(default_factory=dict)
    private: bool = False
    breaks_off: str = ""  # a file whose transfer ends half way
    wrong_hash: str = ""  # a file whose announced hash is another's

    def commit(self, files: dict[str, bytes], branch: str = "main") -> str:
        sha = hashlib.sha1(json.dumps([len(self.commits), sorted(files)]).encode()).hexdigest()
        self.commits[sha], self.branches[branch] = files, sha
        return sha

    def etag(self, name: str, content: bytes) -> str:
        return hashlib.sha256(content + (b"!" if name == self.wrong_hash else b"")).hexdigest()


class Hub(ThreadingHTTPServer):
    """`with Hub() as hub:` serves `hub.repositories` at `hub.url`."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.repositories: dict[str, Repository] = {}
        self.url = f"http://127.0.0.1:{self.server_address[1]}"

    def __enter__(self) -> Hub:
        threading.Thread(target=self.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *exc: object) -> None:
        self.shutdown()
        self.server_close()


class _Handler(BaseHTTPRequestHandler):
    server: Hub
    protocol_version = "HTTP/1.1"

    def log_message(self, *arguments: Any) -> None:
        pass

    def do_HEAD(self) -> None:
        self._get(body=False)

    def do_GET(self) -> None:
        self._get(body=True)

    def do_POST(self) -> None:
        content = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        path = unquote(urlsplit(self.path).path)
        if path == "/api/repos/create":
            asked = json.loads(content)
            name = f"{asked['organization']}/{asked['name']}" if asked.get("organization") else f"me/{asked['name']}"
            repository = self.server.repositories.setdefault(name, Repository(private=bool(asked.get("private"))))
            if not repository.commits:
                repository.commit({})
            return self._json({"url": f"{self.server.url}/{name}", "name": name})
        if path == "/api/validate-yaml":
            return self._json({"errors": [], "warnings": []})
        if match := re.fullmatch(r"/api/models/(.+)/preupload/(.+)", path):
            files = [{"path": f["path"], "uploadMode": "regular", "shouldIgnore": False, "oid": None}
                     for f in json.loads(content)["files"]]  # fmt: skip
            return self._json({"files": files})
        if match := re.fullmatch(r"/api/models/(.+)/commit/(.+)", path):
            name, branch = match.groups()
            repository = self.server.repositories[name]
            if self.headers.get("Authorization") != f"Bearer {TOKEN}":
                return self._refuse(401, "RepoNotFound")
            files = dict(repository.commits.get(repository.branches.get(branch, ""), {}))
            for line in content.splitlines():
                entry = json.loads(line)
                if entry["key"] == "file":
                    files[entry["value"]["path"]] = base64.b64decode(entry["value"]["content"])
            sha = repository.commit(files, branch)
            return self._json({"commitUrl": f"{self.server.url}/{name}/commit/{sha}", "commitOid": sha})
        return self._refuse(404, "EntryNotFound")

    def _get(self, body: bool) -> None:
        path = unquote(urlsplit(self.path).path)
        if path == "/api/whoami-v2":
            return self._json({"name": "me", "type": "user", "orgs": []})
        if match := re.fullmatch(r"/api/models/([^/]+/[^/]+)(?:/(revision|tree)/([^/]+))?.*", path):
            name, kind, revision = match.groups()
            found = self._find(name, revision or "main")
            if found is not None:
                sha, files = found
                listed = [{"type": "file", "path": p, "size": len(c), "oid": "0" * 40} for p, c in files.items()]
                siblings = [{"rfilename": p, "size": len(c)} for p, c in files.items()]
                about = {"id": name, "sha": sha, "siblings": siblings, "private": False, "tags": [], "downloads": 0}
                self._json(listed if kind == "tree" else about)
            return None
        if match := re.fullmatch(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path):
            name, revision, file = match.groups()
            found = self._find(name, revision)
            if found is not None:
                self._file(self.server.repositories[name], *found, file, body)
            return None
        return self._refuse(404, "EntryNotFound")

    def _find(self, name: str, revision: str) -> tuple[str, dict[str, bytes]] | None:
        repository = self.server.repositories.get(name)
        allowed = repository and (not repository.private or self.headers.get("Authorization") == f"Bearer {TOKEN}")
        if repository is None or not allowed:
            self._refuse(401 if repository else 404, "RepoNotFound")
            return None
        sha = repository.branches.get(revision, revision)
        if sha not in repository.commits:
            self._refuse(404, "RevisionNotFound")
            return None
        return sha, repository.commits[sha]

    def _file(self, repository: Repository, sha: str, files: dict[str, bytes], name: str, body: bool) -> None:
        if name not in files:
            return self._refuse(404, "EntryNotFound", sha)
        content = files[name]
        begin = int(self.headers["Range"].split("=")[1].split("-")[0]) if "Range" in self.headers else 0
        self.send_response(206 if begin else 200)
        self.send_header("X-Repo-Commit", sha)
        self.send_header("ETag", f'"{repository.etag(name, content)}"')
        self.send_header("Content-Length", str(len(content) - begin))
        self.send_header("Accept-Ranges", "bytes")
        self.end_headers()
        if body and name == repository.breaks_off:
            self.wfile.write(content[begin : (begin + len(content)) // 2])
            self.wfile.flush()
            self.connection.shutdown(socket.SHUT_RDWR)  # a mere close() leaves the client waiting
            self.close_connection = True
        elif body:
            self.wfile.write(content[begin:])
        return None

    def _json(self, answer: Any) -> None:
        content = json.dumps(answer).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def _refuse(self, status: int, code: str, sha: str = "") -> None:
        self.send_response(status)
        self.send_header("X-Error-Code", code)
        if sha:
            self.send_header("X-Repo-Commit", sha)
        self.send_header("Content-Length", "0")
        self.end_headers()
