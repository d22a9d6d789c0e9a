#!/usr/bin/env bash
# attnctl demo against the real server: every answer checked in every way of running it, the cache empty afterwards,
# and failure when a session is taken away.
set -u
# shellcheck source=tests/e2e/attnctl_functions.sh
. "$(dirname "${BASH_SOURCE[0]}")/attnctl_functions.sh"

start_server --compute_threads=2
small=(--sessions=4 --layers=2 --q_heads=8 --kv_heads=2 --head_dim=64 --prefill=130 --decode=70)

checked='checked +12800 of 12800 output rows'
expect 0 "$checked" "$bin/attnctl" demo "${small[@]}" --metrics="$metrics"
grep -q 'bound 1e-05: ok' "$work/out" || fail "no verdict: $(cat "$work/out")"
grep -Eq '^ +attnd_kv_cache_used_bytes [1-9]' "$work/out" || fail "no cache gauge: $(cat "$work/out")"
grep -q 'after closing them: 0 sessions, used 0 B' "$work/out" || fail "the cache is not empty: $(cat "$work/out")"
expect 0 "$checked" "$bin/attnctl" demo "${small[@]}" --stream
expect 0 'bound 1e-02: ok' "$bin/attnctl" demo "${small[@]}" --kv=bf16
expect 0 'bound 1e-02: ok' "$bin/attnctl" demo "${small[@]}" --kv=f16
expect 0 'bound 3e-02: ok' "$bin/attnctl" demo "${small[@]}" --kv=int8
expect 0 'bound 1e-05: ok' "$bin/attnctl" demo "${small[@]}" --head_dim=80 --value_dim=33 --q_heads=14 --kv_heads=2
expect 0 'sessions, used 0 B' "$bin/attnctl" demo --sessions=1 --layers=1 --prefill=1 --decode=0

# A session that is closed under the demo: the error says what happened, and the command fails.
"$bin/attnctl" demo --sessions=2 --layers=1 --prefill=8 --decode=200000 >"$work/demo" 2>&1 &
demo=$!
session=
for _ in $(seq 100); do
  session=$("$bin/attnctl" session list | awk 'NR == 2 { print $1 }')
  [ -z "$session" ] || break
  sleep 0.05
done
expect 0 "^session +$session" "$bin/attnctl" session get "$session"
expect 0 '^[0-9a-f]{32}$' "$bin/attnctl" session fork "$session" --length=8
child=$(cat "$work/out")
expect 0 '^tokens +8 ' "$bin/attnctl" session get "$child"
expect 0 'closed$' "$bin/attnctl" session close "$child"
expect 1 'INVALID_ARGUMENT \(BAD_POSITION\)' "$bin/attnctl" session fork "$session" --length=1000000000
expect 0 'closed$' "$bin/attnctl" session close "$session"
expect 0 'was closed before$' "$bin/attnctl" session close "$session"
wait "$demo" && fail "the demo succeeded without one of its sessions"
grep -q 'session lost, replay needed' "$work/demo" || fail "no word of the lost session: $(cat "$work/demo")"

finish
