#!/usr/bin/env bash
# L01, coordinated omission: a server that stands still for a second under 100 requests per second. Whoever waits with
# it reports a p99 of about a millisecond; the schedule says that 11 % of the requests were late, the worst by a second.
set -u
# shellcheck source=tests/e2e/attnload_functions.sh
. "$(dirname "${BASH_SOURCE[0]}")/attnload_functions.sh"

start_server --compute_threads=2

# stalled FLAG...: 10 s of load with the server stopped for 1 s in their midst.
stalled() {
  load 0 "${small[@]}" --arrivals=constant --duration=10s --warmup=0 --prefill_tokens=1 "$@" &
  local pid=$!
  sleep 5
  pause_server 1
  wait "$pid"
}

# 100 sessions per second, each a request of its own.
stalled --rate=100 --decode_tokens=0
latency='d["latency"]["first_output"]["latency"]'
holds "${latency}['count'] == 1000"
holds "0.8 <= ${latency}['p99_s'] <= 1.5 and 0.4 <= ${latency}['p95_s'] <= 1.1 and ${latency}['p50_s'] <= 0.1"

# One session with 100 steps per second, which wait for one another.
stalled --rate=0.05 --decode_tokens=100000 --decode_interval=10ms --streams=1
latency='d["latency"]["decode"]["latency"]'
holds "998 <= ${latency}['count'] <= 1002"
holds "0.8 <= ${latency}['p99_s'] <= 1.5 and 0.4 <= ${latency}['p95_s'] <= 1.1 and ${latency}['p50_s'] <= 0.1"
# From sending, one step alone was slow: what a tester that waits with the server would have reported.
holds 'd["latency"]["decode"]["service"]["p99_s"] <= 0.4'

stop_server
finish
