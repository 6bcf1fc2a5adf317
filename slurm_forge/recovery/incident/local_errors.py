"""Error texts of a process's own problems, each indicating a cause, in order of authority.

Reports of hardware and kernel come first.  A row describes an observation, never a remedy.
"""

from __future__ import annotations

from slurm_forge.recovery.incident.error_pattern import (
    Pattern,
    row,
)
from slurm_forge.vocabulary.cause import Cause

# NVIDIA's Xid catalogue: those whose remedy is a reset of the GPU, its repair, or its link's
# (48 double-bit error, 63/64 row remapping, 74 NVLink, 79 off the bus, 94/95 contained and
# uncontained memory error, 119/120 GSP, 144-150 later NVLink errors).  13, 31, 43, 45, 68 and 109
# are caused by programs.
_XIDS = "48|62|63|64|74|79|92|94|95|110|119|120|121|136|140|143|14[4-9]|150"

# CUDA's error strings are those of cudaGetErrorString (CUDA runtime API, "Data types").
_HARDWARE = (
    row(
        Cause.GPU_ERROR,
        "Xid",
        # A single number: a list is advice on what to look for.
        rf"\b(?:Xid|XID)\b(?: ?\([^)\n]{{1,40}}\))?(?:[ :=#]|errors?|found){{0,8}}\b(?:{_XIDS})\b"
        r"(?! ?[,/|;-] ?[0-9])",
        r"\bSXid\b[^\n]{0,80}\bFatal\b",
    ),
    row(
        Cause.GPU_ERROR,
        "GPU off the bus",
        r"fallen off the bus",
        r"GPU is lost",
        r"Unable to determine the device handle for GPU",
        r"RmInitAdapter failed",
    ),
    row(
        Cause.GPU_ERROR,
        "uncorrectable ECC error",
        r"(?i:uncorrect(?:able|ed) ECC)",
        r"(?i:double[- ]bit ECC error)",
        r"amdgpu[^\n]{0,100}uncorrectable hardware errors? detected",
        r"(?i:row[- ]remapping failure)",
        unless=r"[:=|] {0,20}(?:0|N/A|No)\b|\b[Nn]o (?:uncorrect|double|row)",
    ),
    row(
        Cause.GPU_ERROR,
        "NVLink fault",
        r"uncorrectable NVLink error",
        r"over nvlink or a hardware error",
        r"(?:CUDA|HIP) error: hardware stack error",
    ),
    row(
        Cause.GPU_ERROR,
        "GPU not usable",
        r"CUDA-capable device(?:\(s\) is/are|s are) busy or unavailable",
        r"\bsystem not yet initialized",
        r"CUDA unknown error",
        r"(?:CUDA|HIP) error: unknown error",
        r"\bAcceleratorError: [A-Z]{2,10} error: unknown error",
    ),
    row(
        Cause.NODE_FAIL,
        "memory error of the node",
        r"UNCORRECTABLE MEMORY ERROR AT",
        # "Machine check events logged" is also printed for corrected errors.
        r"\[Hardware Error\]: (?:Machine check(?! events logged)|Uncorrected)",
    ),
)

# Texts of PyTorch's allocators, CUDA's libraries, JAX, NumPy, the kernel and slurmstepd.
_MEMORY = (
    row(
        Cause.CUDA_OOM,
        "GPU memory",
        r"\b(?:CUDA|HIP|XPU)(?: error:)? out of memory",
        r"\bcuda\.(?:memory\.)?OutOfMemoryError\b",
        r"\btorch\.OutOfMemoryError\b",
        # Accelerators of other vendors use their own names.
        r"\b[A-Z]{2,10} out of memory\. Tried to allocate",
        r"MPS backend out of memory",
        r"Cuda failure (?:2 )?'out of memory'",
        r"\b(?:CUBLAS|HIPBLAS|CUDNN|CUSOLVER|CUSPARSE)_STATUS_ALLOC_FAILED",
        # Creating a handle needs memory, and no other reason is common.
        r"\b(?:CUBLAS|HIPBLAS)_STATUS_NOT_INITIALIZED",
        r"Triton Error \[(?:CUDA|HIP)\]: out of memory",
        r"\bResourceExhaustedError\b[^\n]{0,200}\bOOM\b",
        r"\bOOM when allocating tensor",
        r"No available memory for the cache blocks",
        r"CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED",
        r"CUFFT_ALLOC_FAILED",
        r"CUDA_ERROR_OUT_OF_MEMORY",
        r"RESOURCE_EXHAUSTED: Out of memory",
    ),
    row(
        Cause.HOST_OOM,
        "shared memory",
        r"out of shared memory",
        r"unable to allocate shared memory",
        r"unable to write to file </torch_",
        r"Unexpected bus error encountered in worker",
        r"/dev/shm[^\n]{0,120}[Nn]o space left on device",  # noqa: S108
        r"[Nn]o space left on device[^\n]{0,20}/dev/shm",
    ),
    row(
        Cause.HOST_OOM,
        "killed for memory",
        r"\b(?:oom[-_]kill(?:er|ed)?\b|OOM [Kk]ill)",
        r"Out of memory: Killed process",
        r"cgroup out[- ]of[- ]memory",
        unless=r"oom_kill(?:_disable)? 0\b",
    ),
    row(
        Cause.HOST_OOM,
        "memory of the node",
        r"DefaultCPUAllocator: (?:can't allocate|not enough) memory",
        r"CUDNN_STATUS_INTERNAL_ERROR_HOST_ALLOCATION_FAILED",
        r"\bstd::bad_alloc\b",
        r"^(?:[\w.]{1,80}\.)?_?(?:Array)?MemoryError\b",
        r"Unable to allocate [0-9.]{1,12} [KMGTP]iB for an array",
        r"Cannot allocate memory",
    ),
    row(
        Cause.HOST_OOM,
        "threads of the node",
        r"can't start new thread",
        r"pthread_create failed for thread",
    ),
    # The kernel's counters show whether memory was the reason.
    row(
        Cause.CRASH,
        "loader worker gone",
        r"DataLoader worker \(pid(?:\(s\))? [0-9, ]{1,200}\) "
        r"(?:is killed by signal: (?!Bus error)|exited unexpectedly)",
    ),
)

# A log line, not an exception, about a directory that only serves as a cache.
_OF_A_CACHE = r"^(?!(?: {0,8}[0-9]{1,7}: ?)?(?:\[rank[0-9]+\]: ?)?[\w.]*Error: )[^\n]*/tmp/"

# errno(3) and its strings; Lustre evicts with ESHUTDOWN, FUSE mounts die with ENOTCONN.
_STORAGE = (
    row(
        Cause.STORAGE,
        "disk full",
        r"(?i:no space left on device)",
        r"\bENOSPC\b",
        unless=_OF_A_CACHE,
    ),
    row(Cause.STORAGE, "quota exceeded", r"[Dd]isk quota exceeded", r"\bEDQUOT\b"),
    row(
        Cause.STORAGE,
        "stale file handle",
        r"Stale (?:NFS )?file handle",
        r"\bESTALE\b",
        unless=r"\b(?:rm|rmdir): |cannot remove",
    ),
    row(
        Cause.STORAGE,
        "read-only file system",
        r"Read-only file system",
        r"\bEROFS\b",
        unless=rf"[Mm]atplotlib|{_OF_A_CACHE}",
    ),
    row(
        Cause.STORAGE,
        "file system gone",
        r"Transport endpoint is not connected: b?['\"]?/",
        r"Cannot send after transport endpoint shutdown",
        r"\[Errno 110\] Connection timed out: b?['\"]?/",
    ),
    row(
        Cause.STORAGE,
        "I/O error",
        r"Input/output error",
        r"Remote I/O error",
        r"Structure needs cleaning",
        r"PytorchStreamWriter failed writing",
        r"\bunable to lock file\b",
        r"inline_container\.cc[^\n]{0,60}unexpected pos",
    ),
)

# CUDA describes "unspecified launch failure" mostly as an invalid pointer in a kernel.
_PROGRAM = (
    row(
        Cause.APP_ERROR,
        "device-side assert",
        r"device-side assert(?:ion)? triggered",
        r"\bblock: \[[0-9,]{1,30}\], thread: \[[0-9,]{1,30}\] Assertion",
    ),
    row(
        Cause.APP_ERROR,
        "illegal access of a kernel",
        r"an illegal memory access was encountered",
        r"\bmisaligned address\b",
        r"unspecified launch failure",
        r"an illegal instruction was encountered",
        r"CUDA_ERROR_ILLEGAL_ADDRESS",
        r"Memory access fault by GPU node",
    ),
    row(
        Cause.APP_ERROR,
        "wrong use of NCCL",
        r"Duplicate GPU detected",
        r"ncclInvalid(?:Usage|Argument)",
    ),
    row(
        Cause.APP_ERROR,
        "damaged sample",
        r"\bUnidentifiedImageError\b",
        r"cannot identify image file",
        r"image file is truncated",
        r"\bTruncated File Read\b",
        r"zlib\.error: Error -[0-9]",
    ),
)

# Texts of the dynamic loader (glibc), CUDA, PyTorch's CUDA start-up, NumPy, importlib, NCCL.
_ENVIRONMENT = (
    row(
        Cause.ENV_MISMATCH,
        "shared library missing",
        r"cannot open shared object file",
        r"cannot allocate memory in static TLS block",
        # Optional hardware support that is missing.
        unless=r"Failed to load image|\bdlerror\b|Could not load dynamic library|NET/Plugin",
    ),
    # Printed by the signal shield, by slurmstepd when it starts a task, and by apptainer and
    # singularity.
    row(
        Cause.ENV_MISMATCH,
        "program missing",
        # Nodes without Slurm's commands are common, and never the reason for an end.
        r"\bslurm_forge: (?!(?:[\w./-]{0,200}/)?s(?:acct|batch|cancel|control|info|queue)\b)"
        r"[^\n]{1,300} can't be started: "
        r"(?:No such file|Permission denied|Exec format)",
        r"\bslurmstepd[^:\s]{0,80}: error: execve\(\): [^\n]{1,300}: "
        r"(?:No such file|Permission denied|Exec format)",
        r"\bFATAL: {1,8}[Cc]ould not open image [^\n]{1,500}no such file",
    ),
    row(
        Cause.ENV_MISMATCH,
        "binary of another version",
        r"\bundefined symbol: ",
        r"numpy\.core\.multiarray failed to import",
        r"version [`'\u2018]?(?:GLIBC(?:XX)?|CXXABI)_[0-9.]{1,12}['\u2019]? not found",
        r"size changed, may indicate binary incompatibility",
        r"compiled against (?:ABI|API) version 0x",
        r"cannot import name [^\n]{1,200} from [^\n]{1,300}site-packages",
        r"Mismatched NCCL version detected",
        unless=r"Failed to load image",
    ),
    row(
        Cause.ENV_MISMATCH,
        "driver does not fit",
        r"CUDA driver version is insufficient",
        r"NVIDIA driver on your system is too old",
        r"forward compatibility was attempted on non supported HW",
        r"Driver/library version mismatch",
        r"unsupported display driver / cuda driver combination",
        r"PTX was compiled with an unsupported toolchain",
    ),
    row(
        Cause.ENV_MISMATCH,
        "no code for this GPU",
        r"no kernel image is available for execution",
        r"(?:CUDA|HIP) error: invalid device function",
        r"is not compatible with the current PyTorch installation",
    ),
    row(
        Cause.ENV_MISMATCH,
        "no visible GPU",
        r"No (?:CUDA|HIP) GPUs are available",
        r"no CUDA-capable device is detected",
        r"Found no NVIDIA driver on your system",
        r"Torch not compiled with CUDA enabled",
        unless=r"CUDA initialization:",
    ),
    row(
        Cause.ENV_MISMATCH,
        "module missing",
        r"\bNo module named ['\"]?\w",
        r"\bPackageNotFoundError\b",
    ),
)

# torch.nn.Module.load_state_dict in the program itself.  Our own reader raises its own type.
_WEIGHTS = (
    row(
        Cause.APP_ERROR,
        "weights that don't fit",
        r"Error\(s\) in loading state_dict for",
        r"(?:Missing|Unexpected) key\(s\) in state_dict",
        r"size mismatch for [^\n:]{1,300}: copying a param",
    ),
)

# Megatron-LM, DeepSpeed's loss scaler, autograd's anomaly mode.
_NUMBERS = (
    row(
        Cause.NON_FINITE,
        "numbers that are not finite",
        r"\b[Ff]ound (?:NaN|Inf|nan|inf) in (?:local|global) (?:grad|forward|loss)",
        r"Current loss scale already at minimum",
        r"Function '\w{1,100}' returned nan values",
    ),
)

# torch.load, pickle, safetensors.
_CHECKPOINTS = (
    row(
        Cause.CHECKPOINT_BAD,
        "damaged checkpoint file",
        r"PytorchStreamReader failed",
        r"Error while deserializing header",
        r"UnpicklingError: (?:invalid load key|pickle data was truncated)",
        r"Weights only load failed[.:]",
    ),
)

LOCAL_ERRORS: tuple[Pattern, ...] = (
    *_HARDWARE,
    *_MEMORY,
    *_STORAGE,
    *_PROGRAM,
    *_ENVIRONMENT,
    *_WEIGHTS,
    *_NUMBERS,
    *_CHECKPOINTS,
)
