#!/usr/bin/env bash
# attnload against a real server: what it counts, checks and refuses.
set -u
# shellcheck source=tests/e2e/attnload_functions.sh
. "$(dirname "${BASH_SOURCE[0]}")/attnload_functions.sh"

expect 2 "unknown flag '--rat=1'" "$bin/attnload" --rat=1
expect 2 "'x' is not a number" "$bin/attnload" --rate=x
expect 0 'sessions per second' "$bin/attnload" --help
expect 1 'the server was 127.0.0.1:1 ' "$bin/attnload" --target=127.0.0.1:1 --timeout=2s

start_server --compute_threads=2

# A model's layers, steps on streams, everything that can go wrong on purpose, every KV dtype.
for kv in f32 bf16 f16 int8; do
  load 0 --model=smollm2-135m --layers=2 --kv=$kv --rate=10 --prefill_tokens=100 --decode_tokens=10 --streams=2 \
    --connections=2 --cancel_rate=0.1 --abandon_rate=0.1 --check_rate=0.3 --session_ttl=2s --duration=3s --warmup=500ms \
    --report="$work/report.html"
  holds 'd["ok"] and d["checks"]["wrong"] == 0 and d["checks"]["constant_rows"] > 100 and d["checks"]["reference_rows"] > 10'
  holds 'd["sessions"]["arrived"] == sum(d["sessions"][k] for k in ("completed", "cut", "abandoned", "failed"))'
  holds 'd["sessions"]["failed"] == 0 and d["sessions"]["completed"] > 5 and d["latency"]["decode"]["cancelled"] > 0'
  holds 'd["latency"]["decode"]["latency"]["p50_s"] <= d["latency"]["decode"]["latency"]["p99.9_s"]'
  holds 'd["latency"]["decode"]["server_compute"]["p50_s"] > 0'
  holds 'any(f["name"] == "gauges" and f["ok"] for f in d["findings"])'
  holds 'max(v for v in d["server_metrics"]["attnd_sessions_active"] if v is not None) > 0'
done
grep -q '"format":"attnload/1"' "$work/report.html" || fail "the report has no data"
grep -q '</html>' "$work/report.html" || fail "the report is not complete"

# An objective that cannot be kept.
load 1 "${small[@]}" --rate=20 --prefill_tokens=4 --decode_tokens=4 --duration=1s --warmup=0 --slo_p99=1us
grep -q 'FAILED latency: decode p99' "$work/out" || fail "the objective that was missed is not named: $(cat "$work/out")"

# What does not fit is rejected, and too many rejections are a failure.
load 1 "${small[@]}" --rate=5 --prefill_tokens=4 --duration=1s --warmup=0 --layers=1000 --prefill_chunk=4 --timeout=20s \
  --max_sessions=100 --decode_tokens=0 --kv=f32 --value_dim=256 --head_dim=256 --q_heads=64 --kv_heads=64
# Which reason depends on whether another session holds a part of the cache at that moment.
holds 'set(d["errors"]) & {"RESOURCE_EXHAUSTED (TOO_MANY_TOKENS)", "RESOURCE_EXHAUSTED (CACHE_FULL)"} != set() and not d["ok"]'

# The same seed asks the same.
load 0 "${small[@]}" --rate=30 --prefill_tokens=4 --decode_tokens=2 --duration=2s --warmup=0 --seed=5
first=$(figure 'd["sessions"]["arrived"]')
load 0 "${small[@]}" --rate=30 --prefill_tokens=4 --decode_tokens=2 --duration=2s --warmup=0 --seed=5
holds "d['sessions']['arrived'] == $first"

# The highest rate that keeps an objective, where the limit of the search is what ends it.
load 0 "${small[@]}" --rate=10 --max_rate=20 --prefill_tokens=4 --decode_tokens=2 --trial_duration=1s --warmup=200ms \
  --find_capacity --slo_p99=5s
holds 'd["capacity"]["sessions_per_s"] == 20 and not d["capacity"]["bounded"] and len(d["capacity"]["trials"]) == 2'

stop_server
finish
