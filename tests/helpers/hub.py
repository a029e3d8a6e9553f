"""A stand-in for the Hugging Face hub over HTTP, which serves folders as repositories: sizes,
ranges, revisions, connections that break off, and what it was asked for."""

import hashlib
import json
import re
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

import huggingface_hub.constants
import pytest

from runtime.model.files import locate

_INFO = re.compile(r"/api/models/(?P<repo>[^/]+/[^/]+)(/revision/(?P<revision>.+))?")
_TREE = re.compile(r"/api/models/(?P<repo>[^/]+/[^/]+)/tree/(?P<revision>[^/]+)")
_FILE = re.compile(r"/(?P<repo>[^/]+/[^/]+)/resolve/(?P<revision>[^/]+)/(?P<file>.+)")


class StandInHub(ThreadingHTTPServer):
    """Serves `repos`: folders by repository and revision. `sent` has the name and the bytes of each
    answer to a request for a file. The next answers of more than `breaks_after` bytes break off
    there, `breaks` times. `ranges`: whether it answers requests for a part of a file."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.repos: dict[str, dict[str, Path]] = {}
        self.sent: list[tuple[str, int]] = []
        self.asked: list[str] = []
        self.breaks = 0
        self.breaks_after = 0
        self.ranges = True

    def handle_error(self, request: object, address: object) -> None:
        """Say nothing of a client that hangs up, as one does that is not sent a part."""
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, address)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def add(self, repo: str, folder: Path, revision: str = "main") -> None:
        """Serve a folder as a revision of a repository."""
        self.repos.setdefault(repo, {})[revision] = folder

    def sent_nbytes(self, ending: str = "") -> int:
        """Return the bytes sent of files whose names end so."""
        return sum(nbytes for name, nbytes in self.sent if name.endswith(ending))

    def folder(self, repo: str, revision: str) -> tuple[str, Path] | None:
        """Return the commit and the folder of a revision, None for one that there is not."""
        by_commit = {_commit(folder): folder for folder in self.repos.get(repo, {}).values()}
        folder = self.repos.get(repo, {}).get(revision) or by_commit.get(revision)
        return (_commit(folder), folder) if folder else None


def _files(folder: Path) -> dict[str, Path]:
    return {
        path.relative_to(folder).as_posix(): path
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _commit(folder: Path) -> str:
    told = [(name, _digest(path)) for name, path in _files(folder).items()]
    return hashlib.sha1(repr(told).encode()).hexdigest()


class _Handler(BaseHTTPRequestHandler):
    server: StandInHub

    def log_message(self, *_: object) -> None:
        """Say nothing."""

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def _answer(self) -> None:
        path = unquote(urlsplit(self.path).path)
        self.server.asked.append(f"{self.command} {path}")
        for form, answer in ((_TREE, self._tree), (_FILE, self._file), (_INFO, self._info)):
            if found := form.fullmatch(path):
                repo, revision = found["repo"], found["revision"] or "main"
                if repo not in self.server.repos:
                    return self._refuse(404, "RepoNotFound")
                if not (place := self.server.folder(repo, revision)):
                    return self._refuse(404, "RevisionNotFound")
                return answer(*place, **({"name": found["file"]} if form is _FILE else {}))
        return self._refuse(404, "EntryNotFound")

    def _refuse(self, code: int, why: str) -> None:
        self.send_response(code)
        self.send_header("X-Error-Code", why)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def _info(self, commit: str, folder: Path) -> None:
        siblings = [
            {
                "rfilename": name,
                "size": path.stat().st_size,
                "blobId": _digest(path)[:40],
                "lfs": {"sha256": _digest(path), "size": path.stat().st_size, "pointerSize": 1},
            }
            for name, path in _files(folder).items()
        ]
        self._send_json({"id": "stand-in", "sha": commit, "siblings": siblings})

    def _tree(self, _: str, folder: Path) -> None:
        self._send_json(
            [
                {
                    "type": "file",
                    "path": name,
                    "size": path.stat().st_size,
                    "oid": _digest(path)[:40],
                    "lfs": {"oid": _digest(path), "size": path.stat().st_size, "pointerSize": 1},
                }
                for name, path in _files(folder).items()
            ]
        )

    def _send_json(self, value: object) -> None:
        body = json.dumps(value).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def _file(self, commit: str, folder: Path, *, name: str) -> None:
        path = _files(folder).get(name)
        if path is None:
            return self._refuse(404, "EntryNotFound")
        body = path.read_bytes()
        wanted = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
        is_part = bool(wanted) and self.server.ranges
        start = int(wanted[1]) if is_part else 0
        end = int(wanted[2] or len(body) - 1) + 1 if is_part else len(body)
        part = body[start:end]
        self.send_response(206 if is_part else 200)
        self.send_header("ETag", f'"{_digest(path)}"')
        self.send_header("X-Repo-Commit", commit)
        self.send_header("Content-Length", str(len(part)))
        if is_part:
            self.send_header("Content-Range", f"bytes {start}-{end - 1}/{len(body)}")
        self.end_headers()
        if self.command == "GET":
            if self.server.breaks and len(part) > self.server.breaks_after:
                self.server.breaks -= 1
                part = part[: self.server.breaks_after]
                self.close_connection = True
            answer = (name, len(part))
            self.server.sent.append(answer)  # before the client has it, and may look
            try:
                self.wfile.write(part)
            except ConnectionError:
                self.server.sent.remove(answer)
                raise
        return None


@contextmanager
def running() -> Iterator[StandInHub]:
    """Yield a stand-in that serves until the end of the block."""
    with StandInHub() as hub:
        thread = threading.Thread(target=hub.serve_forever, args=(0.01,), daemon=True)
        thread.start()
        try:
            yield hub
        finally:
            hub.shutdown()
            thread.join()


def connect(hub: StandInHub, home: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Have this process ask the stand-in, with `home` as the user's folder, and return the folder
    of the cache there."""
    constants = huggingface_hub.constants
    cache = home / ".cache" / "huggingface" / "hub"
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.delenv("OLLAMA_MODELS", raising=False)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache))
    monkeypatch.setattr(constants, "ENDPOINT", hub.url)
    monkeypatch.setattr(
        constants,
        "HUGGINGFACE_CO_URL_TEMPLATE",
        hub.url + "/{repo_id}/resolve/{revision}/{filename}",
    )
    locate._by_name.cache_clear()
    return cache


def into_ollama(home: Path, file: Path, name: str) -> Path:
    """Put a file where Ollama would, by its name with the registry, and return its place there."""
    models = home / ".ollama" / "models"
    digest = f"sha256:{_digest(file)}"
    blob = models / "blobs" / digest.replace(":", "-")
    blob.parent.mkdir(parents=True, exist_ok=True)
    blob.write_bytes(file.read_bytes())
    manifest = models / "manifests" / name.replace(":", "/")
    manifest.parent.mkdir(parents=True)
    layers = [
        {"mediaType": "application/vnd.ollama.image.template", "digest": "sha256:0"},
        {"mediaType": "application/vnd.ollama.image.model", "digest": digest},
    ]
    manifest.write_text(json.dumps({"layers": layers}))
    return blob
