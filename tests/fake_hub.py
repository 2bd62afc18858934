"""A Hugging Face hub on loopback, which the real huggingface_hub asks: repositories with their files, gated or
missing ones, and a list of what was asked of it."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlsplit


@dataclass
class Repo:
    files: dict[str, bytes]
    gated: bool = False
    status: int = 200  # what a request for a file gets; others than 200 give no reason
    has_siblings: bool = True  # whether the answer that describes it lists its files
    gguf: Mapping[str, Any] | None = None  # what the hub says of its GGUF files
    commits: dict[str, dict[str, bytes]] = field(default_factory=dict)  # the files of all its commits

    def __post_init__(self) -> None:
        self.push(self.files)

    def push(self, files: dict[str, bytes]) -> None:
        """A new commit of `main`."""
        self.commit = hashlib.sha1(repr(sorted(files.items())).encode()).hexdigest()
        self.files = self.commits[self.commit] = files


@dataclass
class FakeHub:
    repos: dict[str, Repo] = field(default_factory=dict)
    asked: list[str] = field(default_factory=list)  # method and path of each request
    url: str = ""
    server: ThreadingHTTPServer | None = None

    def close(self) -> None:
        """Nothing is at its address from then on. It may be called twice."""
        if self.server is not None:
            self.server.shutdown()
            self.server.server_close()
            self.server = None

    @property
    def files_got(self) -> list[str]:
        """The files that were downloaded, in turn."""
        return [
            path.split("/", 5)[5] for path in self.asked if path.startswith("GET") and "/resolve/" in path
        ]


class _Handler(BaseHTTPRequestHandler):
    hub: FakeHub

    def log_message(self, *_: Any) -> None:
        pass

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def _answer(self) -> None:
        path = unquote(urlsplit(self.path).path)
        self.hub.asked.append(f"{self.command} {path}")
        parts = path.strip("/").split("/")
        if parts[:2] == ["api", "models"]:
            repo = self._repo("/".join(parts[2:4]))
            if repo is not None and (commit := self._commit(repo, parts[5] if len(parts) > 5 else "main")):
                is_tree = parts[4:5] == ["tree"]
                self._json(self._tree(repo, commit) if is_tree else self._info(parts[2:4], repo, commit))
        elif parts[2:3] == ["resolve"]:
            repo = self._repo("/".join(parts[:2]))
            if repo is not None and (commit := self._commit(repo, parts[3])):
                self._file(repo, commit, "/".join(parts[4:]))
        else:
            self._error(404, "")

    def _repo(self, name: str) -> Repo | None:
        repo = self.hub.repos.get(name)
        if repo is None:
            self._error(401, "RepoNotFound")
        return repo

    def _commit(self, repo: Repo, revision: str) -> str | None:
        commit = repo.commit if revision == "main" else revision
        if commit not in repo.commits:
            self._error(404, "RevisionNotFound")
            return None
        return commit

    def _info(self, name: Sequence[str], repo: Repo, commit: str) -> dict[str, Any]:
        files = [{"rfilename": file, "size": len(content)} for file, content in repo.commits[commit].items()]
        more: dict[str, Any] = {} if repo.gguf is None else {"gguf": repo.gguf}
        if repo.has_siblings:
            more["siblings"] = files
        return {"id": "/".join(name), "sha": commit, "tags": [], **more}

    def _tree(self, repo: Repo, commit: str) -> list[dict[str, Any]]:
        return [
            {"type": "file", "path": file, "size": len(content), "oid": hashlib.sha1(content).hexdigest()}
            for file, content in repo.commits[commit].items()
        ]

    def _file(self, repo: Repo, commit: str, name: str) -> None:
        content = repo.commits[commit].get(name)
        if repo.status != HTTPStatus.OK:
            self._send(repo.status, b"{}", {})
        elif repo.gated:
            self._error(403, "GatedRepo")
        elif content is None:
            self._error(404, "EntryNotFound")
        else:
            tag = hashlib.sha1(content).hexdigest()
            self._send(200, content, {"ETag": f'"{tag}"', "X-Repo-Commit": commit})

    def _json(self, value: Any) -> None:
        self._send(200, json.dumps(value).encode(), {"Content-Type": "application/json"})

    def _error(self, status: int, code: str) -> None:
        self._send(status, b"{}", {"X-Error-Code": code})

    def _send(self, status: int, content: bytes, headers: Mapping[str, str]) -> None:
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(content))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)


def start() -> FakeHub:
    """A hub that answers until its `close`."""
    hub = FakeHub()
    hub.server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"hub": hub}))
    hub.url = f"http://127.0.0.1:{hub.server.server_port}"
    threading.Thread(target=hub.server.serve_forever, args=(0.01,), daemon=True).start()
    return hub
