"""A small Hub on this machine, for tests: repositories of models and datasets in memory, over HTTP on the loopback.

It serves what `huggingface_hub` and `datasets` ask for when they push and pull without Xet: who a token belongs to,
creating repositories, large files (LFS) ahead of a commit, commits, branches, listings, and downloads with ranges. As
on the real Hub, private repositories are there only for those who may see them, a commit is applied whole or not at
all, and blobs that have arrived stay. `fail` makes a request go wrong.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

import yaml

LARGE = (".safetensors", ".bin", ".mp4", ".parquet", ".png")
REGULAR_BYTES = 1 << 20
PATHS_OF = {"models": "", "datasets": "datasets/"}  # how web addresses of repositories begin


@dataclass
class File:
    data: bytes
    large: bool

    @property
    def sha256(self) -> str:
        return hashlib.sha256(self.data).hexdigest()

    @property
    def oid(self) -> str:
        """The id of the blob in git; of a large file, that of its pointer."""
        content = self.sha256.encode() if self.large else self.data
        return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()

    @property
    def etag(self) -> str:
        return self.sha256 if self.large else self.oid

    def listed(self, path: str) -> dict[str, Any]:
        entry = {"type": "file", "path": path, "size": len(self.data), "oid": self.oid}
        if self.large:
            entry["lfs"] = {"oid": self.sha256, "size": len(self.data), "pointerSize": 134}
        return entry


@dataclass
class Branch:
    sha: str
    files: dict[str, File] = field(default_factory=dict)
    commits: list[str] = field(default_factory=list)


@dataclass
class Repository:
    kind: str
    id: str
    private: bool
    branches: dict[str, Branch]

    def branch(self, revision: str) -> Branch | None:
        """By name, or by the id of its last commit."""
        at = (branch for branch in self.branches.values() if branch.sha == revision)
        return self.branches.get(revision) or next(at, None)


@dataclass
class Fault:
    method: str
    pattern: str
    status: int
    times: int
    after: int


class HubStandIn:
    """A Hub with the users "me" and "you", at `url` while its context is entered.

    Attributes:
        url: for HF_ENDPOINT.
        tokens: by token, the user and the role.
        repositories: by kind ("models" or "datasets") and id.
        blobs: large files that have arrived, by hash.
        requests: what was asked, as "METHOD path", in order.
    """

    def __init__(self) -> None:
        self.tokens = {"hf_me": ("me", "write"), "hf_reader": ("me", "read"), "hf_you": ("you", "write")}
        self.repositories: dict[tuple[str, str], Repository] = {}
        self.blobs: dict[str, bytes] = {}
        self.requests: list[str] = []
        self.faults: list[Fault] = []
        self.lock = threading.RLock()
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"hub": self}))
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    def __enter__(self) -> HubStandIn:
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *error: Any) -> None:
        self._server.shutdown()
        self._server.server_close()

    def add(self, kind: str, repo_id: str, files: dict[str, bytes] | None = None, private: bool = False) -> Repository:
        """A repository with files, as if somebody had pushed them."""
        branch = Branch(_commit_id(repo_id))
        branch.files = {path: File(data, _is_large(path, len(data))) for path, data in (files or {}).items()}
        self.repositories[kind, repo_id] = Repository(kind, repo_id, private, {"main": branch})
        return self.repositories[kind, repo_id]

    def files(self, kind: str, repo_id: str, branch: str = "main") -> dict[str, bytes]:
        """What is to be seen in a repository."""
        repository = self.repositories.get((kind, repo_id))
        return {path: file.data for path, file in repository.branches[branch].files.items()} if repository else {}

    def fail(self, method: str, pattern: str, status: int = 500, times: int = 1, after: int = 0) -> None:
        """Let the next requests of a method whose path matches go wrong, after some that go well."""
        self.faults.append(Fault(method, pattern, status, times, after))

    def count(self, method: str, pattern: str) -> int:
        """How many requests of a method had a path that matches."""
        return sum(bool(re.fullmatch(f"{method} {pattern}", request)) for request in self.requests)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: HubStandIn

    def log_message(self, *message: Any) -> None:
        pass

    def do_GET(self) -> None:
        body = self._body()  # read even where an error follows, or the connection is out of step
        path = unquote(urlsplit(self.path).path)
        with self.hub.lock:
            self.hub.requests.append(f"{self.command} {path}")
            if fault := self._fault(path):
                return self._error(fault, "ServerError")
            for methods, pattern, answer in ROUTES:
                if self.command in methods and (match := re.fullmatch(pattern, path)):
                    return answer(self, body, **match.groupdict())
            self._error(404, "EntryNotFound")

    do_HEAD = do_POST = do_PUT = do_DELETE = do_GET

    # ------------------------------------------------------------------------------------------- users, repositories

    def whoami(self, body: bytes) -> None:
        if self._user is None:
            return self._error(401, "Unauthorized", "Invalid credentials in Authorization header")
        name, role = self._user
        self._answer({"name": name, "type": "user", "orgs": [], "auth": {"accessToken": {"role": role}}})

    def validate_yaml(self, body: bytes) -> None:
        self._answer({"warnings": [], "errors": []})

    def create(self, body: bytes) -> None:
        wanted = json.loads(body)
        if self._user is None:
            return self._error(401, "Unauthorized", "Invalid credentials in Authorization header")
        owner, kind = wanted.get("organization") or self._user[0], f"{wanted.get('type') or 'model'}s"
        if self._user != (owner, "write"):
            return self._error(403, "Forbidden", f"You may not write for {owner}")
        repo_id = f"{owner}/{wanted['name']}"
        url = f"{self.hub.url}/{PATHS_OF[kind]}{repo_id}"
        if (kind, repo_id) in self.hub.repositories:
            return self._answer({"error": "You already created this repository", "url": url}, 409)
        private = wanted.get("private") or wanted.get("visibility") == "private"
        self.hub.add(kind, repo_id, {".gitattributes": b"*.safetensors filter=lfs\n"}, private=private)
        self._answer({"url": url, "name": repo_id, "id": repo_id})

    def create_branch(self, body: bytes, kind: str, repo_id: str, revision: str) -> None:
        if (repository := self._repository(kind, repo_id, write=True)) is None:
            return
        if revision in repository.branches:
            return self._answer({"error": "Reference already exists"}, 409)
        main = repository.branches["main"]
        repository.branches[revision] = Branch(main.sha, dict(main.files))
        self._answer({})

    def info(self, body: bytes, kind: str, repo_id: str, revision: str | None = None) -> None:
        if (found := self._branch(kind, repo_id, revision or "main")) is None:
            return
        repository, branch = found
        card = _front_matter(branch.files["README.md"].data.decode()) if "README.md" in branch.files else {}
        self._answer(
            {
                **{
                    "_id": "0" * 24,
                    "id": repo_id,
                    "modelId": repo_id,
                    "sha": branch.sha,
                    "private": repository.private,
                },
                **{"gated": False, "disabled": False, "downloads": 0, "likes": 0, "cardData": card},
                **{"tags": card.get("tags", []), "siblings": [{"rfilename": path} for path in branch.files]},
            }
        )

    def refs(self, body: bytes, kind: str, repo_id: str) -> None:
        if (repository := self._repository(kind, repo_id)) is None:
            return
        branches = [
            {"name": name, "ref": f"refs/heads/{name}", "targetCommit": branch.sha}
            for name, branch in repository.branches.items()
        ]
        self._answer({"branches": branches, "tags": [], "converts": []})

    def tree(self, body: bytes, kind: str, repo_id: str, revision: str, folder: str | None = None) -> None:
        if (found := self._branch(kind, repo_id, revision)) is None:
            return
        prefix = f"{folder.strip('/')}/" if folder and folder.strip("/") else ""
        recursive = self._query.get("recursive", ["false"])[0].lower() in ("true", "1")
        entries: dict[str, dict[str, Any]] = {}
        for path, file in found[1].files.items():
            name = path.removeprefix(prefix)
            if path.startswith(prefix) and "/" in name and not recursive:
                path = prefix + name.split("/")[0]
                entries[path] = {"type": "directory", "path": path, "oid": _commit_id(path), "size": 0}
            elif path.startswith(prefix):
                entries[path] = file.listed(path)
        if prefix and not entries:
            return self._error(404, "EntryNotFound")
        self._answer(list(entries.values()))

    def paths_info(self, body: bytes, kind: str, repo_id: str, revision: str) -> None:
        if (found := self._branch(kind, repo_id, revision)) is None:
            return
        wanted = json.loads(body) if body[:1] == b"{" else parse_qs(body.decode())
        files = found[1].files
        self._answer([files[path].listed(path) for path in wanted["paths"] if path in files])

    # -------------------------------------------------------------------------------------------------------- pushes

    def preupload(self, body: bytes, kind: str, repo_id: str, revision: str) -> None:
        if self._repository(kind, repo_id, write=True) is None or not (found := self._branch(kind, repo_id, revision)):
            return
        files = []
        for file in json.loads(body)["files"]:
            there = found[1].files.get(file["path"])
            mode = "lfs" if _is_large(file["path"], file["size"]) else "regular"
            oid = there.etag if there else None
            files.append({"path": file["path"], "uploadMode": mode, "shouldIgnore": False, "oid": oid})
        self._answer({"files": files})

    def lfs_batch(self, body: bytes, repo_id: str, dataset: str | None) -> None:
        if self._repository("datasets" if dataset else "models", repo_id, write=True) is None:
            return
        objects = []
        for blob in json.loads(body)["objects"]:
            upload = {"actions": {"upload": {"href": f"{self.hub.url}/_lfs/{blob['oid']}"}}}
            objects.append({**blob, **({} if blob["oid"] in self.hub.blobs else upload)})
        self._answer({"transfer": "basic", "objects": objects}, kind="application/vnd.git-lfs+json")

    def lfs_put(self, body: bytes, sha256: str) -> None:
        if hashlib.sha256(body).hexdigest() != sha256:
            return self._error(400, "BadOid")
        self.hub.blobs[sha256] = body
        self._answer({})

    def commit(self, body: bytes, kind: str, repo_id: str, revision: str) -> None:
        if self._repository(kind, repo_id, write=True) is None or not (found := self._branch(kind, repo_id, revision)):
            return
        branch = found[1]
        files, title = dict(branch.files), ""
        for line in body.splitlines():
            operation = json.loads(line)
            value = operation["value"]
            if operation["key"] == "header":
                title = value["summary"]
            elif operation["key"] == "file":
                files[value["path"]] = File(base64.b64decode(value["content"]), large=False)
            elif operation["key"] == "lfsFile":
                if value["oid"] not in self.hub.blobs:
                    return self._error(400, "LfsObjectMissing")
                files[value["path"]] = File(self.hub.blobs[value["oid"]], large=True)
            else:
                return self._error(400, "UnknownOperation")
        branch.files, branch.sha = files, _commit_id(f"{branch.sha} {title} {time.time_ns()}")
        branch.commits.append(title)
        url = f"{self.hub.url}/{PATHS_OF[kind]}{repo_id}/commit/{branch.sha}"
        self._answer({"success": True, "commitOid": branch.sha, "commitUrl": url})

    # ----------------------------------------------------------------------------------------------------- downloads

    def resolve(self, body: bytes, repo_id: str, revision: str, path: str, dataset: str | None) -> None:
        found = self._branch("datasets" if dataset else "models", repo_id, revision)
        if found is None:
            return
        branch = found[1]
        if (file := branch.files.get(path)) is None:
            return self._error(404, "EntryNotFound", headers={"X-Repo-Commit": branch.sha})
        headers = {"X-Repo-Commit": branch.sha, "ETag": f'"{file.etag}"', "Accept-Ranges": "bytes"}
        if file.large:
            headers |= {"X-Linked-Etag": f'"{file.etag}"', "X-Linked-Size": str(len(file.data))}
        data, status = file.data, 200
        if asked := re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", "")):
            begin, end = int(asked[1]), int(asked[2] or len(data) - 1)
            headers["Content-Range"] = f"bytes {begin}-{end}/{len(data)}"
            data, status = data[begin : end + 1], 206
        self._answer(data, status, "application/octet-stream", headers)

    # --------------------------------------------------------------------------------------------------- what is asked

    def _body(self) -> bytes:
        if self.headers.get("Transfer-Encoding", "").lower() != "chunked":
            return self.rfile.read(int(self.headers.get("Content-Length") or 0))
        chunks = []
        while size := int(self.rfile.readline().split(b";")[0], 16):
            chunks.append(self.rfile.read(size))
            self.rfile.readline()
        self.rfile.readline()
        return b"".join(chunks)

    @property
    def _query(self) -> dict[str, list[str]]:
        return parse_qs(urlsplit(self.path).query)

    @property
    def _user(self) -> tuple[str, str] | None:
        return self.hub.tokens.get(self.headers.get("Authorization", "").removeprefix("Bearer "))

    def _fault(self, path: str) -> int | None:
        for fault in self.hub.faults:
            if fault.method == self.command and re.fullmatch(fault.pattern, path) and fault.times:
                if fault.after:
                    fault.after -= 1
                    continue
                fault.times -= 1
                return fault.status
        return None

    def _repository(self, kind: str, repo_id: str, write: bool = False) -> Repository | None:
        """The repository, if the asker may see it; otherwise the error is answered."""
        repository, owner = self.hub.repositories.get((kind, repo_id)), repo_id.split("/")[0]
        is_owner = self._user is not None and self._user[0] == owner
        if repository is None or (repository.private and not is_owner):
            return self._error(404 if self._user else 401, "RepoNotFound")
        if write and self._user != (owner, "write"):
            return self._error(403, "Forbidden", "You may not write here")
        return repository

    def _branch(self, kind: str, repo_id: str, revision: str) -> tuple[Repository, Branch] | None:
        if (repository := self._repository(kind, repo_id)) is None:
            return None
        branch = repository.branch(revision)
        return self._error(404, "RevisionNotFound") if branch is None else (repository, branch)

    # ----------------------------------------------------------------------------------------------- what is answered

    def _answer(
        self, content: Any, status: int = 200, kind: str = "application/json", headers: dict[str, str] | None = None
    ) -> None:
        data = content if isinstance(content, bytes) else json.dumps(content).encode()
        self.send_response(status)
        for name, value in {"Content-Type": kind, "Content-Length": str(len(data)), **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def _error(self, status: int, code: str, message: str = "", headers: dict[str, str] | None = None) -> None:
        errors = {"X-Error-Code": code, "X-Error-Message": message or code, **(headers or {})}
        self._answer({"error": message or code}, status, headers=errors)


REPO = r"(?P<repo_id>[^/]+/[^/]+?)"
API = rf"/api/(?P<kind>models|datasets)/{REPO}"
ROUTES: list[tuple[tuple[str, ...], str, Callable[..., None]]] = [
    (("GET",), "/api/whoami-v2", _Handler.whoami),
    (("POST",), "/api/validate-yaml", _Handler.validate_yaml),
    (("POST",), "/api/repos/create", _Handler.create),
    (("POST",), rf"{API}/branch/(?P<revision>[^/]+)", _Handler.create_branch),
    (("POST",), rf"{API}/preupload/(?P<revision>[^/]+)", _Handler.preupload),
    (("POST",), rf"/(?P<dataset>datasets/)?{REPO}\.git/info/lfs/objects/batch", _Handler.lfs_batch),
    (("PUT",), "/_lfs/(?P<sha256>[0-9a-f]{64})", _Handler.lfs_put),
    (("POST",), rf"{API}/commit/(?P<revision>[^/]+)", _Handler.commit),
    (("POST",), rf"{API}/paths-info/(?P<revision>[^/]+)", _Handler.paths_info),
    (("GET",), rf"{API}/refs", _Handler.refs),
    (("GET",), rf"{API}/tree/(?P<revision>[^/]+)(?:/(?P<folder>.*))?", _Handler.tree),
    (("GET",), rf"{API}(?:/revision/(?P<revision>[^/]+))?", _Handler.info),
    (("GET", "HEAD"), rf"/(?P<dataset>datasets/)?{REPO}/resolve/(?P<revision>[^/]+)/(?P<path>.+)", _Handler.resolve),
]


def _is_large(path: str, size: int) -> bool:
    return path.endswith(LARGE) or size > REGULAR_BYTES


def _commit_id(seed: str) -> str:
    return hashlib.sha1(seed.encode()).hexdigest()


def _front_matter(card: str) -> dict[str, Any]:
    return (yaml.safe_load(card.split("---")[1]) or {}) if card.startswith("---") else {}
