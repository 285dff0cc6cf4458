"""A page served to browsers on this machine, until Ctrl-C. Python answers what the page asks.

Other users of the machine, and pages of other sites, cannot ask: the address has a secret part, and the names of host
and origin are checked, so that neither a guess nor a name that resolves to this machine reaches an answer.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
import os
import re
import secrets
import sys
import webbrowser
from collections.abc import Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import TextIO

from halfstep.cli.command_line import UsageError
from halfstep.cli.pages.answers import answer
from halfstep.cli.pages.html import html
from halfstep.cli.terminal import say

_HOSTS = {"127.0.0.1", "localhost"}  # with any port: `ssh -L` may have another one at its other end
_LARGEST = 1 << 16  # bytes of a request


def _policy(page: str) -> str:
    """The Content-Security-Policy of a page: its own script and style, and requests to its own server."""

    def hashed(pattern: str) -> str:
        text = re.findall(pattern, page, flags=re.DOTALL)[0]
        return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"

    script, style = hashed('<script type="module">(.*?)</script>'), hashed("<style>(.*?)</style>")
    rules = (f"script-src {script}", f"style-src {style}", "connect-src 'self'", "img-src data:", "base-uri 'none'")
    return "; ".join(("default-src 'none'", *rules, "form-action 'none'", "frame-ancestors 'none'"))


def server(page: str, state: Mapping[str, str] | None, port: int = 0) -> tuple[ThreadingHTTPServer, str]:
    """A server on 127.0.0.1 and the address of the page. Port 0 is any that is free."""
    token, content = secrets.token_urlsafe(16), html(page, "local", state)
    headers = {
        "Content-Security-Policy": _policy(content),
        "X-Content-Type-Options": "nosniff",
        "Referrer-Policy": "no-referrer",
        "Cache-Control": "no-store",
        "Cross-Origin-Resource-Policy": "same-origin",
    }

    class Handler(BaseHTTPRequestHandler):
        timeout = 30  # seconds for a request to arrive

        def log_message(self, *_: object) -> None: ...

        def _send(self, status: int, mime: str, content: bytes) -> None:
            self.send_response(status)
            about = {"Content-Type": f"{mime}; charset=utf-8", "Content-Length": str(len(content))}
            for name, value in {**headers, **about}.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(content)

        def _asked(self) -> str | None:
            """What is asked for; None, after a refusal, if host, origin or token are others."""
            host, origin = self.headers.get("Host", ""), self.headers.get("Origin")
            path_token, _, name = self.path[1:].partition("/")
            allowed = host.rpartition(":")[0] in _HOSTS and origin in (None, f"http://{host}")
            if allowed and hmac.compare_digest(path_token.encode(), token.encode()):
                return name
            self._send(403, "text/plain", b"refused: open the address that halfstep printed")
            return None

        def do_GET(self) -> None:
            name = self._asked()
            if name == f"{page}.html":
                self._send(200, "text/html", content.encode())
            elif name is not None:
                self._send(404, "text/plain", b"no such page")

        def do_POST(self) -> None:
            name, length = self._asked(), self.headers.get("Content-Length", "")
            if name is None:
                return
            is_json = self.headers.get_content_type() == "application/json"  # which no form of another site can send
            if name != "answer" or not is_json or not re.fullmatch("[0-9]{1,6}", length) or int(length) > _LARGEST:
                self._send(400, "text/plain", b"expected JSON for answer")
                return
            try:
                reply = answer(json.loads(self.rfile.read(int(length))))
            except (ValueError, RecursionError):
                reply = {"refused": "expected a page, its state and a move as JSON"}
            self._send(400 if "refused" in reply else 200, "application/json", json.dumps(reply).encode())

    listener = ThreadingHTTPServer(("127.0.0.1", port), Handler)
    listener.daemon_threads = True
    return listener, f"http://127.0.0.1:{listener.server_address[1]}/{token}/{page}.html"


def serve(
    page: str, state: Mapping[str, str] | None, port: int = 0, opens: bool = True, stream: TextIO | None = None
) -> int:
    """Serve a page until Ctrl-C, and open it in the browser if `opens` and there is one. Returns the exit status."""
    try:
        listener, address = server(page, state, port)
    except OSError as error:
        raise UsageError(
            f"--port {port} cannot be used: {error.strerror}; pass another one, or leave it out"
        ) from error
    with listener:
        try:
            opened = opens and _has_screen() and webbrowser.open(address)
            say(f"{'opened in the browser' if opened else 'open in a browser'}: {address}", stream)
            remote = os.environ.get("SSH_CONNECTION", "").split()
            if len(remote) == 4 and not opened:
                port = listener.server_address[1]
                say(f"from your own machine, first: ssh -N -L {port}:127.0.0.1:{port} {remote[2]}", stream)
            say("stop with Ctrl-C", stream)
            listener.serve_forever()
        except KeyboardInterrupt:
            say("stopped", stream)
    return 0


def write(path: Path, page: str, state: Mapping[str, str] | None) -> str:
    """Write a page with one answer. Returns what happened, with the address of the page."""
    path.write_text(html(page, "file", state), encoding="utf-8")
    return f"wrote {path}: open {path.resolve().as_uri()} in a browser"


def _has_screen() -> bool:
    """Whether a browser could show a page: without a screen, Linux would start one in the terminal, without scripts."""
    if not sys.platform.startswith("linux"):
        return True
    return any(os.environ.get(name) for name in ("DISPLAY", "WAYLAND_DISPLAY", "BROWSER"))
