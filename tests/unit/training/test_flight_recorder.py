"""The flight recorder's pipe, with something in torch's place: it was not tried with NCCL."""

from __future__ import annotations

import os
import threading
from pathlib import Path

from slurm_forge.training.monitor.flight_recorder import (
    dump_into,
    forget,
    prepare,
)


def test_variables_and_folder_only_where_there_is_a_device_and_nothing_was_said(
    tmp_path: Path,
) -> None:
    device = tmp_path / "nvidiactl"
    assert prepare({}, device=device) == ("", {})
    device.touch()
    folder, variables = prepare({"TORCH_FR_BUFFER_SIZE": "9"}, device=device)
    assert Path(folder).stat().st_mode & 0o077 == 0
    assert variables["TORCH_NCCL_DEBUG_INFO_PIPE_FILE"] == f"{folder}/pipe-"
    assert "TORCH_FR_BUFFER_SIZE" not in variables, "the user's own is left alone"
    forget(folder)
    assert not Path(folder).exists()
    own = {"TORCH_NCCL_DEBUG_INFO_TEMP_FILE": "/mine/x"}
    assert prepare(own, device=device) == ("", {})


def test_a_dump_is_asked_for_through_the_pipe(tmp_path: Path) -> None:
    assert not dump_into(str(tmp_path), 3, tmp_path / "copy"), "nobody has made a pipe"
    os.mkfifo(tmp_path / "pipe-3.pipe")
    reader = os.open(tmp_path / "pipe-3.pipe", os.O_RDONLY | os.O_NONBLOCK)

    def torchs_monitor_thread() -> None:
        os.set_blocking(reader, True)
        os.read(reader, 16)
        (tmp_path / "trace-3").write_bytes(b"collectives")

    thread = threading.Thread(target=torchs_monitor_thread)
    writer = os.open(tmp_path / "pipe-3.pipe", os.O_WRONLY)  # so that the read waits
    thread.start()
    assert dump_into(str(tmp_path), 3, tmp_path / "copy")
    thread.join()
    assert (tmp_path / "copy").read_bytes() == b"collectives"
    os.close(reader)
    os.close(writer)


def test_a_dump_that_torch_has_written_at_a_timeout_is_taken(tmp_path: Path) -> None:
    """Its monitor thread waits to end the process then, and answers nobody."""
    os.mkfifo(tmp_path / "pipe-3.pipe")
    reader = os.open(tmp_path / "pipe-3.pipe", os.O_RDONLY | os.O_NONBLOCK)
    (tmp_path / "trace-3").write_bytes(b"collectives")
    assert dump_into(str(tmp_path), 3, tmp_path / "copy")
    assert (tmp_path / "copy").read_bytes() == b"collectives"
    os.close(reader)
