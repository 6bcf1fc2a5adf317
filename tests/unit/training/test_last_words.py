"""What the exception of a rank means, by real exceptions and by texts of real libraries."""

from __future__ import annotations

import errno
import importlib
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from slurm_forge.errors import (
    CheckpointError,
    ConfigError,
    ControlChannelError,
    MismatchError,
    RanksLostError,
    RunDirectoryError,
)
from slurm_forge.training.core.entry import load_entry
from slurm_forge.training.core.error_report import (
    cause_of,
    in_one_line,
)
from slurm_forge.vocabulary.cause import Cause

C = Cause
LOADER = (
    "Caught OSError in DataLoader worker process 0.\n"
    "Original Traceback (most recent call last):\n"
    '  File "/v/torch/utils/data/_utils/worker.py", line 349, in _worker_loop\n'
    "    data = fetcher.fetch(index)\n"
    '    raise RuntimeError("NCCL error")\n'
    "OSError: [Errno 28] No space left on device: '/scratch/cache/x'\n"
)


@pytest.fixture
def modules(tmp_path: Path) -> Iterator[Path]:
    """A folder of the user's on Python's path, for modules of this test only."""
    before = set(sys.modules)
    sys.path.insert(0, str(tmp_path))
    importlib.invalidate_caches()
    yield tmp_path
    sys.path.remove(str(tmp_path))
    for name in set(sys.modules) - before:
        del sys.modules[name]


def raised(act: Callable[[], object]) -> BaseException:
    try:
        act()
    except BaseException as error:
        return error
    raise AssertionError("nothing was raised")


@pytest.mark.parametrize(
    ("error", "cause"),
    [
        (OSError(errno.ENOSPC, "No space left on device"), C.STORAGE),
        (OSError(errno.ESHUTDOWN, "Cannot send after transport endpoint shutdown"), C.STORAGE),
        (OSError(errno.ENOTCONN, "Transport endpoint is not connected", "/mnt/x"), C.STORAGE),
        (OSError(errno.ENOTCONN, "Transport endpoint is not connected"), C.APP_ERROR),
        (FileNotFoundError(errno.ENOENT, "No such file or directory", "x"), C.APP_ERROR),
        (OSError(LOADER), C.STORAGE),
        (RuntimeError("CUDA error: uncorrectable ECC error encountered"), C.GPU_ERROR),
        (RuntimeError("CUDA error: an illegal memory access was encountered"), C.APP_ERROR),
        # Ours say by their type what can't be read.
        (RuntimeError("Error(s) in loading state_dict for GPT:\n\tMissing key"), C.APP_ERROR),
        (RuntimeError("Error(s) in loading state_dict: size mismatch for head.w"), C.APP_ERROR),
        (RuntimeError("DataLoader worker (pid 5) is killed by signal: Killed. "), C.CRASH),
        (RuntimeError("DataLoader worker (pid(s) 5) exited unexpectedly"), C.CRASH),
        (RuntimeError("CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling"), C.CUDA_OOM),
        (RuntimeError("Triton Error [CUDA]: out of memory"), C.CUDA_OOM),
        (ValueError("No available memory for the cache blocks. Try increasing"), C.CUDA_OOM),
        (RuntimeError("can't start new thread"), C.HOST_OOM),
        (RuntimeError("Function 'MulBackward0' returned nan values in its 0th"), C.NON_FINITE),
        (AssertionError("found NaN in local grad norm in backward pass"), C.NON_FINITE),
        (ConnectionResetError(errno.ECONNRESET, "Connection reset by peer"), C.EXTERNAL_SERVICE),
        (BlockingIOError(errno.EAGAIN, "Unable to open (unable to lock file)"), C.STORAGE),
        (RuntimeError("torch.cat(): the run that hit 502 Bad Gateway"), C.APP_ERROR),
        (RuntimeError("No CUDA GPUs are available"), C.ENV_MISMATCH),
        (ConnectionRefusedError(errno.ECONNREFUSED, "Connection refused"), C.EXTERNAL_SERVICE),
        (
            RuntimeError("[gloo/transport/tcp/pair.cc:534] Connection closed by peer [::1]:1"),
            C.NCCL_ERROR,
        ),
        # It waited for others in vain: not the one to blame.
        (
            RuntimeError("[gloo/x.cc:84] Timed out waiting 1800000ms for recv operation to"),
            C.NCCL_ERROR,
        ),
        (torch.distributed.DistBackendError("NCCL error in: x.cpp:1"), C.NCCL_ERROR),
        (
            torch.distributed.DistBackendError(
                "NCCL error in: ProcessGroupNCCL.cpp:3356, unhandled cuda error\n"
                "Last error:\nCuda failure 'uncorrectable ECC error encountered'"
            ),
            C.GPU_ERROR,
        ),
        (ControlChannelError("x", next_step="y"), C.NCCL_ERROR),
        (RanksLostError("x", next_step="y"), C.NCCL_ERROR),
        (CheckpointError("x", next_step="y"), C.STORAGE),
        (MismatchError("x", next_step="y"), C.ENV_MISMATCH),
        (ConfigError("no module named 'x'", next_step="y"), C.APP_ERROR),
        # Texts of mistakes are anybody's.
        (ValueError("No space left on device is a text"), C.APP_ERROR),
        (KeyError("NCCL error"), C.APP_ERROR),
        (AssertionError("uncorrectable ECC error"), C.APP_ERROR),
        (RuntimeError("the gloomy model said NCCL"), C.APP_ERROR),
        (KeyboardInterrupt(), C.APP_ERROR),
        (json.JSONDecodeError("x", "y", 0), C.APP_ERROR),
    ],
    ids=lambda value: value.value if isinstance(value, Cause) else repr(value)[:40],
)
def test_causes_of_single_exceptions(error: BaseException, cause: Cause) -> None:
    assert cause_of(error) is cause


def test_a_library_s_exception_for_a_service_that_is_gone() -> None:
    class ConnectTimeout(OSError):
        pass

    ConnectTimeout.__module__ = "requests.exceptions"
    assert cause_of(ConnectTimeout("HTTPSConnectionPool(host='hub', port=443)")) is (
        C.EXTERNAL_SERVICE
    )

    class LocalEntryNotFoundError(FileNotFoundError, ValueError):
        pass

    LocalEntryNotFoundError.__module__ = "huggingface_hub.errors"
    assert cause_of(LocalEntryNotFoundError("offline")) is C.EXTERNAL_SERVICE


def disk_full() -> None:
    raise OSError(errno.ENOSPC, "No space left on device", "/scratch/x")


def test_what_an_exception_was_raised_from() -> None:
    def explicitly() -> None:
        try:
            disk_full()
        except OSError as error:
            raise RuntimeError("the cache can't be written") from error

    def in_the_handler() -> None:
        try:
            disk_full()
        except OSError:
            raise ValueError("the cache can't be written")  # noqa: B904

    def of_ours() -> None:
        try:
            disk_full()
        except OSError as error:
            raise RunDirectoryError("x", next_step="y") from error

    def hidden() -> None:
        try:
            disk_full()
        except OSError:
            raise ValueError("something else") from None

    assert cause_of(raised(explicitly)) is C.STORAGE
    assert cause_of(raised(in_the_handler)) is C.STORAGE
    assert cause_of(raised(of_ours)) is C.STORAGE
    assert cause_of(raised(hidden)) is C.APP_ERROR


def test_a_program_that_runs_in_a_handler_has_its_own_errors() -> None:
    def train() -> None:
        raise ValueError("a mistake, an hour later")

    def main() -> None:
        try:
            import no_such_accelerator  # noqa: F401
        except ImportError:
            train()

    assert cause_of(raised(main)) is C.APP_ERROR


def test_the_outermost_that_tells_something_counts() -> None:
    def act() -> None:
        try:
            raise RuntimeError("gloo/pair.cc: Connection closed by peer")
        except RuntimeError as error:
            raise RuntimeError("CUDA error: uncorrectable ECC error encountered") from error

    assert cause_of(raised(act)) is C.GPU_ERROR


@pytest.mark.parametrize(
    ("code", "cause"),
    [(16, C.GPU_ERROR), (17, C.GPU_ERROR), (1, C.APP_ERROR), (0, C.APP_ERROR), ([16], C.APP_ERROR)],
)
def test_exit_codes_of_megatron(
    code: int | list[int], cause: Cause, monkeypatch: pytest.MonkeyPatch
) -> None:
    error = SystemExit(code)
    # Of any other program they are its own.
    assert cause_of(error) is C.APP_ERROR
    assert "Megatron" not in in_one_line(error)
    monkeypatch.setitem(sys.modules, "megatron", ModuleType("megatron"))
    assert cause_of(error) is cause
    assert ("Megatron suspects the hardware" in in_one_line(error)) == (cause is C.GPU_ERROR)


@pytest.mark.parametrize(
    ("source", "cause"),
    [
        ("import surely_not_installed", C.ENV_MISMATCH),
        ("import helprs", C.APP_ERROR),  # helpers.py lies beside it
        ("from mypackage import missing", C.APP_ERROR),
        ("import mypackage.missing", C.APP_ERROR),
        ("from . import x", C.APP_ERROR),
        ("raise ImportError('this model needs the SentencePiece library')", C.ENV_MISMATCH),
        (
            "raise ImportError('libcudart.so.12: cannot open shared object file: No such file')",
            C.ENV_MISMATCH,
        ),
    ],
)
def test_what_can_t_be_imported(modules: Path, source: str, cause: Cause) -> None:
    (modules / "helpers.py").touch()
    (modules / "mypackage").mkdir()
    (modules / "mypackage" / "__init__.py").write_text("here = 1\n")
    (modules / "the_program.py").write_text(f"{source}\ndef train(run): ...\n")
    assert cause_of(raised(lambda: importlib.import_module("the_program"))) is cause
    assert cause_of(raised(lambda: load_entry("the_program.py:train", modules))) is cause


def test_a_module_of_the_users_that_is_not_on_the_path(
    modules: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It lies in the folder that the job was submitted from."""
    folder = tmp_path_factory.mktemp("submitted")
    (folder / "mytools.py").touch()
    (folder / "src" / "mypack").mkdir(parents=True)
    (folder / "src" / "mypack" / "__init__.py").touch()
    (modules / "program_a.py").write_text("import mytools\n")
    (modules / "program_b.py").write_text("import mypack.layers\n")
    monkeypatch.chdir(modules)
    for name in ("program_a", "program_b"):
        monkeypatch.chdir(modules)
        assert cause_of(raised(lambda: importlib.import_module(name))) is C.ENV_MISMATCH  # noqa: B023
        monkeypatch.chdir(folder)
        assert cause_of(raised(lambda: importlib.import_module(name))) is C.APP_ERROR  # noqa: B023


def test_a_pipe_to_a_process_of_ones_own_is_no_service() -> None:
    reset = "raise ConnectionResetError(104, 'Connection reset by peer')"
    of_a_pipe = compile(reset, "/usr/lib/python3.11/multiprocessing/connection.py", "exec")
    of_a_reader = compile(reset, "/v/site-packages/webdataset/gopen.py", "exec")
    assert cause_of(raised(lambda: exec(of_a_pipe))) is C.CRASH
    assert cause_of(raised(lambda: exec(of_a_reader))) is C.EXTERNAL_SERVICE


def test_a_slip_in_the_name_of_the_entry_is_the_job_file_s(modules: Path) -> None:
    error = raised(lambda: load_entry("the_progam:train", modules))
    assert isinstance(error, ConfigError)
    assert cause_of(error) is C.APP_ERROR


def test_an_exception_that_can_t_be_printed() -> None:
    class Odd(Exception):
        def __str__(self) -> str:
            raise RuntimeError("no")

    assert cause_of(Odd()) is C.APP_ERROR


@given(st.text(max_size=300), st.sampled_from([RuntimeError, OSError, ImportError, SystemExit]))
def test_any_text_has_a_cause(text: str, kind: type[BaseException]) -> None:
    assert cause_of(kind(text)) in Cause
