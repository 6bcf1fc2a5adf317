"""A page of metrics, and the server that shows it to scrapers."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from slurm_forge.errors import ConfigError
from slurm_forge.report.metrics.exposition import Refreshed, exposition, wants_openmetrics
from slurm_forge.report.metrics.run_figures import RunFigures

#: The longest that a slow scraper may occupy a thread.
_TIMEOUT_S = 10.0
_OPENMETRICS = "application/openmetrics-text"


class MetricsPage:
    """What was read of all runs; each format of it is made once."""

    def __init__(self, figures: Sequence[RunFigures], refreshed: Refreshed) -> None:
        self._figures = figures
        self._refreshed = refreshed
        self._lock = threading.Lock()
        self._made: dict[bool, tuple[str, bytes]] = {}

    def text(self) -> bytes:
        """In the text format of Prometheus."""
        return self.answer("")[1]

    def answer(self, accept: str) -> tuple[str, bytes]:
        """The content type and the text for a scraper that accepts ``accept``."""
        key = wants_openmetrics(accept)
        with self._lock:
            if key not in self._made:
                kind = _OPENMETRICS if key else ""
                self._made[key] = exposition(self._figures, self._refreshed, kind)
            return self._made[key]

    def prepare(self) -> None:
        """Make every format, so that no scrape waits for it."""
        for accept in ("", _OPENMETRICS):
            self.answer(accept)


class MetricsServer:
    """Answers GET /metrics with the newest page."""

    def __init__(self, host: str, port: int, page: MetricsPage) -> None:
        server = self
        page.prepare()
        self._page = page

        class Handler(BaseHTTPRequestHandler):
            timeout = _TIMEOUT_S

            def do_GET(self) -> None:
                server._answer(self)

            def log_message(self, format: str, *args: object) -> None:  # noqa: A002
                """A line for each scrape would be noise."""

        self._http = ThreadingHTTPServer((host, port), Handler)
        self._http.daemon_threads = True
        self._thread = threading.Thread(target=self._http.serve_forever, daemon=True)

    @property
    def address(self) -> str:
        """HOST:PORT; the actual port if 0 was requested."""
        host, port = self._http.server_address[:2]
        return f"{host!s}:{port}"

    def start(self) -> None:
        """Answer from now on."""
        self._thread.start()

    def show(self, page: MetricsPage) -> None:
        """Answer with another page from now on."""
        page.prepare()
        self._page = page

    def close(self) -> None:
        """Stop answering."""
        self._http.shutdown()
        self._http.server_close()

    def _answer(self, request: BaseHTTPRequestHandler) -> None:
        if request.path.partition("?")[0] != "/metrics":
            request.send_error(404, explain="The metrics are at /metrics.")
            return
        kind, body = self._page.answer(request.headers.get("Accept", ""))
        with contextlib.suppress(OSError):  # a scraper that has gone
            request.send_response(200)
            request.send_header("Content-Type", kind)
            request.send_header("Content-Length", str(len(body)))
            request.end_headers()
            request.wfile.write(body)


@contextlib.contextmanager
def serving(listen: str, page: MetricsPage) -> Iterator[MetricsServer]:
    """A server at HOST:PORT; ``ConfigError`` where there can't be one."""
    host, _, port = listen.rpartition(":")
    if not host or not port.isdecimal() or int(port) > 65535:
        raise ConfigError(
            f"--listen: {listen!r} is not HOST:PORT", next_step="Write it like 127.0.0.1:9877."
        )
    try:
        server = MetricsServer(host, int(port), page)
    except OSError as error:
        raise ConfigError(
            f"--listen: {listen} can't be used: {error.strerror or error}",
            next_step="Choose another port, or an address of this host.",
        ) from error
    server.start()
    try:
        yield server
    finally:
        server.close()
