#!/usr/bin/env bash
# L02: 300 sessions at once over one connection and over four. What waits for room on a connection waits inside attnload,
# is told apart from the server's time, and no call is lost either way.
set -u
# shellcheck source=tests/e2e/attnload_functions.sh
. "$(dirname "${BASH_SOURCE[0]}")/attnload_functions.sh"

start_server --compute_threads=2

# 300 sessions arrive within the first instant (3000 per second for 0.1 s) and none sends a second step before all
# have sent their first, so up to 300 calls want to be in flight. A prefill of 256 tokens keeps each there for a while.
crowd=("${small[@]}" --arrivals=constant --rate=3000 --duration=100ms --warmup=0 --prefill_tokens=256 --decode_tokens=0)

load 0 "${crowd[@]}" --connections=1 --calls_per_connection=20
holds 'd["sessions"]["arrived"] == 300 and d["sessions"]["completed"] == 300 and d["errors"] == {}'
one=$(figure 'd["latency"]["create"]["client_wait"]["p99_s"]')
holds 'd["latency"]["create"]["latency"]["count"] == 300 and d["latency"]["first_output"]["latency"]["count"] == 300'

load 0 "${crowd[@]}" --connections=4 --calls_per_connection=100
holds 'd["sessions"]["arrived"] == 300 and d["sessions"]["completed"] == 300 and d["errors"] == {}'
holds 'd["latency"]["create"]["latency"]["count"] == 300 and d["latency"]["first_output"]["latency"]["count"] == 300'
four=$(figure 'd["latency"]["create"]["client_wait"]["p99_s"]')
python3 -c "import sys; sys.exit(not float('$one') > 0.001)" || fail "20 calls at most, and yet 300 waited $one s only"
echo "client wait before create, p99: $one s on one connection of 20 calls, $four s on four of 100"

# 300 sessions that live at once, on streams.
load 0 "${small[@]}" --arrivals=constant --rate=150 --duration=4s --warmup=0 --prefill_tokens=8 --decode_tokens=1000000 \
  --decode_interval=500ms --connections=4 --streams=1
holds 'd["sessions"]["most_at_once"] >= 300 and d["sessions"]["failed"] == 0 and d["errors"] == {}'

stop_server
finish
