"""``metrics``: figures of all runs for Prometheus."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from slurm_forge.cli.options import Runs

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from slurm_forge.cli.monitoring.metrics_server import MetricsPage

#: Reading takes at most a tenth of the time.
_SHARE = 9.0
_FOLDER = "report/metrics"


def metrics(
    listen: Annotated[
        str | None,
        typer.Option(
            "--listen", metavar="HOST:PORT", help="Serve /metrics there, such as 127.0.0.1:9877."
        ),
    ] = None,
    textfile: Annotated[
        Path | None,
        typer.Option(
            "--textfile",
            metavar="FILE",
            help="Write FILE.prom for node_exporter's textfile collector.",
        ),
    ] = None,
    every: Annotated[
        str, typer.Option("--every", metavar="TIME", help="Time between readings: 15s, 1m.")
    ] = "15s",
    once: Annotated[
        bool, typer.Option("--once", help="With --textfile: write once and exit, for cron.")
    ] = False,
    limit: Annotated[
        int, typer.Option("--limit", metavar="N", min=1, help="Most runs; the newest are exported.")
    ] = 2000,
    rested_for: Annotated[
        str,
        typer.Option(
            "--rested-for", metavar="TIME", help="Omit runs that ended, or were held, longer ago."
        ),
    ] = "7d",
    runs: Runs = None,
    dashboard: Annotated[
        bool, typer.Option("--dashboard", help="Print a dashboard for Grafana, as JSON.")
    ] = False,
    alert_rules: Annotated[
        bool, typer.Option("--alert-rules", help="Print alert rules for Prometheus.")
    ] = False,
) -> None:
    """Export step, loss, goodput, checkpoints, incidents and state of all runs for Prometheus.

    Without --listen and --textfile the metrics are printed once.  A scrape returns what was read
    last, at most --every ago, and reads no run itself.  Slurm is not queried.

    \b
    Examples:
      slurm-forge metrics
      slurm-forge metrics --listen 127.0.0.1:9877
      slurm-forge metrics --textfile /var/lib/node_exporter/slurm_forge.prom --once
      slurm-forge metrics --alert-rules > slurm_forge.rules.yml
    """
    if dashboard or alert_rules:
        name = "dashboard.json" if dashboard else "alert_rules.yml"
        typer.echo((Path(__file__).parents[2] / _FOLDER / name).read_text(), nl=False)
        return
    _require_prometheus_client()
    from slurm_forge.cli.monitoring.metrics_server import serving
    from slurm_forge.errors import ConfigError
    from slurm_forge.files import write_atomic

    if listen is not None and textfile is not None:
        raise typer.BadParameter("--listen and --textfile are mutually exclusive")
    if textfile is not None and textfile.suffix != ".prom":
        raise ConfigError(
            f"--textfile: {textfile} does not end with .prom",
            next_step="node_exporter reads only *.prom in its --collector.textfile.directory.",
        )
    pause_s = _seconds("--every", every)
    read = _reader(runs, limit, _seconds("--rested-for", rested_for))
    if textfile is not None:
        file = textfile

        def write() -> MetricsPage:
            page = read()
            try:
                # Read by node_exporter, which is another user.
                write_atomic(file, page.text(), mode=0o644)
            except OSError as error:
                raise ConfigError(
                    f"--textfile: {file} can't be written: {error.strerror or error}",
                    next_step="Give a file in a folder of yours that node_exporter reads.",
                ) from error
            return page

        for _ in _rounds(write, pause_s, once=once):
            pass
    elif listen is None:
        typer.echo(read().text().decode(), nl=False)
    else:
        with serving(listen, read()) as server:
            typer.echo(f"http://{server.address}/metrics", err=True)
            for page in _rounds(read, pause_s, first_s=pause_s):
                server.show(page)


def _require_prometheus_client() -> None:
    from importlib.util import find_spec

    from slurm_forge.errors import ConfigError

    if find_spec("prometheus_client") is None:
        raise ConfigError(
            "metrics: prometheus_client is not installed",
            next_step="pip install 'slurm_forge[metrics]'",
        )


def _seconds(option: str, text: str) -> float:
    from slurm_forge.units import parse_duration

    try:
        return max(1.0, parse_duration(text).total_seconds())
    except ValueError as error:
        raise typer.BadParameter(f"{option}: {error}") from None


def _reader(runs: Path | None, limit: int, rested_for_s: float) -> Callable[[], MetricsPage]:
    from slurm_forge.cli.monitoring.metrics_runs import MetricsRuns
    from slurm_forge.cli.monitoring.metrics_server import MetricsPage
    from slurm_forge.cli.run_choice import run_names, runs_folder
    from slurm_forge.errors import RunDirectoryError
    from slurm_forge.run_directory import RunDirectory

    folder = runs_folder(runs).absolute()
    figures = MetricsRuns(limit=limit, rested_for_s=rested_for_s)

    def read() -> MetricsPage:
        if not folder.is_dir():
            raise RunDirectoryError(
                f"there is no folder {folder}: nothing would be exported",
                next_step="Give the folder of runs: --runs DIR or SLURM_FORGE_RUNS.",
            )
        found = [RunDirectory.at(folder / name) for name in run_names(folder)]
        return MetricsPage(*figures.refresh(found))

    return read


def _rounds(
    read: Callable[[], MetricsPage], pause_s: float, *, first_s: float = 0.0, once: bool = False
) -> Iterator[MetricsPage]:
    """Read repeatedly; failures are reported and tried again."""
    import time

    from slurm_forge.errors import ForgeError

    rest_s = first_s
    while True:
        try:
            time.sleep(rest_s)
            began = time.monotonic()
            yield read()
        except KeyboardInterrupt:
            return
        except (ForgeError, OSError) as error:
            if once:
                raise
            typer.echo(f"failed, trying again later: {' '.join(str(error).split())}", err=True)
        if once:
            return
        rest_s = max(pause_s, _SHARE * (time.monotonic() - began))
