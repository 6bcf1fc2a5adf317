"""Known texts of errors: each row by a real text, and by one that only looks like it."""

from __future__ import annotations

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slurm_forge.recovery.incident.error_patterns import (
    KNOWN_ERRORS,
    find_cause,
    find_last,
)
from slurm_forge.vocabulary.cause import Cause

C = Cause
#: cause, label of the row, texts that say so, texts that don't.
ROWS: list[tuple[Cause, str, list[str], list[str]]] = [
    (
        C.GPU_ERROR,
        "Xid",
        [
            "[1234.5] NVRM: Xid (PCI:0000:3b:00): 79, pid=1234, GPU has fallen off the bus.",
            "NVRM: Xid (PCI:0000:86:00): 48, pid='<unknown>', name=<unknown>, DBE (double bit)",
            "DCGM: XID errors found: 95 on GPU 3",
            "NVRM: Xid (PCI:0001:00:00): 119, pid=77, Timeout waiting for RPC from GSP!",
            "nvidia-nvswitch0: SXid (PCI:0000:c1:00.0): 20034, Fatal, Link 30 LTSSM Fault Up",
        ],
        [
            # What programs bring about, on a bus whose number is that of a fault.
            "NVRM: Xid (PCI:0000:48:00): 31, pid=5, name=python, Ch 8, MMU Fault",
            "NVRM: Xid (PCI:0000:3b:00): 13, Graphics SM Warp Exception",
            "NVRM: Xid (PCI:0000:3b:00): 43, pid=1, Ch 79",
            "xid=79 committed; 48 rows",
        ],
    ),
    (
        C.GPU_ERROR,
        "GPU off the bus",
        [
            "NVRM: GPU at PCI:0000:3b:00: GPU-b850f46d has fallen off the bus",
            "Unable to determine the device handle for GPU 0000:3B:00.0: Unknown Error",
            "nvmlErrorString: GPU is lost",
        ],
        ["the bus: GPU has fallen behind", "GPU 3 lost 2 % of throughput"],
    ),
    (
        C.GPU_ERROR,
        "uncorrectable ECC error",
        [
            "RuntimeError: CUDA error: uncorrectable ECC error encountered",
            "GPU 2: Double-bit ECC error detected",
        ],
        [
            "Volatile Uncorr. ECC | 0",
            "Uncorrectable ECC Errors : 0",
            "Uncorrectable ECC errors: N/A",
            "3 correctable ECC errors",
        ],
    ),
    (
        C.GPU_ERROR,
        "NVLink fault",
        [
            "CUDA error: uncorrectable NVLink error detected during the execution",
            "CUDA error: Invalid access of peer GPU memory over nvlink or a hardware error",
        ],
        ["NCCL INFO NVLink links: 12", "no error on NVLink 3"],
    ),
    (
        C.GPU_ERROR,
        "GPU not usable",
        [
            "RuntimeError: CUDA error: CUDA-capable device(s) is/are busy or unavailable",
            "Error 802: system not yet initialized (function cudaGetDeviceCount)",
            "RuntimeError: CUDA unknown error - this may be due to an incorrectly set up "
            "environment",
        ],
        [
            "the loader is busy or unavailable",
            "CUDA error: invalid argument",
            "UserWarning: CUDA initialization: CUDA unknown error - this may be due to an "
            "incorrectly set up environment",
        ],
    ),
    (
        C.NODE_FAIL,
        "memory error of the node",
        [
            "slurmstepd: error: *** STEP 1.0 ON n1 UNCORRECTABLE MEMORY ERROR AT 2026-11-22T02 ***",
            "mce: [Hardware Error]: Machine check: Processor context corrupt",
        ],
        ["Hardware Error counters: none", "mce: [Hardware Error]: Machine check events logged"],
    ),
    (
        C.CUDA_OOM,
        "GPU memory",
        [
            "torch.cuda.OutOfMemoryError: CUDA out of memory. Tried to allocate 20.00 GiB.",
            "RuntimeError: CUDA error: out of memory",
            "RuntimeError: CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate`",
            "Cuda failure 2 'out of memory'",
            "XlaRuntimeError: RESOURCE_EXHAUSTED: Out of memory while trying to allocate 1 bytes",
            "RuntimeError: CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate`",
            "RuntimeError: Triton Error [CUDA]: out of memory",
            "ValueError: No available memory for the cache blocks.",
        ],
        ["CUDA is out of the question, memory too", "CUBLAS_STATUS_EXECUTION_FAILED"],
    ),
    (
        C.HOST_OOM,
        "shared memory",
        [
            "RuntimeError: DataLoader worker (pid 77) is killed by signal: Bus error. It is "
            "possible that dataloader's workers are out of shared memory.",
            "RuntimeError: unable to write to file </torch_1_2_3>: No space left on device (28)",
            "OSError: [Errno 28] No space left on device: '/dev/shm/abc'",
        ],
        ["triton: OutOfResources: out of resource: shared memory, Required: 262144"],
    ),
    (
        C.HOST_OOM,
        "killed for memory",
        [
            "slurmstepd: error: Detected 1 oom_kill event in StepId=13.0. Some of the step tasks "
            "have been OOM Killed.",
            "Memory cgroup out of memory: Killed process 77 (python)",
            "Some of your processes may have been killed by the cgroup out-of-memory handler.",
        ],
        ["memory.events: oom 0 oom_kill 0", "oom_kill_disable 0", "Killed"],
    ),
    (
        C.HOST_OOM,
        "memory of the node",
        [
            "MemoryError",
            "numpy.core._exceptions._ArrayMemoryError: Unable to allocate 8.0 TiB for an array",
            "RuntimeError: [enforce fail at alloc_cpu.cpp:119] err == 0. DefaultCPUAllocator: "
            "can't allocate memory: you tried to allocate 4398046511104 bytes.",
            "what():  std::bad_alloc",
            "OSError: [Errno 12] Cannot allocate memory",
        ],
        [
            "torch.OutOfMemoryError: x",
            "ImportError: libgomp.so.1: cannot allocate memory in static TLS block",
        ],
    ),
    (
        C.HOST_OOM,
        "threads of the node",
        [
            "RuntimeError: can't start new thread",
            "OpenBLAS blas_thread_init: pthread_create failed for thread 30 of 64: Resource "
            "temporarily unavailable",
        ],
        ["thread 3 can't start: no work"],
    ),
    (
        C.CRASH,
        "loader worker gone",
        [
            "RuntimeError: DataLoader worker (pid 77) is killed by signal: Killed.",
            "RuntimeError: DataLoader worker (pid(s) 77, 78) exited unexpectedly",
        ],
        ["DataLoader worker (pid 77) is killed by signal: Bus error.", "worker 7 exited"],
    ),
    (
        C.STORAGE,
        "disk full",
        ["OSError: [Errno 28] No space left on device: '/scratch/run/x'"],
        ["space left on device: 3 GiB"],
    ),
    (
        C.STORAGE,
        "quota exceeded",
        ["OSError: [Errno 122] Disk quota exceeded: '/home/u/x'"],
        ["API quota exceeded"],
    ),
    (
        C.STORAGE,
        "stale file handle",
        ["OSError: [Errno 116] Stale file handle", "cp: x: Stale NFS file handle"],
        ["the handle of the file is stale"],
    ),
    (
        C.STORAGE,
        "read-only file system",
        ["OSError: [Errno 30] Read-only file system: '/scratch/run'"],
        ["mounted a file system read-only on purpose"],
    ),
    (
        C.STORAGE,
        "file system gone",
        [
            "OSError: [Errno 107] Transport endpoint is not connected: '/mnt/fuse/a'",
            "OSError: [Errno 108] Cannot send after transport endpoint shutdown",
            "TimeoutError: [Errno 110] Connection timed out: '/scratch/data/x'",
        ],
        ["OSError: [Errno 107] Transport endpoint is not connected"],  # a socket's
    ),
    (
        C.STORAGE,
        "I/O error",
        [
            "OSError: [Errno 5] Input/output error",
            "RuntimeError: [enforce fail at inline_container.cc:595] . unexpected pos 640 vs 534",
        ],
        ["ValueError: I/O operation on closed file."],
    ),
    (
        C.APP_ERROR,
        "device-side assert",
        [
            "RuntimeError: CUDA error: device-side assert triggered",
            "Indexing.cu:1236: indexSelect: block: [5,0,0], thread: [96,0,0] Assertion "
            "`srcIndex < srcSelectDimSize` failed.",
        ],
        ["Compile with `TORCH_USE_CUDA_DSA` to enable device-side assertions."],
    ),
    (
        C.APP_ERROR,
        "illegal access of a kernel",
        [
            "RuntimeError: CUDA error: an illegal memory access was encountered",
            "RuntimeError: CUDA error: unspecified launch failure",
        ],
        ["Illegal instruction (core dumped)"],
    ),
    (
        C.APP_ERROR,
        "wrong use of NCCL",
        [
            "NCCL WARN Duplicate GPU detected : rank 1 and rank 0 both on CUDA device 1b000",
            "ncclInvalidUsage: This usually reflects invalid usage of NCCL library.",
        ],
        ["ncclSystemError: System call (e.g. socket, malloc) failed"],
    ),
    (
        C.APP_ERROR,
        "damaged sample",
        [
            "PIL.UnidentifiedImageError: cannot identify image file <_io.BytesIO object at 0x7f>",
            "OSError: image file is truncated (3 bytes not processed)",
        ],
        ["the image file was written"],
    ),
    (
        C.ENV_MISMATCH,
        "shared library missing",
        [
            "ImportError: libcudart.so.12: cannot open shared object file: No such file or "
            "directory",
            "ImportError: libgomp.so.1: cannot allocate memory in static TLS block",
        ],
        ["cannot open shared folder"],
    ),
    (
        C.ENV_MISMATCH,
        "program missing",
        [
            "slurm_forge: apptainer can't be started: No such file or directory",
            "slurmstepd-n1: error: execve(): pyhton: No such file or directory",
            "slurmstepd: error: execve(): ./train.sh: Permission denied",
            "FATAL:   could not open image /images/torch.sif: failed to retrieve path for "
            "/images/torch.sif: lstat /images: no such file or directory",
        ],
        [
            "my tool: apptainer can't be started: no such luck",
            "could not open image viewer",
            "slurm_forge: scontrol can't be started: No such file or directory",
            "slurm_forge: /usr/bin/sacct can't be started: No such file or directory",
        ],
    ),
    (
        C.ENV_MISMATCH,
        "binary of another version",
        [
            "ImportError: /x/flash_attn.so: undefined symbol: _ZN3c104cuda9SetDeviceEi",
            "ImportError: /lib64/libc.so.6: version `GLIBC_2.34' not found (required by /x.so)",
            "/usr/lib/libstdc++.so.6: version `GLIBCXX_3.4.30' not found",
            "ImportError: cannot import name 'x' from 'transformers' "
            "(/v/lib/python3.11/site-packages/transformers/__init__.py)",
        ],
        ["ImportError: cannot import name 'x' from 'mine' (/home/u/mine.py)", "symbol undefined"],
    ),
    (
        C.ENV_MISMATCH,
        "driver does not fit",
        [
            "RuntimeError: CUDA driver version is insufficient for CUDA runtime version",
            "Failed to initialize NVML: Driver/library version mismatch",
            "forward compatibility was attempted on non supported HW",
        ],
        ["CUDA driver version: 12.4"],
    ),
    (
        C.ENV_MISMATCH,
        "no code for this GPU",
        ["RuntimeError: CUDA error: no kernel image is available for execution on the device"],
        ["no image is available"],
    ),
    (
        C.ENV_MISMATCH,
        "no visible GPU",
        ["RuntimeError: No CUDA GPUs are available"],
        ["8 CUDA GPUs are available"],
    ),
    (
        C.ENV_MISMATCH,
        "module missing",
        ["ModuleNotFoundError: No module named 'flash_attn'"],
        ["No module is named so"],
    ),
    (
        C.APP_ERROR,
        "weights that don't fit",
        [
            "RuntimeError: Error(s) in loading state_dict for GPT:",
            'Missing key(s) in state_dict: "head.weight".',
            "size mismatch for head.weight: copying a param with shape torch.Size([3]) from "
            "checkpoint, the shape in current model is torch.Size([4]).",
        ],
        ["size mismatch for batch 3"],
    ),
    (
        C.NON_FINITE,
        "numbers that are not finite",
        [
            "Found NaN in local grad norm in backward pass before data-parallel communication",
            "Exception: Current loss scale already at minimum - cannot decrease scale anymore.",
            "RuntimeError: Function 'MulBackward0' returned nan values in its 0th output.",
        ],
        ["{'loss': 0.0, 'grad_norm': nan}", "no NaN found in local grad norm"],
    ),
    (
        C.CHECKPOINT_BAD,
        "damaged checkpoint file",
        [
            "RuntimeError: PytorchStreamReader failed reading zip archive: failed finding central "
            "directory",
            "safetensors_rust.SafetensorError: Error while deserializing header: HeaderTooLarge",
            "_pickle.UnpicklingError: invalid load key, 'v'.",
        ],
        ["loaded the header"],
    ),
    (
        C.EXTERNAL_SERVICE,
        "licence server",
        [
            "FlexNet Licensing error:-15,570. System Error: 115",
            "Cannot connect to license server system.",
            "RLM error: no license available (-17)",
            "Failed to check out license for toolbox",
            "Licensed number of users already reached.",
        ],
        ["License: Apache-2.0", "license_plate detector failed", "the licence file is in place"],
    ),
    (
        C.EXTERNAL_SERVICE,
        "name resolution",
        [
            "socket.gaierror: [Errno -3] Temporary failure in name resolution",
            "socket.gaierror: [Errno -2] Name or service not known",
        ],
        [
            "[c10d] The IPv4 network addresses of (n1, 29500) cannot be retrieved (gai error: -3 - "
            "Temporary failure in name resolution)."
        ],
    ),
    (
        C.EXTERNAL_SERVICE,
        "server error",
        [
            "huggingface_hub.errors.HfHubHTTPError: 503 Server Error: Service Temporarily "
            "Unavailable for url: https://huggingface.co/api/models/x",
            "requests.exceptions.HTTPError: 429 Client Error: Too Many Requests for url: https://h",
            "urllib.error.HTTPError: HTTP Error 502: Bad Gateway",
            "botocore.exceptions.ClientError: An error occurred (SlowDown) when calling the "
            "GetObject operation (reached max retries: 4): Please reduce your request rate.",
        ],
        [
            "requests.exceptions.HTTPError: 404 Client Error: Not Found for url: https://h/x",
            "401 Client Error: Unauthorized",
            "An error occurred (NoSuchKey) when calling the GetObject operation",
            "step 503 loss 2.0",
        ],
    ),
    (
        C.EXTERNAL_SERVICE,
        "service does not answer",
        [
            "requests.exceptions.ConnectionError: HTTPSConnectionPool(host='huggingface.co', "
            "port=443): Max retries exceeded with url: /x",
            "botocore.exceptions.EndpointConnectionError: Could not connect to the endpoint URL",
            "OSError: We couldn't connect to 'https://huggingface.co' to load this file",
            "ConnectionRefusedError: [Errno 111] Connection refused",
            "httpx.ConnectTimeout: timed out",
            "TimeoutError: The read operation timed out",
        ],
        [
            "WARNING Retrying (Retry(total=2)) after connection broken by 'ReadTimeoutError': "
            "Max retries exceeded with url",
            "torch.distributed.DistNetworkError: [c10d] http://n1:1 Connection refused",
            "BrokenPipeError: [Errno 32] Broken pipe",
        ],
    ),
    (
        C.EXTERNAL_SERVICE,
        "tracking server",
        [
            "wandb.errors.errors.CommError: Error communicating with wandb process",
            "wandb: ERROR Network error (HTTPError)",
            "mlflow.exceptions.MlflowException: API request to http://h/api failed",
        ],
        [
            "wandb: Synced 5 files",
            "mlflow: run finished",
            "wandb: Network error (ConnectTimeout), entering retry loop.",
            "wandb: Network error resolved after 0:01:02, resuming normal operation.",
        ],
    ),
    (
        C.HANG,
        "collective timed out",
        [
            "[Rank 3] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=7, OpType="
            "ALLREDUCE, Timeout(ms)=600000) ran for 600038 milliseconds before timing out.",
            "[../third_party/gloo/gloo/transport/tcp/unbound_buffer.cc:84] Timed out waiting "
            "1800000ms for recv operation to complete",
        ],
        ["the watchdog of the loader is fine", "timeout of 600 s for collectives"],
    ),
    (
        C.NCCL_ERROR,
        "port of the network",
        ["NCCL WARN NET/IB : mlx5_1:1 Got non-fatal async event: port error(10)"],
        ["NCCL WARN NET/IB : mlx5_1:1 Got non-fatal async event: port active(9)"],
    ),
    (
        C.NCCL_ERROR,
        "meeting of the ranks",
        [
            "torch.distributed.DistNetworkError: The client socket has timed out after 600000ms "
            "while trying to connect to (n1, 29500).",
            "Timed out after 1801 seconds waiting for clients. 3/4 clients joined.",
            "[c10d] The server socket has failed to bind to 0.0.0.0:29500 (errno: 98 - Address "
            "already in use).",
        ],
        ["OSError: [Errno 98] Address already in use"],
    ),
    (
        C.NCCL_ERROR,
        "peer gone",
        [
            "RuntimeError: [../third_party/gloo/gloo/transport/tcp/pair.cc:534] Connection closed "
            "by peer [10.0.0.1]:33232",
            "ncclRemoteError: A call failed possibly due to a network error or a remote process "
            "exiting prematurely.",
            "[rank1]: recvValue failed on SocketImpl(fd=3): Connection was likely closed.",
            "NCCL WARN NET/IB : Got completion from peer 10.0.0.1<4791> with status=12 opcode=0",
            "[E] [c10d] TCPStore client: Connection reset by peer",
        ],
        ["ConnectionResetError: [Errno 104] Connection reset by peer", "peer 3 closed the file"],
    ),
    (
        C.NCCL_ERROR,
        "NCCL",
        [
            "torch.distributed.DistBackendError: NCCL error in: ProcessGroupNCCL.cpp:1234, "
            "unhandled system error, NCCL version 2.20.5",
            "ncclSystemError: System call (e.g. socket, malloc) or external library call failed",
        ],
        ["NCCL INFO Using network IB", "NCCL version 2.20.5+cuda12.4"],
    ),
]


def test_every_row_of_the_table_has_its_examples() -> None:
    assert [(row.cause, row.label) for row in KNOWN_ERRORS] == [row[:2] for row in ROWS]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row[0].value}-{row[1]}")
def test_what_a_row_takes_and_what_it_leaves(row: tuple[Cause, str, list[str], list[str]]) -> None:
    cause, label, said, not_said = row
    for text in said:
        labels = {match.label: match for match in find_last(f"before\n{text}\nafter\n")}
        assert label in labels, text
        assert labels[label].text in " ".join(text.split())
        first = find_cause(text)
        assert first is not None
        assert first.cause is cause, (text, first)
    for text in not_said:
        assert label not in {match.label for match in find_last(text)}, text


@pytest.mark.parametrize(
    ("text", "cause", "label"),
    [
        # NCCL only passes on what CUDA said.
        (
            "torch.distributed.DistBackendError: NCCL error in: ProcessGroupNCCL.cpp:3356, "
            "unhandled cuda error\nncclUnhandledCudaError: Call to CUDA function failed.\n"
            "Last error:\nCuda failure 'an illegal memory access was encountered'",
            C.APP_ERROR,
            "illegal access of a kernel",
        ),
        # The kernel's own words beside the program's.
        (
            "CUDA error: an illegal memory access was encountered\n"
            "NVRM: Xid (PCI:0000:3b:00): 94, pid=1, Contained ECC error",
            C.GPU_ERROR,
            "Xid",
        ),
        (
            "c10d: Connection reset by peer\n"
            "[Rank 0] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=1)",
            C.HANG,
            "collective timed out",
        ),
    ],
)
def test_of_several_texts_the_one_of_higher_authority_counts(
    text: str, cause: Cause, label: str
) -> None:
    found = find_cause(text)
    assert found is not None
    assert (found.cause, found.label) == (cause, label)


def test_source_lines_of_tracebacks_are_no_errors() -> None:
    text = (
        "Traceback (most recent call last):\n"
        '  File "/home/u/No space left on device/train.py", line 3, in f\n'
        '    raise OSError("No space left on device")\n'
        "KeyError: 'x'\n"
    )
    assert find_cause(text) is None
    labelled = "".join(f" 2: {line}\n" for line in text.splitlines())
    assert find_cause(labelled) is None
    assert find_cause(text + "OSError: [Errno 28] No space left on device\n") is not None


def test_guesses_of_others_are_no_observations() -> None:
    assert find_cause("The loss is NaN, which may be caused by an uncorrectable ECC error") is None
    # What is guessed at behind the observation leaves it one.
    found = find_cause("ncclSystemError: it can be also caused by unexpected exit of a peer")
    assert found is not None
    assert found.cause is C.NCCL_ERROR


@pytest.mark.parametrize(
    "line",
    [
        "No space left on device, falling back to /tmp",
        "WARNING No space left on device",
        "No space left on device (ignored)",
        "No space left on device, using /tmp instead",
        "retry 1/3 after No space left on device",
    ],
)
def test_who_goes_on_has_not_ended_of_it(line: str) -> None:
    assert find_cause(line) is None
    found = find_cause(f"{line}\nretry 3/3 failed: No space left on device\n")
    assert found is not None
    assert found.text.startswith("retry 3/3")


def test_what_torch_advises_beside_an_error_leaves_it_one() -> None:
    text = "NCCL error in: x.cpp:1, unhandled system error (run with NCCL_DEBUG=INFO for details)"
    found = find_cause(text)
    assert found is not None
    assert found.cause is C.NCCL_ERROR


def test_the_last_of_the_known_texts_first() -> None:
    text = (
        "MemoryError\nOSError: [Errno 122] Disk quota exceeded\nMemoryError\nbye\n\n"
        "srun: error: n1: task 0: Exited with exit code 1\nslurmstepd-n1: error: x\n"
    )
    found = [(each.cause, each.behind) for each in find_last(text)]
    assert found == [(C.HOST_OOM, 1), (C.STORAGE, 2)]
    peers = f"{text}gloo: Connection closed by peer\n"
    assert next(find_last(peers)).follows
    assert not next(find_last(peers, followers=False)).follows


def test_who_only_follows() -> None:
    followers = {row.label for row in KNOWN_ERRORS if row.follows}
    assert followers == {"collective timed out", "peer gone"}
    found = find_cause("gloo/transport/tcp/pair.cc:534] Connection closed by peer [10.0.0.1]:1")
    assert found is not None
    assert found.follows


def test_a_long_line_is_shown_where_the_words_are() -> None:
    found = find_cause("x" * 5000 + " No space left on device " + "y" * 5000)
    assert found is not None
    assert "No space left on device" in found.text
    assert len(found.text) <= 300


def test_only_the_end_of_a_long_text_counts() -> None:
    text = "No space left on device\n" + "all is well\n" * 200_000
    assert find_cause(text) is None


PIECES = st.sampled_from(
    ["Xid (PCI:0000:3b:00): ", "79", "NCCL WARN ", "NET/IB ", "https://", "Connection refused",
     "version `GLIBC_2.3", "' not found", "cannot import name ", " from ", "site-packages", "\n",
     "\r", "c10d", "(", "[", " " * 30, "retrying", "may be caused by", "MemoryError", "\0", "é"]
)  # fmt: skip


@given(st.one_of(st.text(max_size=400), st.lists(PIECES, max_size=50).map("".join)))
def test_any_text_is_read(text: str) -> None:
    for match in find_last(text):
        assert match.text
        assert "\n" not in match.text


@pytest.mark.parametrize(
    "piece",
    ["a", "Xid (", "c10d ", "NCCL WARN NET/IB ", "https://a ", "cannot import name a from ",
     "    No space left on device\n"],
)  # fmt: skip
def test_much_nonsense_is_read_in_no_time(piece: str) -> None:
    text = piece * (200_000 // len(piece))
    began = time.process_time()
    find_cause(text)
    list(find_last(text))
    assert time.process_time() - began < 2
