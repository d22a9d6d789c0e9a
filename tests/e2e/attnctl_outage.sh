#!/usr/bin/env bash
# What the client does when the server is down, paused or restarted.
set -u
# shellcheck source=tests/e2e/attnctl_functions.sh
. "$(dirname "${BASH_SOURCE[0]}")/attnctl_functions.sh"

# P02: down, then up. The failed attempts must not spoil the next.
expect 1 'the server asked was 127.0.0.1:1 ' "$bin/attnctl" info --server=127.0.0.1:1
start_server --compute_threads=2
expect 0 '^version' "$bin/attnctl" info

# P06: a paused server is a deadline, not an endless wait.
kill -STOP "$server_pid"
# The signal is on its way for a while: until then a busy machine's server may still answer.
for stat in /proc/"$server_pid"/task/*/stat; do
  until [[ $(<"$stat") =~ \)\ [Tt] ]]; do sleep 0.01; done
done
start=$(date +%s%N)
expect 1 'DEADLINE_EXCEEDED' "$bin/attnctl" info --timeout=1500ms
took=$((($(date +%s%N) - start) / 1000000))
((took >= 1400 && took < 8000)) || fail "the deadline of 1500 ms took $took ms"
expect 0 'default 30s' "$bin/attnctl" info --help
kill -CONT "$server_pid"
expect 0 '^version' "$bin/attnctl" info --timeout=20s

# P07: a restart under running sessions. Unavailable or lost, said so; never an abort and never a silent new start.
address=$server
"$bin/attnctl" demo --sessions=2 --layers=1 --prefill=8 --decode=200000 >"$work/demo" 2>&1 &
demo=$!
for _ in $(seq 100); do
  [ "$("$bin/attnctl" session list | wc -l)" -lt 3 ] || break
  sleep 0.05
done
stop_server KILL
start_server --listen="$address"
status=0
wait "$demo" || status=$?
((status == 1)) || fail "the demo's exit status was $status, not 1"
grep -Eq 'session lost, replay needed|UNAVAILABLE' "$work/demo" || fail "unclear error: $(cat "$work/demo")"
expect 0 '^version' "$bin/attnctl" info

stop_server
finish
