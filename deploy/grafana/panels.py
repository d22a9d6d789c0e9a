"""What the dashboard shows: rows of panels, each with its queries. dashboard.py makes Grafana's JSON of it.

In the expressions $I stands for the filter by instance and $R for the range of a rate.
"""

from __future__ import annotations

import dataclasses

QUANTILES = ("0.5", "0.99")


@dataclasses.dataclass(frozen=True)
class Query:
    expr: str
    legend: str = "{{instance}}"
    heatmap: bool = False


@dataclasses.dataclass(frozen=True)
class Panel:
    """`kind` is stat, timeseries or heatmap; `unit` one of Grafana's; 24 columns make a line."""

    kind: str
    title: str
    description: str
    unit: str
    queries: tuple[Query, ...]
    width: int = 8
    thresholds: tuple[float, float] | None = None  # yellow from, red from
    mappings: tuple[tuple[str, str, str], ...] = ()  # value, text, color
    show_name: bool = False  # a stat that shows its legend instead of its value
    stacked: bool = False


def stat(title: str, description: str, unit: str, expr: str, legend: str = "{{instance}}", **options) -> Panel:
    return Panel("stat", title, description, unit, (Query(expr, legend),), width=4, **options)


def lines(title: str, description: str, unit: str, *queries: tuple[str, str], **options) -> Panel:
    return Panel("timeseries", title, description, unit, tuple(Query(*query) for query in queries), **options)


def heatmap(title: str, description: str, unit: str, histogram: str, labels: str = "") -> Panel:
    expr = f"sum by (le) (increase({histogram}_bucket{{$I{labels}}}[$R]))"
    return Panel("heatmap", title, description, unit, (Query(expr, "{{le}}", heatmap=True),), width=12)


def quantile(q: str, histogram: str, by: str = "", labels: str = "") -> str:
    groups = f"{by}, le" if by else "le"
    return f"histogram_quantile({q}, sum by ({groups}) (rate({histogram}_bucket{{$I{labels}}}[$R])))"


def mean(histogram: str, labels: str = "") -> str:
    return f"sum(rate({histogram}_sum{{$I{labels}}}[$R])) / sum(rate({histogram}_count{{$I{labels}}}[$R]))"


SERVER_ERRORS = "UNKNOWN|INTERNAL|DATA_LOSS|UNIMPLEMENTED|UNAVAILABLE"
LOST_SESSION = "NEVER_EXISTED|EXPIRED|EVICTED|CLOSED|SPILL_DAMAGED"

HEALTH = (
    stat("Scrapes", "Whether Prometheus reaches the instance. Gone from here altogether: no such container is found.",
         "none", 'up{job="attnd", $I}', mappings=(("0", "DOWN", "red"), ("1", "up", "green"))),
    stat("Takes work", "From start-up to the first SIGTERM. While it drains it finishes what it has.", "none",
         "attnd_ready{$I} - attnd_draining{$I}",
         mappings=(("-1", "draining", "yellow"), ("0", "not ready", "red"), ("1", "ready", "green"))),
    stat("Alerts firing", "Of those in deploy/prometheus/rules. deploy/README.md has an entry for each.", "none",
         'count(ALERTS{alertname=~"Attnd.+", alertstate="firing"}) or vector(0)', "alerts", thresholds=(1, 2)),
    stat("Build", "Version, instruction set in use, version of oneDNN.", "none", "attnd_build_info{$I}",
         "{{version}}, {{isa}}, oneDNN {{onednn}}", show_name=True),
    stat("Up for", "Since the process started. A start loses all sessions that were not saved (--snapshot_on_drain).", "s",
         'time() - process_start_time_seconds{job="attnd", $I}'),
    stat("Server errors", "Share of RPCs that failed by the server's own fault.", "percentunit",
         f'sum(rate(attnd_rpc_handled_total{{$I, code=~"{SERVER_ERRORS}"}}[$R])) / '
         "(sum(rate(attnd_rpc_handled_total{$I}[$R])) > 0) or vector(0)", "errors", thresholds=(0.01, 0.05)),
    stat("Sessions", "Open sessions.", "short", "sum(attnd_sessions_active{$I})", "sessions"),
    stat("Cache taken", "Reserved share of the key/value cache. Beyond it: CACHE_FULL.", "percentunit",
         "sum(attnd_kv_cache_reserved_bytes{$I}) / sum(attnd_kv_cache_capacity_bytes{$I})", "reserved",
         thresholds=(0.8, 0.9)),
    stat("Waiting", "Requests that wait for compute.", "short", "sum(attnd_queue_depth{$I})", "requests"),
    stat("Tokens per second", "Tokens of steps that were answered, layers counted one by one.", "short",
         "sum(rate(attnd_tokens_total{$I}[$R]))", "tokens"),
    stat("Decode p99", "One in a hundred decode steps takes longer, from arrival to answer in the engine.", "s",
         quantile("0.99", "attnd_step_duration_seconds", labels=', phase="decode"'), "p99", thresholds=(0.1, 0.5)),
    stat("Refused per second", "Errors that went to clients, of all reasons.", "short",
         "sum(rate(attnd_rejected_total{$I}[$R]))", "errors", thresholds=(1, 100)),
)

RPCS = (
    lines("RPCs by method", "Ended RPCs; a stream counts once, when it ends.", "reqps",
          ("sum by (method) (rate(attnd_rpc_handled_total{$I}[$R]))", "{{method}}")),
    lines("RPCs that did not end well, by method", "Every code but OK.", "reqps",
          ('sum by (method) (rate(attnd_rpc_handled_total{$I, code!="OK"}[$R]))', "{{method}}")),
    lines("RPCs that did not end well, by code", "Every code but OK.", "reqps",
          ('sum by (code) (rate(attnd_rpc_handled_total{$I, code!="OK"}[$R]))', "{{code}}")),
    lines("Duration by method, p50", "Time of an RPC in the server. A stream's is that of the whole stream.", "s",
          (quantile("0.5", "attnd_rpc_duration_seconds", "method"), "{{method}}"), width=12),
    lines("Duration by method, p99", "Time of an RPC in the server. A stream's is that of the whole stream.", "s",
          (quantile("0.99", "attnd_rpc_duration_seconds", "method"), "{{method}}"), width=12),
)


def split_panel(phase: str, q: str) -> Panel:
    parts = (("queue", "waiting"), ("compute", "computing"), ("step", "total"))
    labels = f', phase="{phase}"'
    queries = ((quantile(q, f"attnd_{part}_duration_seconds", labels=labels), name) for part, name in parts)
    name = "p" + f"{float(q) * 100:g}"
    return lines(f"{phase.capitalize()} step, {name}",
                 "Waiting: from arrival to the first compute. Computing: all chunks. Total: from arrival to answer. "
                 "Quantiles do not add up.", "s", *queries, width=6)


LATENCY = (
    *(split_panel(phase, q) for phase in ("decode", "prefill") for q in QUANTILES),
    heatmap("Decode steps, total", "How many took how long.", "s", "attnd_step_duration_seconds",
            ', phase="decode"'),
    heatmap("Decode steps, waiting", "How many waited how long.", "s", "attnd_queue_duration_seconds",
            ', phase="decode"'),
    lines("Mean decode step, stacked", "Where the time of a decode step goes.", "s",
          (mean("attnd_queue_duration_seconds", ', phase="decode"'), "waiting"),
          (mean("attnd_compute_duration_seconds", ', phase="decode"'), "computing"), width=12, stacked=True),
    lines("Mean prefill step, stacked", "Where the time of a prefill step goes.", "s",
          (mean("attnd_queue_duration_seconds", ', phase="prefill"'), "waiting"),
          (mean("attnd_compute_duration_seconds", ', phase="prefill"'), "computing"), width=12, stacked=True),
)

SESSIONS = (
    lines("Open sessions", "Beyond the limit: SESSION_LIMIT.", "short",
          ("attnd_sessions_active{$I}", "open, {{instance}}"), ("attnd_sessions_limit{$I}", "limit, {{instance}}")),
    lines("Created and ended", "Expired: idle for longer than its time to live, and never closed.", "cps",
          ("sum by (origin) (rate(attnd_sessions_created_total{$I}[$R]))", "created ({{origin}})"),
          ("sum by (reason) (rate(attnd_sessions_closed_total{$I}[$R]))", "{{reason}}")),
    lines("Calls on sessions that are not there",
          "NEVER_EXISTED: another replica's session, or one from before a restart. EVICTED: dropped to make room. "
          "SPILL_DAMAGED: its file on disk is damaged.", "cps",
          (f'sum by (reason) (rate(attnd_rejected_total{{$I, reason=~"{LOST_SESSION}"}}[$R]))', "{{reason}}")),
    lines("Open streams", "StepStream calls. Beyond the limit they are refused.", "short",
          ("attnd_streams_active{$I}", "open, {{instance}}"), ("attnd_streams_limit{$I}", "limit, {{instance}}")),
    lines("Connections refused", "Closed at once because as many were open as may be.", "cps",
          ("rate(attnd_connections_refused_total{$I}[$R])", "{{instance}}")),
    lines("Tokens held", "Of each session those of its longest layer.", "short",
          ("attnd_kv_cache_tokens{$I}", "{{instance}}")),
)

CACHE = (
    lines("Key/value cache",
          "used <= reserved <= capacity. Shared: in blocks that several sessions hold, counted once. Spilled: idle "
          "sessions on disk, not part of used.", "bytes",
          *((f"sum(attnd_kv_cache_{name}_bytes{{$I}})", name)
            for name in ("capacity", "reserved", "used", "shared", "spilled")), width=12),
    lines("Cache taken", "Reserved and used share of the capacity.", "percentunit",
          ("attnd_kv_cache_reserved_bytes{$I} / attnd_kv_cache_capacity_bytes{$I}", "reserved, {{instance}}"),
          ("attnd_kv_cache_used_bytes{$I} / attnd_kv_cache_capacity_bytes{$I}", "used, {{instance}}"), width=12),
    lines("Reserved and empty", "Promised to sessions (reserve_tokens) and not used: nobody else can have it.", "bytes",
          ("attnd_kv_cache_reserved_bytes{$I} - attnd_kv_cache_used_bytes{$I}", "{{instance}}"), width=12),
    lines("Sessions that made room", "Dropped: their clients are told EVICTED. Spilled: on disk, their next step brings "
          "them back.", "cps",
          ("sum by (reason) (rate(attnd_kv_cache_evictions_total{$I}[$R]))", "{{reason}}"), width=12),
)


def per_op(expr: str, *ops: str) -> tuple[tuple[str, str], ...]:
    return tuple((expr.replace("$OP", op), op) for op in ops)


ON_DISK = (
    stat("When the cache is full", "--eviction: none or lru. Without it requests that need memory are refused.", "none",
         "attnd_kv_cache_eviction_enabled{$I}",
         mappings=(("0", "refuses", "blue"), ("1", "makes room", "green"))),
    stat("Sessions on disk", "Open, and not in the cache.", "short", "sum(attnd_sessions_spilled{$I})", "sessions"),
    stat("Their files", "Bytes on disk.", "bytes", "sum(attnd_kv_cache_spilled_bytes{$I})", "bytes"),
    stat("Not written or not read", "Since the start, of all kinds. Each that could not be read is a lost session.",
         "short", "sum(attnd_snapshot_failures_total{$I})", "failures", thresholds=(1, 10)),
    stat("Sessions lost", "Since the start: their files were damaged.", "short",
         'sum(attnd_sessions_closed_total{$I, reason="lost"})', "lost", thresholds=(1, 1)),
    stat("Restored at start", "Sessions of an earlier process that were found.", "short",
         'sum(attnd_sessions_created_total{$I, origin="restore"})', "sessions"),
    lines("Sessions on disk", "Spilled while memory was short, or saved by an earlier process and not asked for yet.",
          "short", ("attnd_sessions_spilled{$I}", "on disk, {{instance}}"),
          ("attnd_sessions_active{$I}", "open, {{instance}}")),
    lines("Spill disk", "Free space of the file system of --spill_dir beside what sessions take there.", "bytes",
          ("attnd_spill_disk_size_bytes{$I}", "size, {{instance}}"),
          ("attnd_spill_disk_available_bytes{$I}", "free, {{instance}}"),
          ("attnd_kv_cache_spilled_bytes{$I}", "sessions, {{instance}}")),
    lines("Whole sessions written and read", "Spill and restore: by the server. Export and import: by clients. Drain: "
          "saved at the end.", "cps",
          ("sum by (op) (rate(attnd_snapshot_duration_seconds_count{$I}[$R]))", "{{op}}")),
    lines("Restore, duration", "How long the step of a session on disk waits for it.", "s",
          *((quantile(q, "attnd_snapshot_duration_seconds", labels=', op="restore"'), f"p{float(q) * 100:g}")
            for q in ("0.5", "0.95", "0.99"))),
    lines("Spill, duration", "Time to write a session.", "s",
          *((quantile(q, "attnd_snapshot_duration_seconds", labels=', op="spill"'), f"p{float(q) * 100:g}")
            for q in ("0.5", "0.95", "0.99"))),
    lines("Failures", "Sessions that could not be written or read.", "cps",
          ("sum by (op) (rate(attnd_snapshot_failures_total{$I}[$R]))", "{{op}}")),
    lines("Bytes written and read", "Of whole sessions, by what for.", "Bps",
          ("sum by (op) (rate(attnd_snapshot_bytes_total{$I}[$R]))", "{{op}}"), width=12),
    lines("Speed while it writes or reads", "Bytes by the time that it took: about the disk's speed, the page cache "
          "included.", "Bps",
          *per_op('sum(rate(attnd_snapshot_bytes_total{$I, op="$OP"}[$R])) / '
                  'sum(rate(attnd_snapshot_duration_seconds_sum{$I, op="$OP"}[$R]))', "spill", "restore"), width=12),
)

SCHEDULER = (
    lines("Requests waiting", "Beyond the limit: QUEUE_FULL.", "short",
          ("attnd_queue_depth{$I}", "waiting, {{instance}}"), ("attnd_queue_limit{$I}", "limit, {{instance}}")),
    lines("Tokens waiting", "Beyond the limit: QUEUE_FULL.", "short",
          ("attnd_queue_tokens{$I}", "waiting, {{instance}}"), ("attnd_queue_tokens_limit{$I}", "limit, {{instance}}")),
    lines("Requests in memory", "Bytes of requests that wait or are computed. Beyond the limit: QUEUE_FULL.", "bytes",
          ("attnd_inflight_bytes{$I}", "in memory, {{instance}}"),
          ("attnd_inflight_bytes_limit{$I}", "limit, {{instance}}")),
    lines("Segments per batch", "One segment is one session's part of a step. More together: better use of memory.",
          "short", (mean("attnd_batch_segments"), "mean"), (quantile("0.99", "attnd_batch_segments"), "p99")),
    lines("Tokens per batch", "Of all segments together; long prefills are cut to --prefill_chunk_tokens.", "short",
          (mean("attnd_batch_tokens"), "mean"), (quantile("0.99", "attnd_batch_tokens"), "p99")),
    lines("Batches per second", "How often compute started anew.", "cps",
          ("sum(rate(attnd_batch_segments_count{$I}[$R]))", "batches")),
    lines("Tokens per second", "Of steps that were answered, layers counted one by one.", "short",
          ("sum by (phase) (rate(attnd_tokens_total{$I}[$R]))", "{{phase}}"), width=6),
    lines("Requests in flight", "Received and not yet answered, waiting ones included.", "short",
          ("attnd_requests_in_flight{$I}", "{{instance}}"), width=6),
    lines("Refused, by reason", "Errors that went to clients; the reasons are those of the wire contract.", "cps",
          ("sum by (reason) (rate(attnd_rejected_total{$I}[$R]))", "{{reason}}"), width=6),
    lines("Given up, by stage", "Dropped because their client was gone or out of time.", "cps",
          ("sum by (stage) (rate(attnd_cancelled_total{$I}[$R]))", "{{stage}}"), width=6),
)

BANDWIDTH = (
    lines("Keys and values read", "Memory bandwidth that attention uses. attnd_bench decode prints the machine's roof.",
          "Bps", ("sum by (instance) (rate(attnd_kv_read_bytes_total{$I}[$R]))", "{{instance}}"), width=12),
    lines("Keys and values read per token", "Grows with the context; falls when tokens share what is read.", "bytes",
          ("sum(rate(attnd_kv_read_bytes_total{$I}[$R])) / sum(rate(attnd_tokens_total{$I}[$R]))", "per token"),
          width=12),
)

PROCESS = (
    lines("Processors", "Cores in use. attnd computes on --compute_threads of them.", "short",
          ('rate(process_cpu_seconds_total{job="attnd", $I}[$R])', "{{instance}}"), width=6),
    lines("Memory", "At its limit the process is killed, and all sessions are lost.", "bytes",
          ('process_resident_memory_bytes{job="attnd", $I}', "resident, {{instance}}"),
          ("attnd_memory_limit_bytes{$I}", "limit, {{instance}}"), width=6),
    lines("File descriptors", "One a connection.", "short",
          ('process_open_fds{job="attnd", $I}', "open, {{instance}}"),
          ('process_max_fds{job="attnd", $I}', "limit, {{instance}}"), width=6),
    lines("Threads", "Of the process: compute, gRPC and metrics.", "short",
          ('process_threads{job="attnd", $I}', "{{instance}}"), width=6),
)

ROWS = (
    ("Health", HEALTH),
    ("Rate, errors, duration by method", RPCS),
    ("Latency of steps", LATENCY),
    ("Sessions", SESSIONS),
    ("Cache memory", CACHE),
    ("Sessions on disk", ON_DISK),
    ("Scheduler", SCHEDULER),
    ("Memory bandwidth", BANDWIDTH),
    ("Process", PROCESS),
)
