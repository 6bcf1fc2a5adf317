"""``trace``: the timeline of a run, for an OpenTelemetry receiver."""

from __future__ import annotations

from typing import Annotated

import typer

from slurm_forge.cli.options import RunName, Runs


def trace(
    run: RunName,
    otlp: Annotated[
        str | None,
        typer.Option(
            "--otlp",
            metavar="URL",
            help="Receiver for OTLP over HTTP (default: OTEL_EXPORTER_OTLP_ENDPOINT, "
            "http://localhost:4318).",
        ),
    ] = None,
    runs: Runs = None,
) -> None:
    """Send the timeline of a run as a trace to Jaeger, Tempo or any other OTLP receiver.

    The run is a span, with child spans for its attempts and for how each moment was spent;
    incidents and checkpoints are events.  Sending a run again sends the same ids.

    \b
    Examples:
      slurm-forge trace tiny-gpt --otlp http://localhost:4318
    """
    import time
    from importlib.util import find_spec

    from slurm_forge.cli.observe.run_reading import gather
    from slurm_forge.cli.run_choice import find_run
    from slurm_forge.errors import ConfigError
    from slurm_forge.report.explain.explain import explain

    if find_spec("opentelemetry") is None or find_spec("opentelemetry.exporter") is None:
        raise ConfigError(
            "trace: the OpenTelemetry SDK is not installed",
            next_step="pip install 'slurm_forge[otel]'",
        )
    from slurm_forge.report.metrics.otlp import send_trace
    from slurm_forge.report.metrics.trace_spans import run_trace

    story = explain(gather(find_run(run, runs), logs=False, whole=True))
    spans = run_trace(story, now=time.time())
    if not spans.spans:
        typer.echo(f"{story.run} has not started: there is nothing to send")
        return
    if not send_trace(spans, otlp):
        raise ConfigError(
            f"the receiver did not accept the trace of {story.run}",
            next_step="Check its URL (--otlp) and that this host reaches it; headers are in "
            "OTEL_EXPORTER_OTLP_HEADERS.",
        )
    typer.echo(f"trace {spans.id:032x}: {len(spans.spans)} spans sent")
