"""A trace for receivers of OpenTelemetry, whose SDK is imported here and nowhere else."""

from __future__ import annotations

from collections.abc import Iterator
from urllib.parse import urlsplit

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import Event, ReadableSpan
from opentelemetry.sdk.trace.export import SpanExportResult
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import SpanContext, Status, StatusCode, TraceFlags

from slurm_forge.errors import ConfigError
from slurm_forge.format_version import PACKAGE_VERSION
from slurm_forge.report.metrics.trace_spans import RunTrace, TraceSpan

#: Receivers refuse messages that are much larger.
_AT_ONCE = 512
_PATH = "/v1/traces"


def send_trace(trace: RunTrace, endpoint: str | None) -> bool:
    """Send the spans of a trace over OTLP and HTTP; whether the receiver took all of them.

    Args:
        trace: The trace.
        endpoint: The receiver's URL, with or without the path ``/v1/traces``; None is what the
            variables of OpenTelemetry say, else ``http://localhost:4318``.
    """
    exporter = OTLPSpanExporter(endpoint=None if endpoint is None else with_path(endpoint))
    spans = list(_readable(trace))
    try:
        return all(
            exporter.export(spans[first : first + _AT_ONCE]) is SpanExportResult.SUCCESS
            for first in range(0, len(spans), _AT_ONCE)
        )
    finally:
        exporter.shutdown()


def with_path(endpoint: str) -> str:
    """The URL that traces are sent to; ``ConfigError`` where nothing can be sent over HTTP."""
    try:
        parts = urlsplit(endpoint)
        takes_http = parts.scheme in ("http", "https") and bool(parts.hostname)
        takes_http = takes_http and parts.port != 0
    except ValueError:  # brackets without an address, a port that is no number
        takes_http = False
    if not takes_http:
        raise ConfigError(
            f"--otlp: {_without_password(endpoint)!r} is not a URL with http:// or https://",
            next_step="For example --otlp http://localhost:4318.",
        )
    return endpoint if parts.path.strip("/") else endpoint.rstrip("/") + _PATH


def _without_password(url: str) -> str:
    """The URL without the credentials before its host."""
    before, found, host = url.rpartition("@")
    return f"{before.partition('//')[0]}//***@{host}" if found else url


def _readable(trace: RunTrace) -> Iterator[ReadableSpan]:
    resource = Resource({"service.name": "slurm_forge", "service.version": PACKAGE_VERSION})
    scope = InstrumentationScope("slurm_forge", PACKAGE_VERSION)
    for span in trace.spans:
        yield ReadableSpan(
            name=span.name,
            context=_context(trace, span.id),
            parent=None if span.parent is None else _context(trace, span.parent),
            resource=resource,
            attributes=dict(span.attributes),
            events=[
                Event(each.name, dict(each.attributes), timestamp=_ns(each.time))
                for each in span.events
            ],
            status=_status(span),
            start_time=_ns(span.start),
            end_time=_ns(span.end),
            instrumentation_scope=scope,
        )


def _context(trace: RunTrace, span: int) -> SpanContext:
    return SpanContext(trace.id, span, is_remote=False, trace_flags=TraceFlags(TraceFlags.SAMPLED))


def _status(span: TraceSpan) -> Status:
    return Status(StatusCode.ERROR, span.failed) if span.failed else Status(StatusCode.UNSET)


def _ns(seconds: float) -> int:
    return max(0, round(seconds * 1e9))
