"""``slurm-forge trace``: spans that a receiver of OTLP on the loopback decodes."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span
from typer.testing import CliRunner, Result

from slurm_forge.cli.main import application
from slurm_forge.cli.observe.run_reading import gather
from slurm_forge.report.explain.explain import explain
from slurm_forge.report.metrics.otlp import with_path
from slurm_forge.report.metrics.trace_spans import run_trace
from slurm_forge.vocabulary.cause import Cause
from slurm_forge.vocabulary.decision import Action
from tests.unit.report.journals import Scribe


@contextlib.contextmanager
def receiver(status: int = 200) -> Iterator[tuple[str, list[Span]]]:
    """A receiver of OTLP over HTTP, and the spans that it got."""
    spans: list[Span] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            assert self.path == "/v1/traces"
            assert self.headers["Content-Type"] == "application/x-protobuf"
            for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
                for scope in resource.scope_spans:
                    spans.extend(scope.spans)
            self.send_response(status)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}", spans
        finally:
            server.shutdown()
            thread.join()


@pytest.fixture
def scribe(tmp_path: Path) -> Scribe:
    scribe = Scribe(tmp_path)
    scribe.submitted()
    scribe.later(60).begin("n01", "n02")
    scribe.resume(0)
    scribe.train(1, 20)
    scribe.save(20)
    scribe.preempted(30)
    scribe.later(120).begin("n01", "n02")
    scribe.resume(30)
    scribe.train(31, 40)
    scribe.incident(Cause.APP_ERROR, Action.HOLD, text="KeyError\x1b[31m <b>")
    scribe.held("app_error")
    return scribe


def trace(scribe: Scribe, url: str) -> Result:
    words = ["trace", str(scribe.run.path), "--otlp", url]
    return CliRunner().invoke(application("trace"), words)


def attributes(span: Span) -> dict[str, object]:
    return {
        each.key.removeprefix("slurm_forge."): each.value.string_value or each.value.int_value
        for each in span.attributes
    }


def test_a_receiver_gets_the_timeline_of_the_run(scribe: Scribe) -> None:
    with receiver() as (url, spans):
        sent = trace(scribe, url)
        assert sent.exit_code == 0, sent.output
        (root,) = [span for span in spans if not span.parent_span_id]
        assert root.name == "tiny-gpt" and attributes(root)["state"] == "held"
        assert root.status.code == 2, "a run that is held is an error"
        attempts = [span for span in spans if span.parent_span_id == root.span_id]
        assert [span.name for span in attempts] == ["attempt 1", "attempt 2"]
        first, second = attempts
        assert [event.name for event in first.events] == ["preempted", "checkpoint", "checkpoint"]
        assert [event.name for event in second.events] == ["app_error"]
        evidence = next(x for x in second.events[0].attributes if x.key.endswith("evidence"))
        assert evidence.value.string_value.isprintable()
        uses = [span for span in spans if span.parent_span_id == second.span_id]
        assert {span.name for span in uses} == {"queue", "restart", "unsaved", "idle"}
        assert all(span.start_time_unix_nano < span.end_time_unix_nano for span in uses)
        story = explain(gather(scribe.run))
        seconds = sum(
            (span.end_time_unix_nano - span.start_time_unix_nano) / 1e9
            for span in spans
            if span.name in ("training", "saving", "unsaved")
        )
        assert seconds == pytest.approx(story.kept_s, abs=0.01)
        assert len({span.trace_id for span in spans}) == 1
        assert len({span.span_id for span in spans}) == len(spans)
        before = {span.span_id for span in spans}
        spans.clear()
        trace(scribe, url)
        assert {span.span_id for span in spans} == before, "sent again, it is the same trace"


def test_another_run_is_another_trace(scribe: Scribe, tmp_path: Path) -> None:
    other = Scribe(tmp_path / "other")
    other.begin("n01")
    stories = [explain(gather(each.run)) for each in (scribe, other)]
    first, second = (run_trace(each, now=scribe.now) for each in stories)
    assert first.id != second.id


def test_what_is_not_taken_is_an_error_and_a_run_that_has_not_started_is_not_sent(
    scribe: Scribe, tmp_path: Path
) -> None:
    with receiver(status=400) as (url, _):
        refused = trace(scribe, url)
        assert refused.exit_code == 2 and "did not accept" in refused.output
    new = Scribe(tmp_path / "new")
    with receiver() as (url, spans):
        assert "has not started" in trace(new, url).output and spans == []


def test_the_path_is_added_where_there_is_none() -> None:
    assert with_path("http://h:4318") == with_path("http://h:4318/") == "http://h:4318/v1/traces"
    assert with_path("http://h/in/v1/traces") == "http://h/in/v1/traces"


@pytest.mark.parametrize("url", [
    "localhost:4318", "grpc://localhost:4317", "http:localhost", "h", "http://[x", "http://h:x",
    "http://:4318", "https://h:99999", "",
])  # fmt: skip
def test_a_receiver_that_is_no_url_of_http_is_refused(scribe: Scribe, url: str) -> None:
    refused = trace(scribe, url)
    assert refused.exit_code == 2
    assert "is not a URL with http:// or https://" in refused.output
    assert "--otlp http://localhost:4318" in refused.output


def test_a_password_in_a_url_that_is_refused_is_not_shown(scribe: Scribe) -> None:
    refused = trace(scribe, "ftp://me:s3cret@h")
    assert refused.exit_code == 2
    assert "s3cret" not in refused.output and "***@h" in refused.output
