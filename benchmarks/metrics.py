"""What the metrics of many runs cost: the first reading, later ones, and a scrape.

    python -m benchmarks.metrics [--runs 1000] [--rounds 5] [--prometheus] [--json FILE] [--dir DIR]

Between two readings every run that trains writes a line, as it does every five seconds.  A scrape
is that of an HTTP client on the loopback, beside a server that shows a new page each round: the
first one of a page, another, and any while the runs are read.  With ``--prometheus`` real ones, to
which every series is new, scrape the same server: how long that takes by their own measure, and
what they use of a core for it.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import resource
import socket
import subprocess
import tempfile
import threading
import time
import urllib.parse
import urllib.request
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks.many_runs import Kind, kind_of, write_many
from benchmarks.tables import Machine, Spread, cell, spread, table, write_json
from slurm_forge.cli.monitoring.metrics_runs import MetricsRuns
from slurm_forge.cli.monitoring.metrics_server import MetricsPage, serving
from slurm_forge.journal import JournalWriter
from slurm_forge.journal.events import Logged
from slurm_forge.run_directory import RunDirectory

_OPENMETRICS = "application/openmetrics-text;version=1.0.0"


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """What was measured of one thing over all rounds."""

    what: str
    wall_s: Spread | None
    cpu_s: Spread | None


@dataclass(slots=True)
class Stopwatch:
    """Times by what was done."""

    wall: dict[str, list[float]]
    cpu: dict[str, list[float]]

    def time(self, what: str, began: tuple[float, float]) -> None:
        """Note what was done since ``began``."""
        self.wall.setdefault(what, []).append(time.perf_counter() - began[0])
        self.cpu.setdefault(what, []).append(time.process_time() - began[1])


def _now() -> tuple[float, float]:
    return time.perf_counter(), time.process_time()


def _train(writers: dict[str, JournalWriter], runs: list[RunDirectory], number: int) -> None:
    for index, run in enumerate(runs):
        if kind_of(index) is not Kind.TRAINS:
            continue
        if run.name not in writers:
            attempt = 1 + index % 4
            writers[run.name] = JournalWriter(run, attempt=attempt, writer="rank0", launch=1)
        step = 10**6 + 10 * number
        writers[run.name].write(Logged(step=step, values={"loss": 2.5}), durable=False)


def _scrape(address: str, watch: Stopwatch, what: str, accept: str = _OPENMETRICS) -> None:
    request = urllib.request.Request(f"http://{address}/metrics", headers={"Accept": accept})
    began = _now()
    with urllib.request.urlopen(request) as answer:
        answer.read()
    watch.time(what, began)


def _prometheus(address: str, folder: Path, watch: Stopwatch) -> None:
    """A new Prometheus scrapes three times."""
    folder.mkdir()
    config = f"static_configs: [{{targets: ['{address}']}}]"
    (folder / "p.yml").write_text(
        "global: {scrape_interval: 2s, scrape_timeout: 2s}\n"
        f"scrape_configs: [{{job_name: forge, {config}}}]\n"
    )
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        listen = f"127.0.0.1:{probe.getsockname()[1]}"
    words = [f"--config.file={folder}/p.yml", f"--storage.tsdb.path={folder}/data"]
    process = subprocess.Popen(
        ["prometheus", *words, f"--web.listen-address={listen}"], stderr=subprocess.DEVNULL
    )
    query = urllib.parse.quote("scrape_duration_seconds[5m]")
    took: list[float] = []
    idle_s = first_s = 0.0
    try:
        while len(took) < 3:
            time.sleep(0.05)
            before, taken = _core_seconds(process.pid), len(took)
            with contextlib.suppress(OSError, IndexError):
                url = f"http://{listen}/api/v1/query?query={query}"
                with urllib.request.urlopen(url, timeout=30) as answer:
                    (series,) = json.load(answer)["data"]["result"] or [{"values": []}]
                took = [float(value) for _, value in series["values"]]
            if not took:
                idle_s = before if before < 0.2 else idle_s
            elif not taken:
                first_s = _core_seconds(process.pid) - idle_s
    finally:
        process.kill()
        process.wait()
    watch.wall.setdefault("Prometheus, its first scrape", []).append(took[0])
    watch.cpu.setdefault("Prometheus, its first scrape", []).append(first_s)
    watch.wall.setdefault("Prometheus, later scrapes", []).extend(took[1:])


def _core_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def measure(
    folder: Path, count: int, rounds: int, *, prometheus: bool = False
) -> tuple[list[Figures], int, float]:
    """The figures, the size of a page in bytes, and the peak of memory in MiB."""
    runs = write_many(folder, count)
    metrics = MetricsRuns(limit=count, rested_for_s=1e9)
    watch = Stopwatch({}, {})
    began = _now()
    page = MetricsPage(*metrics.refresh(runs))
    watch.time("first reading", began)
    size = len(page.text())
    writers: dict[str, JournalWriter] = {}
    with serving("127.0.0.1:0", page) as server:
        for number in range(rounds):
            _train(writers, runs, number)
            began = _now()
            page = MetricsPage(*metrics.refresh(runs))
            watch.time("reading, a fifth of the runs train", began)
            _train(writers, runs, number)
            reading = threading.Thread(target=metrics.refresh, args=(runs,))
            reading.start()
            while reading.is_alive():
                _scrape(server.address, watch, "scrape while runs are read, OpenMetrics")
            reading.join()
            began = _now()
            MetricsPage(*metrics.refresh(runs))
            watch.time("reading, nothing has changed", began)
            began = _now()
            server.show(page)
            watch.time("making the page", began)
            for which in ("first scrape of a page", "scrape"):
                _scrape(server.address, watch, f"{which}, text", "text/plain")
                _scrape(server.address, watch, f"{which}, OpenMetrics")
            if prometheus:
                _prometheus(server.address, folder / f"prometheus-{number}", watch)
    figures = [
        Figures(what=what, wall_s=spread(watch.wall[what]), cpu_s=spread(watch.cpu.get(what, [])))
        for what in watch.wall
    ]
    return figures, size, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def main() -> None:
    """Measure, print the table, write the JSON."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.metrics", description=__doc__)
    parser.add_argument("--runs", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--prometheus", action="store_true")
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--dir", type=Path)
    given = parser.parse_args()
    load, began = os.getloadavg()[0], time.time()
    with tempfile.TemporaryDirectory(prefix="forge-bench-", dir=given.dir) as folder:
        rows, size, peak = measure(
            Path(folder), given.runs, given.rounds, prometheus=given.prometheus
        )
    machine = Machine.measured(load, began)
    print(f"{machine.text()}; {given.rounds} rounds")
    print(f"{given.runs} runs, a page of {size / 1e6:.1f} MB, peak of memory {peak:.0f} MiB\n")
    cells = [(each.what, cell(each.wall_s, 3), cell(each.cpu_s, 3)) for each in rows]
    print(table(("median (least-most)", "wall s", "cpu s"), cells))
    write_json(
        given.json,
        {
            "machine": asdict(machine),
            "runs": given.runs,
            "page_bytes": size,
            "peak_mib": peak,
            "figures": [asdict(each) for each in rows],
        },
    )


if __name__ == "__main__":
    main()
