"""A web server for one folder on this machine, with the headers that give the page's WebAssembly its threads.

    with PageServer(Path("page"), port=8000) as server:
        print(server.address)                  # http://127.0.0.1:8000/
        server.serve_forever()
"""

from functools import partial
from http import HTTPStatus
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

HEADERS = {
    "Cross-Origin-Opener-Policy": "same-origin",  # both: SharedArrayBuffer, which threads need
    "Cross-Origin-Embedder-Policy": "require-corp",
    "Cross-Origin-Resource-Policy": "same-origin",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}


class PageHandler(SimpleHTTPRequestHandler):
    """Files of the folder: no listings, no links that lead out of it."""

    extensions_map = {  # noqa: RUF012
        "": "application/octet-stream", ".html": "text/html; charset=utf-8", ".css": "text/css; charset=utf-8",
        ".js": "text/javascript; charset=utf-8", ".mjs": "text/javascript; charset=utf-8", ".json": "application/json",
        ".wasm": "application/wasm", ".svg": "image/svg+xml", ".jpg": "image/jpeg", ".png": "image/png",
        ".txt": "text/plain; charset=utf-8",
    }  # fmt: skip

    def send_head(self) -> Any:
        root = Path(self.directory).resolve()
        path = Path(self.translate_path(self.path))
        path = path / "index.html" if path.is_dir() else path
        if not path.is_file() or not path.resolve().is_relative_to(root):
            self.send_error(HTTPStatus.NOT_FOUND, "There is no such file in this folder")
            return None
        return super().send_head()

    def end_headers(self) -> None:
        for name, value in HEADERS.items():
            self.send_header(name, value)
        super().end_headers()

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing: the terminal belongs to the command."""


class PageServer(ThreadingHTTPServer):
    def __init__(self, folder: Path, host: str = "127.0.0.1", port: int = 0) -> None:
        if not (folder / "index.html").is_file():
            raise ValueError(f"{folder} has no index.html, so it is no page; write it: msvit export --web {folder}")
        try:
            super().__init__((host, port), partial(PageHandler, directory=str(folder)))
        except OSError as error:
            raise OSError(
                f"no page can be served at {host}:{port} ({error.strerror}); choose another --port, or 0 for any"
            ) from None

    @property
    def address(self) -> str:
        host, port = self.server_address[:2]
        return f"http://{host!s}:{port}/"
