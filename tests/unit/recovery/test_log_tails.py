"""What a rank that went without a word had printed: the last words count, not the worst."""

from __future__ import annotations

from typing import Any

import pytest

from slurm_forge.recovery import LaunchFacts, classify
from slurm_forge.recovery.incident.launch_facts import LostRank
from slurm_forge.vocabulary.cause import Cause, Confidence
from slurm_forge.vocabulary.decision import Incident
from tests.unit.recovery.test_classify import NOW, failed

C = Cause
EXIT_1 = "srun: error: n2: task 1: Exited with exit code 1\n"
ABORTED = "srun: error: n2: task 1: Aborted (core dumped)\n"
STEPS = "".join(f"step {step} loss 2.1\n" for step in range(100))

KEY_ERROR = (
    "Traceback (most recent call last):\n"
    '  File "/home/u/train.py", line 10, in <module>\n'
    '    x = cfg["lr"]\n'
    "KeyError: 'lr'\n"
)
WATCHDOG = (
    "[rank1]:[E1120 ProcessGroupNCCL.cpp:616] [Rank 1] Watchdog caught collective operation "
    "timeout: WorkNCCL(SeqNum=1, OpType=ALLREDUCE, Timeout(ms)=600000) ran for 600123 ms\n"
    "terminate called after throwing an instance of 'c10::DistBackendError'\n"
    "  what():  [PG 0 Rank 1] Process group watchdog thread terminated with exception\n"
    "Fatal Python error: Aborted\n\n"
    "Current thread 0x00007f (most recent call first):\n"
    '  File "/home/u/train.py", line 7 in step\n'
)
OPTIONAL_TRITON = (
    "A matching Triton is not available, some optimizations will not be enabled\n"
    "Traceback (most recent call last):\n"
    '  File "/v/lib/python3.11/site-packages/xformers/__init__.py", line 57, in _is_triton\n'
    "    import triton\n"
    "ModuleNotFoundError: No module named 'triton'\n"
)
#: What programs print that go on with their work.
HARMLESS = {
    "optional NCCL plugin": "n1:1:2 [0] NCCL INFO NET/Plugin : dlerror=libnccl-net.so: cannot open "
    "shared object file: No such file or directory No plugin found (libnccl-net.so), using "
    "internal implementation",
    "image library": "/v/torchvision/io/image.py:13: UserWarning: Failed to load image Python "
    "extension: 'libjpeg.so.8: cannot open shared object file: No such file or directory'",
    "image library, bare": "Failed to load image Python extension: libjpeg.so.8: cannot open "
    "shared object file: No such file or directory",
    "image library of another version": "UserWarning: Failed to load image Python extension: "
    "'/v/image.so: undefined symbol: _ZN3c10'",
    "optional apex": "No module named 'apex', using torch LayerNorm",
    "optional flash-attn": "Could not import flash_attn: No module named 'flash_attn'. Falling "
    "back to sdpa",
    "healthy GPUs": "preflight: no uncorrectable ECC errors on 8 GPUs",
    "Xids that are looked for": "preflight: checking dmesg for XID 48,63,79: none found",
    "Xids that are looked for, bare": "preflight: checking dmesg for XID 48,63,79",
    "autotuning": "RuntimeError: CUDA out of memory. This configuration is skipped: triton_mm_12",
    "a batch too large": "| WARNING | ran out of memory, skipping batch: CUDA out of memory. Tried",
    "memory that was freed": "torch.cuda.OutOfMemoryError caught, reducing micro batch to 4",
    "triton's cache": "Read-only file system: '/root/.triton', falling back to /tmp",
    "matplotlib's cache": "Matplotlib created a temporary cache directory because the default path "
    "/root/.config is not writable: Read-only file system",
    "a cache in /tmp": "could not keep the kernel: No space left on device: '/tmp/inductor/x'",
    "a cache in /tmp, logged": "WARNING cache off: [Errno 28] No space left on device: '/tmp/x'",
    "keys on purpose": 'Missing key(s) in state_dict: "head.weight" (ignored, strict=False)',
    "NumPy's ABI": "A module that was compiled using NumPy 1.x cannot be run in\nNumPy 2.0.0 as it "
    "may crash.",
    "TensorFlow without a GPU": "W tensorflow/dso_loader.cc:64] Could not load dynamic library "
    "'libcudart.so.11.0'; dlerror: libcudart.so.11.0: cannot open shared object file",
    "a job on CPUs": "UserWarning: CUDA initialization: Found no NVIDIA driver on your system. "
    "Please check that you have an NVIDIA GPU",
    "no CUDA yet": "UserWarning: CUDA initialization: CUDA unknown error - this may be due to an "
    "incorrectly set up environment, e.g. changing env variable CUDA_VISIBLE_DEVICES after "
    "program start.",
    "NUMA": "n1:1:2 [0] NCCL WARN NUMA balancing is enabled which can lead to variability",
    "IPv6": "[W socket.cpp:601] [c10d] The IPv6 network addresses of (n1, 29500) cannot be "
    "retrieved (gai error: -2 - Name or service not known).",
    "corrected errors": "mce: [Hardware Error]: Machine check events logged",
    "wandb": "wandb: Network error (ConnectionError), entering retry loop.",
    "wandb again": "wandb: Network error resolved after 0:01:02, resuming normal operation.",
    "another mirror": "https://a/b timed out after 30 s, using https://c",
    "a number": "step 500 Internal Server Error rate 0",
    "a path": "GET /v1/503 Service Unavailable page rendered ok",
    "a cache of memory": "MemoryError handled: reducing cache",
    "huge pages": "Cannot allocate memory for huge pages, falling back",
    "an rm": "rm: cannot remove '/scratch/old': Stale file handle",
    "a lock": "flock: Input/output error (ignored)",
    "a picture": "image file is truncated (3 bytes not processed), skipped",
    "torch.load": "FutureWarning: You are using torch.load with weights_only=False: Weights only "
    "load failed if the file holds objects",
    "a try of several": "retry 1/3 failed: HTTP Error 503: Service Unavailable",
    "advice": "If you see 'CUDA out of memory', reduce --batch-size",
    "a setting": "oom_kill_retry=3",
    "a refusal": "RepositoryNotFoundError: 404 Client Error. (Request ID: Root=1-503 Service "
    "Unavailable)",
}


def judged(output: str, end: str = EXIT_1, status: int = 1, **facts: Any) -> Incident:
    """Of a rank whose own output is known."""
    lost = (LostRank(1, "n2", output=output),)
    made = LaunchFacts(now=NOW, lost=lost, exit_status=status, launcher_text=end, **facts)
    return classify(made, "1.1")


def judged_of_all(output: str, end: str = EXIT_1, status: int = 1, **facts: Any) -> Incident:
    """Of ranks that print into one output."""
    lost = (LostRank(1, "n2"),)
    made = LaunchFacts(now=NOW, lost=lost, exit_status=status, launcher_text=output + end, **facts)
    return classify(made, "1.1")


def told(incident: Incident) -> str:
    return "; ".join(f"{each.source}: {each.text}" for each in incident.evidence)


harmless = pytest.mark.parametrize("line", HARMLESS.values(), ids=HARMLESS.keys())
judging = pytest.mark.parametrize("judge", [judged, judged_of_all], ids=["own", "shared"])


# -- what an earlier line must not decide ----------------------------------------------------------


@harmless
@judging
def test_an_exception_is_the_programs_whatever_was_printed_before(line: str, judge: Any) -> None:
    incident = judge(f"{line}\n{KEY_ERROR}")
    assert (incident.cause, incident.hosts) == (C.APP_ERROR, ())
    assert "KeyError: 'lr' (train.py:10 in <module>)" in told(incident)


@harmless
@judging
def test_an_abort_of_the_watchdog_is_a_hang_whatever_was_printed_before(
    line: str, judge: Any
) -> None:
    incident = judge(f"{line}\n{WATCHDOG}", ABORTED, 134)
    assert incident.cause is C.HANG
    assert "Watchdog caught" in told(incident)


@harmless
@judging
def test_what_goes_on_is_no_cause_even_as_the_last_line(line: str, judge: Any) -> None:
    assert judge(f"step 3 loss 2\n{line}\n").cause is C.CRASH


@pytest.mark.parametrize("last", [KEY_ERROR, WATCHDOG], ids=["exception", "watchdog"])
@judging
def test_a_traceback_of_something_optional(last: str, judge: Any) -> None:
    ended = (EXIT_1, 1) if last is KEY_ERROR else (ABORTED, 134)
    expected = C.APP_ERROR if last is KEY_ERROR else C.HANG
    assert judge(OPTIONAL_TRITON + last, *ended).cause is expected
    assert judge(OPTIONAL_TRITON + STEPS + last, *ended).cause is expected
    assert judge(OPTIONAL_TRITON + STEPS).cause is C.CRASH


def test_something_missing_lets_no_process_crash() -> None:
    text = "No module named 'apex'\nfree(): invalid pointer\nFatal Python error: Aborted\n"
    incident = judged(text, ABORTED, 134)
    assert incident.cause is C.CRASH
    assert "free(): invalid pointer" in told(incident)


@judging
def test_a_traceback_of_something_missing_lets_no_process_crash(judge: Any) -> None:
    assert judge(OPTIONAL_TRITON, ABORTED, 134).cause is C.CRASH
    assert judge(OPTIONAL_TRITON + "free(): invalid pointer\n").cause is C.CRASH
    # As the last that a program says before it exits it is why.
    assert judge(OPTIONAL_TRITON).cause is C.ENV_MISMATCH


@pytest.mark.parametrize(
    ("line", "cause"),
    [
        ("ImportError: libcudart.so.12: cannot open shared object file", C.ENV_MISMATCH),
        ("NVRM: Xid (PCI:0000:3b:00): 79, pid=1, GPU has fallen off the bus.", C.GPU_ERROR),
        ("mce: [Hardware Error]: Uncorrected error", C.NODE_FAIL),
        ("PytorchStreamReader failed reading zip archive", C.CHECKPOINT_BAD),
    ],
)
@judging
def test_what_holds_or_strikes_must_stand_at_the_end(line: str, cause: Cause, judge: Any) -> None:
    near = judge(f"{STEPS}{line}\n" + "bye\n" * 10)
    assert (near.cause, near.confidence) == (cause, Confidence.LIKELY)
    assert judge(f"{line}\n{STEPS}").cause is C.CRASH


def test_an_older_line_of_another_cause_is_a_guess() -> None:
    incident = judged(f"OSError: [Errno 122] Disk quota exceeded: '/home/u'\n{STEPS}")
    assert (incident.cause, incident.confidence) == (C.STORAGE, Confidence.GUESS)


@judging
def test_the_last_line_counts_and_not_the_first_row_of_the_table(judge: Any) -> None:
    text = "torch.OutOfMemoryError: CUDA out of memory.\nstep 4\nCommError: x\n"
    assert judge(text).cause is C.CUDA_OOM
    text += "HTTP Error 503: Service Unavailable\n"
    assert judge(text).cause is C.EXTERNAL_SERVICE


# -- exceptions ------------------------------------------------------------------------------------


def raised(error: str, file: str = "/home/u/train.py") -> str:
    return (
        "Traceback (most recent call last):\n"
        '  File "/home/u/train.py", line 3, in main\n'
        "    work()\n"
        f'  File "{file}", line 5, in work\n'
        "    go()\n"
        f"{error}\n"
    )


EXCEPTIONS = {
    "RuntimeError: CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`": (
        C.CUDA_OOM
    ),
    "RuntimeError: CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`": (
        C.CUDA_OOM
    ),
    "RuntimeError: Triton Error [CUDA]: out of memory": C.CUDA_OOM,
    "tensorflow.python.framework.errors_impl.ResourceExhaustedError: OOM when allocating tensor "
    "with shape[1024]": C.CUDA_OOM,
    "ValueError: No available memory for the cache blocks. Try increasing "
    "`gpu_memory_utilization`": C.CUDA_OOM,
    "RuntimeError: HIP error: out of memory": C.CUDA_OOM,
    "cupy.cuda.memory.OutOfMemoryError: Out of memory allocating 1,024 bytes": C.CUDA_OOM,
    "RuntimeError: can't start new thread": C.HOST_OOM,
    "OSError: [Errno 28] No space left on device: '/tmp/torchinductor_x'": C.STORAGE,
    "RuntimeError: error fetching image: no space left on device": C.STORAGE,
    "BlockingIOError: [Errno 11] Unable to synchronously open file (unable to lock file, errno = "
    "11, error message = 'Resource temporarily unavailable')": C.STORAGE,
    "ConnectionResetError: [Errno 104] Connection reset by peer": C.EXTERNAL_SERVICE,
    "urllib.error.HTTPError: HTTP Error 502: Bad Gateway": C.EXTERNAL_SERVICE,
    "RuntimeError: retry 3/3 failed: HTTP Error 503: Service Unavailable": C.EXTERNAL_SERVICE,
    "RuntimeError: HIP error: hardware stack error": C.GPU_ERROR,
    "RuntimeError: CUDA error: uncorrectable ECC error encountered": C.GPU_ERROR,
    "RuntimeError: HIP error: invalid device function": C.ENV_MISMATCH,
    "RuntimeError: No HIP GPUs are available": C.ENV_MISMATCH,
    "ModuleNotFoundError: No module named 'flash_attn'": C.ENV_MISMATCH,
    "slurm_forge.errors.MismatchError: the versions differ": C.ENV_MISMATCH,
    "slurm_forge.errors.CheckpointMissingError: none is left": C.CHECKPOINT_BAD,
    "AssertionError: Found NaN in local grad norm in backward pass before data-parallel "
    "communication collective. Device: 0, node: n1": C.NON_FINITE,
    "Exception: Current loss scale already at minimum - cannot decrease scale anymore.": (
        C.NON_FINITE
    ),
    "RuntimeError: Function 'MulBackward0' returned nan values in its 0th output.": C.NON_FINITE,
    "RuntimeError: DataLoader worker (pid 12345) is killed by signal: Killed. ": C.CRASH,
    "RuntimeError: DataLoader worker (pid(s) 12345) exited unexpectedly": C.CRASH,
    # The program's own.
    "RuntimeError: torch.cat(): expected a list; the run that hit 502 Bad Gateway": C.APP_ERROR,
    "ValueError: no such key: 502 Bad Gateway for https://x": C.APP_ERROR,
    "AssertionError: Xid 79": C.APP_ERROR,
    "huggingface_hub.errors.RepositoryNotFoundError: 404 Client Error. (Request ID: Root=1-503 "
    "Service Unavailable)": C.APP_ERROR,
    "RuntimeError: Error(s) in loading state_dict for Net: size mismatch for head.weight: copying "
    "a param with shape [3]": C.APP_ERROR,
    "ModuleNotFoundError: No module named 'mymodel.layres'": C.APP_ERROR,
    "ImportError: cannot import name 'f' from 'mymodel' (/home/u/mymodel.py)": C.APP_ERROR,
}


@pytest.mark.parametrize(("error", "cause"), EXCEPTIONS.items(), ids=lambda value: str(value)[:60])
@judging
def test_an_exception_is_judged_by_its_own_line(error: str, cause: Cause, judge: Any) -> None:
    incident = judge(f"NVRM: Xid (PCI:0000:3b:00): 79, pid=1\n{STEPS}{raised(error)}wandb: bye\n")
    assert incident.cause is cause
    assert error.strip()[:60] in told(incident)
    assert (incident.hosts == ("n2",)) == (cause in {C.GPU_ERROR, C.HOST_OOM, C.CRASH})


def test_a_module_that_a_library_misses_is_the_environments() -> None:
    installed = "/v/lib/python3.11/site-packages/peft/__init__.py"
    text = raised("ModuleNotFoundError: No module named 'transformers.new'", installed)
    assert judged(text).cause is C.ENV_MISMATCH


def test_what_nccl_passes_on_is_told_by_the_lines_behind() -> None:
    error = (
        "torch.distributed.DistBackendError: NCCL error in: x.cpp:219, unhandled cuda error (run "
        "with NCCL_DEBUG=INFO for details)\nncclUnhandledCudaError: Call to CUDA function failed.\n"
        "Last error:\nCuda failure 2 'out of memory'"
    )
    assert judged(raised(error)).cause is C.CUDA_OOM
    without = error.partition("Last error")[0]
    assert judged(raised(without)).cause is C.NCCL_ERROR


def test_a_pipe_to_a_process_of_ones_own_is_no_service() -> None:
    pipe = "/usr/lib/python3.11/multiprocessing/connection.py"
    error = "ConnectionResetError: [Errno 104] Connection reset by peer"
    assert judged(raised(error, pipe)).cause is C.CRASH


def test_an_exception_that_ends_in_an_abort_of_what_it_left() -> None:
    text = KEY_ERROR + "terminate called without an active exception\n"
    assert judged(text, ABORTED, 134).cause is C.APP_ERROR


def test_an_exception_of_a_thread_ends_nothing() -> None:
    text = "Exception in thread Thread-3 (monitor):\n" + raised("OSError: [Errno 5] I/O")
    assert judged(text).cause is C.CRASH


def test_what_starts_the_processes_only_says_that_one_failed() -> None:
    starter = raised("torch.distributed.elastic.multiprocessing.errors.ChildFailedError: ")
    assert judged(KEY_ERROR + starter).cause is C.APP_ERROR
    assert judged(starter).cause is C.CRASH


# -- single lines ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("line", "cause"),
    [
        ("UCX  ERROR Transport retry count exceeded on mlx5_0:1/RoCE (synd 0x15)", C.NCCL_ERROR),
        ("NVRM: GPU 3b: Row remapping failure", C.GPU_ERROR),
        ("NVRM: Xid (PCI:0000:3b:00): 79, pid=1, GPU has fallen off the bus.", C.GPU_ERROR),
        ("kernel: Xid 48 on GPU 3", C.GPU_ERROR),
        ("retry 3/3 failed: HTTP Error 503: Service Unavailable", C.EXTERNAL_SERVICE),
        ("FATAL:   error fetching image: no space left on device", C.STORAGE),
        ("n1:1:2 [0] NCCL WARN Duplicate GPU detected : rank 1 and rank 0", C.APP_ERROR),
        ("n1:1:2 [0] NCCL WARN Cuda failure 2 'out of memory'", C.CUDA_OOM),
        ("n1:1:2 [0] NCCL WARN NET/IB : Got non-fatal async event: port error(10)", C.NCCL_ERROR),
        ("n1:1:2 [0] NCCL WARN NET/IB : Got async event : port error", C.NCCL_ERROR),
    ],
)
@judging
def test_a_last_line_that_tells(line: str, cause: Cause, judge: Any) -> None:
    assert judge(f"step 3 loss 2\n{line}\n").cause is cause


@pytest.mark.parametrize(
    "line", ["Row Remapping Failure Occurred : No", "Uncorrectable ECC Errors : 0"]
)
def test_a_table_of_a_healthy_gpu(line: str) -> None:
    assert judged(f"{line}\n").cause is C.CRASH


# -- a loader's worker -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text",
    [
        "RuntimeError: DataLoader worker (pid 77) is killed by signal: Killed. ",
        "RuntimeError: DataLoader worker (pid(s) 77) exited unexpectedly",
    ],
)
def test_a_killed_loader_worker_is_told_by_the_kernels_counter(text: str) -> None:
    counted = "oom_kill of memory.events went from 0 to 1"
    assert judged(raised(text)).cause is C.CRASH
    assert judged(raised(text), killed_for_memory=counted).cause is C.HOST_OOM
    words = failed(C.CRASH, 1, host="n2", text=text)
    made = LaunchFacts(now=NOW, failures=(words,), exit_status=1, killed_for_memory=counted)
    incident = classify(made, "1.1")
    assert (incident.cause, incident.rank, incident.hosts) == (C.HOST_OOM, 1, ("n2",))


# -- outputs that ranks share ----------------------------------------------------------------------

PEERS = (
    raised("RuntimeError: [gloo/transport/tcp/pair.cc:553] Connection closed by peer [::1]:4")
    + raised("torch.distributed.DistBackendError: NCCL error in: x.cpp:1, remote process exited or "
    "there was a network error, NCCL version 2.21.5")
    + raised("slurm_forge.errors.RanksLostError: rank 1 is gone")
)  # fmt: skip


def test_what_the_others_say_of_a_lost_rank_never_explains_it() -> None:
    assert judged_of_all(PEERS).cause is C.CRASH
    assert judged_of_all(PEERS).hosts == ("n2",)
    # Its own traceback stands before theirs, however many they are.
    assert judged_of_all(KEY_ERROR + PEERS * 20).cause is C.APP_ERROR
    # In an output of its own it was itself hit by another's end.
    assert judged(raised("RuntimeError: gloo/pair.cc:5] Connection closed by peer")).cause is (
        C.NCCL_ERROR
    )


def test_what_a_rank_that_failed_after_it_has_said_is_not_its() -> None:
    text = raised("mine.errors.StoreError: the others are gone")
    after = failed(C.APP_ERROR, 0, after_loss=True, text="StoreError: the others are gone. (x)")
    assert judged_of_all(text).cause is C.APP_ERROR
    assert judged_of_all(text, failures=(after,)).cause is C.CRASH


def test_a_watchdog_of_another_rank_does_not_explain_an_exit() -> None:
    line = WATCHDOG.splitlines()[0]
    assert judged_of_all(f"{line}\n").cause is C.CRASH
    assert judged(f"{line}\n").cause is C.HANG


# -- Megatron's exit codes -------------------------------------------------------------------------


@pytest.mark.parametrize("status", [16, 17])
@judging
def test_exit_codes_of_megatron_count_only_beside_its_words(status: int, judge: Any) -> None:
    end = f"srun: error: n2: task 1: Exited with exit code {status}\n"
    alone = judge("step 3 loss 2\n", end, status)
    assert (alone.cause, alone.hosts) == (C.APP_ERROR, ())
    words = "First rerun: unexpected result is reproducible within the tolerance\n"
    incident = judge(words, end, status)
    assert (incident.cause, incident.hosts) == (C.GPU_ERROR, ("n2",))
    assert judge(KEY_ERROR, end, status).cause is C.APP_ERROR


def test_a_fault_of_the_process_is_not_looked_for_in_its_words() -> None:
    end = "srun: error: n2: task 1: Segmentation fault (core dumped)\n"
    assert judged(KEY_ERROR, end, 139).cause is C.CRASH
