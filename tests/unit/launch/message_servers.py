"""Servers on the loopback that messages are sent to: mail, a webhook, and ones that misbehave."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from email import message_from_bytes
from email.message import Message
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from aiosmtpd.controller import Controller
from aiosmtpd.smtp import AuthResult

#: In every URL below: it must be found nowhere.
PASSWORD = "s3cr3t-pa55word"


@dataclass
class Received:
    """What a server got, and where it is."""

    url: str = ""
    mails: list[Message] = field(default_factory=list)
    refused: int = 0
    posts: list[dict[str, Any]] = field(default_factory=list)


@contextlib.contextmanager
def webhook(status: int = 200) -> Iterator[Received]:
    """An HTTP server that answers every POST with ``status``."""
    received = Received()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            received.posts.append(json.loads(body))
            self.send_response(status)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        received.url = f"json://user:{PASSWORD}@127.0.0.1:{server.server_address[1]}/{PASSWORD}"
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield received
        finally:
            server.shutdown()
            thread.join()


@contextlib.contextmanager
def mail_server(password: str = PASSWORD) -> Iterator[Received]:
    """An SMTP server that wants ``password``; the URL has PASSWORD."""
    received = Received()

    class Handler:
        async def handle_DATA(self, server: object, session: object, envelope: Any) -> str:
            received.mails.append(message_from_bytes(envelope.content))
            return "250 OK"

    def check(_server: object, _session: object, _envelope: object, _way: str, data: Any) -> Any:
        known = data.password == password.encode()
        received.refused += not known
        return AuthResult(success=known, handled=False)

    controller = Controller(
        Handler(), hostname="127.0.0.1", port=free_port(), authenticator=check,
        auth_require_tls=False,
    )  # fmt: skip
    controller.start()
    received.url = (
        f"mailto://user:{PASSWORD}@example.org:{controller.port}?smtp=127.0.0.1"
        "&from=run@example.org&to=me@example.org&mode=insecure"
    )
    try:
        yield received
    finally:
        controller.stop()


@contextlib.contextmanager
def hanging() -> Iterator[str]:
    """The URL of a server that takes connections and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"json://user:{PASSWORD}@127.0.0.1:{server.getsockname()[1]}/?rto=600&cto=600"


def refusing() -> str:
    """The URL of a port that nobody listens on."""
    return f"json://user:{PASSWORD}@127.0.0.1:{free_port()}/"


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])
