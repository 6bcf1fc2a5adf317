"""Error texts that came over a network, from a service or from another rank."""

from __future__ import annotations

from slurm_forge.recovery.incident.error_pattern import (
    Pattern,
    row,
)
from slurm_forge.vocabulary.cause import Cause

# Connections between ranks fail with the same words as those to a service.
_BETWEEN_RANKS = r"c10d|[Gg]loo|TCPStore|NCCL|nccl|ProcessGroup|[Rr]endezvous|socket\.cpp"
_HTTP_5XX = r"(?:500|502|503|504|520|521|522|523|524|529)"

# A refusal, a number with another meaning, or a builtin exception that only quotes an answer.
_QUOTED = (
    r"\b4(?:0[0-8]|1[0-9]) Client Error"
    r"|\b(?:step|epoch|iter|iteration|batch) [0-9]"
    r"|\b(?:rate|count)[ :=]{1,3}[0-9]"
    r"|\b(?<!\.)(?:RuntimeError|Exception): (?![^\n]{0,500}(?:HTTP|https?://))"
)

# requests/urllib3, huggingface_hub, boto, google and azure clients, wandb, MLflow; glibc's
# getaddrinfo; FlexNet (lmgrd) and RLM, the licence servers that most commercial codes talk to.
SERVICE_ERRORS: tuple[Pattern, ...] = (
    row(
        Cause.EXTERNAL_SERVICE,
        "licence server",
        r"\b(?:FlexNet|FLEXnet|FlexLM|FLEXlm)\b[^\n]{0,100}\b(?:[Ee]rror|[Ff]ail|-[0-9]{1,3},)",
        r"(?i:cannot connect to licen[cs]e server)",
        r"(?i:licen[cs]e server (?:machine )?(?:is down|does not respond|not responding))",
        r"(?i:failed to (?:check ?out|obtain|acquire) (?:a |the )?licen[cs]e)",
        r"(?i:licen[cs]e (?:check ?out|request) (?:failed|denied))",
        r"Licensed number of users already reached",
        r"\bRLM\b[^\n]{0,60}(?:error|\(-[0-9]{1,3}\))",
    ),
    row(
        Cause.EXTERNAL_SERVICE,
        "name resolution",
        r"Temporary failure in name resolution",
        r"Name or service not known",
        r"(?:Failed to resolve|Could not resolve host)",
        unless=_BETWEEN_RANKS,
    ),
    row(
        Cause.EXTERNAL_SERVICE,
        "server error",
        rf"(?<![/\w=.-]){_HTTP_5XX} (?:Server Error|Internal Server Error|Bad Gateway|Service "
        r"(?:Temporarily )?Unavailable|Gateway Time-?out)",
        rf"HTTP Error {_HTTP_5XX}: ",
        r"\b429 (?:Client Error|Too Many Requests)|HTTP Error 429: ",
        r"An error occurred \((?:SlowDown|503|500|InternalError|ServiceUnavailable"
        r"|RequestTimeout|Throttling|ThrottlingException)\)",
        r"\bexceptions\.(?:ServiceUnavailable|TooManyRequests|GatewayTimeout|BadGateway): ",
        r"\bazure\.core\.exceptions\.Service(?:Request|Response)(?:Timeout)?Error",
        unless=_QUOTED,
    ),
    row(
        Cause.EXTERNAL_SERVICE,
        "service does not answer",
        r"Max retries exceeded with url",
        r"\bEndpointConnectionError\b",
        r"Could not connect to the endpoint URL",
        r"\bbotocore\.exceptions\.(?:Connect|Read)(?:ion)?(?:Timeout|Closed)",
        r"[Ww]e couldn't connect to ['\"]?https?://",
        r"\bLocalEntryNotFoundError\b",
        r"\b(?:requests\.exceptions|urllib3\.exceptions|httpx|httpcore)\.(?:Connect|Read|SSL|"
        r"Proxy|NewConnection|Remote|Chunked)\w{0,20}",
        r"\baiohttp\.client_exceptions\.(?:Client|Server)(?:Connect|OS|Disconnect)",
        r"Remote end closed connection without response",
        r"\bThe (?:read|write|handshake) operation timed out",
        r"<urlopen error ",
        r"https?://[^\s'\"]{1,300}[^\n]{0,100}(?:Connection refused|timed out|[Cc]onnect timeout)",
        r"\bConnectionRefusedError: \[Errno 111\]",
        r"\bConnectionResetError: \[Errno 104\]",
        unless=_BETWEEN_RANKS,
    ),
    row(
        Cause.EXTERNAL_SERVICE,
        "tracking server",
        r"\bwandb\.(?:sdk\.[\w.]{1,60}\.|errors\.)?(?:\w{1,20}\.)?CommError\b",
        # Without ERROR it keeps trying, and the program continues.
        r"\bwandb: ERROR Network error",
        r"\bMlflowException: (?:API request to|INTERNAL_ERROR|TEMPORARILY_UNAVAILABLE)",
        unless=r"entering retry loop|resolved after",
    ),
)

# torch.distributed (c10d), gloo and NCCL ("Troubleshooting" in NCCL's manual).  A rank that waited
# for a peer, or whose peer is gone, is not the one to blame.
RANK_ERRORS: tuple[Pattern, ...] = (
    row(
        Cause.HANG,
        "collective timed out",
        r"Watchdog caught collective operation timeout",
        r"Timed out waiting [0-9]{1,12}ms for (?:recv|send) operation",
        r"ProcessGroupNCCL watchdog hang",
        r"ProcessGroupNCCL's watchdog got stuck",
        r"monitoredBarrier[^\n]{0,200}(?:timed out|failed to pass|timeout)",
        follows=True,
    ),
    row(
        Cause.NCCL_ERROR,
        "port of the network",
        r"NET/IB[^\n]{0,120}port error\b",
        r"NET/IB[^\n]{0,80}No device found",
        r"\bUCX\b[^\n]{0,80}Transport retry count exceeded",
    ),
    row(
        Cause.NCCL_ERROR,
        "meeting of the ranks",
        r"The (?:client|server) socket has (?:timed out|failed)",
        r"Timed out after [0-9]{1,9} seconds waiting for clients",
        r"\b[Gg]loo connectFullMesh failed",
        r"c10d[^\n]{0,300}(?:EADDRINUSE|Address already in use)",
    ),
    row(
        Cause.NCCL_ERROR,
        "peer gone",
        r"Connection closed by peer",
        r"\bncclRemoteError\b",
        r"remote process exited or there was a network error",
        r"NCCL communicator was aborted",
        r"NET/IB[^\n]{0,80}Got completion [^\n]{0,80}(?:error|status=)",
        r"Connection was likely closed",
        r"(?:c10d|[Gg]loo|TCPStore|NCCL|nccl|socket\.cpp)[^\n]{0,300}"
        r"(?:Connection re(?:set|fused)|Broken pipe|Connection timed out|[Ss]ocket [Tt]imeout)",
        r"\brecvValue failed",
        follows=True,
    ),
    row(
        Cause.NCCL_ERROR,
        "NCCL",
        r"\bncclSystemError\b",
        r"\bncclInternalError\b",
        r"\bncclUnhandledCudaError\b",
        r"\bunhandled (?:system|cuda) error",
        r"\bNCCL (?:error|Error|failure)\b",
        r"\bDist(?:Backend|Network|Store)Error\b",
        r"\bgloo/(?:transport|rendezvous)/",
    ),
)
