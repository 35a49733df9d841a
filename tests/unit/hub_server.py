"""A loopback stand-in for the data-set side of a Hub: one commit, files with range requests."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from urllib.parse import parse_qs, unquote, urlsplit

COMMIT = "c0ffee" + "0" * 34


@contextmanager
def serve(root: Path) -> Iterator[tuple[str, list[str]]]:
    """Serve ``root/OWNER/NAME/**`` as data sets at `COMMIT`; yields the endpoint and a log of requests."""
    log: list[str] = []
    handler = type("Handler", (_Handler,), {"root": root, "log": log})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", log
    finally:
        server.shutdown()
        server.server_close()


class _Handler(BaseHTTPRequestHandler):
    root: Path
    log: list[str]

    def do_GET(self) -> None:
        self._answer()

    def do_HEAD(self) -> None:
        self._answer()

    def do_POST(self) -> None:
        self._answer()

    def log_message(self, *_: object) -> None:
        pass

    def _answer(self) -> None:
        body = self.rfile.read(int(self.headers.get("content-length") or 0))
        url = urlsplit(self.path)
        self.log.append(f"{self.command} {url.path}")
        parts = unquote(url.path).strip("/").split("/")
        if parts[:2] == ["api", "datasets"] and len(parts) >= 6 and parts[5] == COMMIT:
            repository, verb, inside = self.root / parts[2] / parts[3], parts[4], "/".join(parts[6:])
            files = sorted(file for file in repository.rglob("*") if file.is_file())
            names = [str(file.relative_to(repository)) for file in files]
            if verb == "revision":
                self._json(
                    {"id": f"{parts[2]}/{parts[3]}", "sha": COMMIT, "siblings": [{"rfilename": n} for n in names]}
                )
            elif verb == "tree":
                self._json(_tree(repository, inside, recursive="recursive=True" in url.query))
            elif verb == "paths-info":
                fields = json.loads(body) if body.startswith(b"{") else parse_qs(body.decode())
                self._json([_entry(repository, n) for n in fields["paths"] if (repository / n).exists()])
            else:
                self._missing()
        elif parts[0] == "datasets" and parts[3:5] == ["resolve", COMMIT]:
            self._file(self.root / parts[1] / parts[2] / "/".join(parts[5:]))
        else:
            self._missing()

    def _json(self, value: object) -> None:
        self._send(200, json.dumps(value).encode(), {"Content-Type": "application/json"})

    def _missing(self) -> None:
        self._send(404, b"", {"X-Error-Code": "EntryNotFound"})

    def _file(self, path: Path) -> None:
        if not path.is_file():
            self._missing()
            return
        data = path.read_bytes()
        headers = {"ETag": f'"{len(data)}"', "X-Repo-Commit": COMMIT, "Accept-Ranges": "bytes"}
        wanted = self.headers.get("range", "")
        if not wanted.startswith("bytes="):
            self._send(200, data, headers)
            return
        first, _, last = wanted.removeprefix("bytes=").partition("-")
        start, end = int(first), min(int(last or len(data)), len(data) - 1)
        headers["Content-Range"] = f"bytes {start}-{end}/{len(data)}"
        self._send(206, data[start : end + 1], headers)

    def _send(self, status: int, data: bytes, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(data))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)


def _tree(repository: Path, folder: str, recursive: bool) -> list[dict[str, object]]:
    paths = (repository / folder).rglob("*") if recursive else (repository / folder).glob("*")
    return [_entry(repository, str(path.relative_to(repository))) for path in sorted(paths)]


def _entry(repository: Path, name: str) -> dict[str, object]:
    path = repository / name
    if path.is_dir():
        return {"type": "directory", "path": name, "oid": "0" * 40}
    return {"type": "file", "path": name, "size": path.stat().st_size, "oid": "0" * 40}
