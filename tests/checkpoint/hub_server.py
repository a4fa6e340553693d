"""A stand-in for the Hugging Face hub: the part of its HTTP API by which models are listed and downloaded."""

from __future__ import annotations

import hashlib
import json
import re
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlparse

COMMIT = "89abcdef0123456789abcdef0123456789abcdef"
# Files that the hub stores by their SHA-256 and serves from another place.
LARGE = (".gguf", ".safetensors")


class Repository:
    """A model: its files to their bytes, the token it asks for, and what is to go wrong.

    Attributes:
        token: what a private one asks for. gated: its files are refused to everybody.
        cut: bytes after which the connection of the next download of a large file is closed. damaged: names of large
            files whose bytes change on the way. sent: ranges of bytes that were asked for.
    """

    def __init__(self, files, *, token=None, gated=False, cut=None, damaged=()):
        self.files, self.token, self.gated, self.cut, self.damaged = dict(files), token, gated, cut, set(damaged)
        self.sent = []


@contextmanager
def serving(repositories):
    """The address of a hub that has these repositories, by ORG/NAME."""

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *_):
            pass

        def do_HEAD(self):
            self.answer(with_body=False)

        def do_GET(self):
            self.answer(with_body=True)

        def answer(self, with_body):
            path = unquote(urlparse(self.path).path)
            if matched := re.fullmatch(r"/cdn/([\w.-]+/[\w.-]+)/(.+)", path):
                return self.large(repositories[matched[1]], matched[2], with_body)
            if matched := re.fullmatch(r"/api/models/([\w.-]+/[\w.-]+)(?:/(revision|tree)/([^/]+).*)?", path):
                return self.listing(matched[1], matched[2], matched[3] or "main")
            if matched := re.fullmatch(r"/([\w.-]+/[\w.-]+)/resolve/([^/]+)/(.+)", path):
                return self.file(matched[1], matched[2], matched[3], with_body)
            return self.reply(404, {})

        def found(self, name, revision):
            """The repository, or None where the refusal has been sent."""
            repository = repositories.get(name)
            asked = self.headers.get("Authorization")
            if repository is None or (repository.token and asked != f"Bearer {repository.token}"):
                self.reply(401, {"X-Error-Code": "RepoNotFound", "X-Error-Message": "Repository not found"})
            elif revision not in ("main", COMMIT):
                self.reply(404, {"X-Error-Code": "RevisionNotFound"})
            else:
                return repository
            return None

        def listing(self, name, kind, revision):
            repository = self.found(name, revision)
            if repository is None:
                return
            entries = []
            for path, raw in repository.files.items():
                lfs = {"lfs": {"oid": sha256(raw), "size": len(raw), "pointerSize": 134}} if large(path) else {}
                entries.append({"type": "file", "path": path, "size": len(raw), "oid": blob(raw)} | lfs)
            if kind != "tree":
                siblings = []
                for entry in entries:
                    lfs = {"lfs": {"sha256": entry["lfs"]["oid"], **entry["lfs"]}} if "lfs" in entry else {}
                    siblings.append({"rfilename": entry["path"], "size": entry["size"], "blobId": entry["oid"]} | lfs)
                entries = {"id": name, "sha": COMMIT, "siblings": siblings, "tags": [], "private": False}
            self.reply(200, {"Content-Type": "application/json"}, json.dumps(entries).encode())

        def file(self, name, revision, path, with_body):
            repository = self.found(name, revision)
            if repository is None:
                return
            if repository.gated:
                self.reply(403, {"X-Error-Code": "GatedRepo", "X-Error-Message": "Access is restricted"})
            elif path not in repository.files:
                self.reply(404, {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": COMMIT})
            elif large(path):
                raw = repository.files[path]
                facts = {"X-Linked-Etag": f'"{sha256(raw)}"', "X-Linked-Size": str(len(raw))}
                self.reply(302, facts | {"X-Repo-Commit": COMMIT, "Location": f"http://{elsewhere}/cdn/{name}/{path}"})
            else:
                raw = repository.files[path]
                facts = {"ETag": f'"{blob(raw)}"', "X-Repo-Commit": COMMIT, "Content-Length": str(len(raw))}
                self.reply(200, facts, raw if with_body else b"")

        def large(self, repository, path, with_body):
            raw = repository.files[path]
            if path in repository.damaged:
                raw = raw[:-1] + bytes([raw[-1] ^ 1])
            begin = re.fullmatch(r"bytes=(\d+)-", self.headers.get("Range", "bytes=0-"))
            start = int(begin[1])
            repository.sent.append((path, start))
            body = raw[start:]
            facts = {"Content-Length": str(len(body)), "ETag": f'"{sha256(raw)}"'}
            if start:
                facts["Content-Range"] = f"bytes {start}-{len(raw) - 1}/{len(raw)}"
            if repository.cut is not None and with_body:
                body, repository.cut = body[: repository.cut], None
                self.close_connection = True
            self.reply(206 if start else 200, facts, body if with_body else b"")

        def reply(self, code, headers, body=b""):
            self.send_response(code)
            for key, value in ({"Content-Length": str(len(body))} | headers).items():
                self.send_header(key, value)
            self.end_headers()
            self.wfile.write(body)

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    # By another name: a redirection to the same host would be taken for one within the hub.
    elsewhere = f"localhost:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()


def large(path):
    return path.endswith(LARGE)


def sha256(raw):
    return hashlib.sha256(raw).hexdigest()


def blob(raw):
    """Git's own hash of a file."""
    return hashlib.sha1(b"blob %d\0" % len(raw) + raw).hexdigest()
