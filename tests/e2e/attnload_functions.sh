# Shell functions of the attnload tests, beside those of attnctl's. To be sourced.
# shellcheck shell=bash

# shellcheck source=tests/e2e/attnctl_functions.sh
. "$(dirname "${BASH_SOURCE[0]}")/attnctl_functions.sh"

# A small model: the tests are about counting, not about computing.
# shellcheck disable=SC2034 # for the scripts that source this
small=(--model=custom --q_heads=4 --kv_heads=2 --head_dim=32)

# load STATUS FLAG...: runs attnload with --json and expects that exit status.
load() {
  local status=$1 got=0
  shift
  "$bin/attnload" --metrics="$metrics" --json="$work/load.json" "$@" >"$work/out" 2>&1 </dev/null || got=$?
  ((got == status)) || fail "attnload $*: exit status $got, not $status: $(tail -n 20 "$work/out")"
}

# figure EXPRESSION: of the last run's JSON, as Python reads it.
figure() { python3 -c 'import json, sys; d = json.load(open(sys.argv[1])); print(eval(sys.argv[2]))' "$work/load.json" "$1"; }

# holds CONDITION: about the last run's JSON, which is d.
holds() {
  [ "$(figure "$1")" = True ] || fail "not so: $1; $(figure 'd["latency"]["decode"], d["latency"]["first_output"], d["sessions"], d["errors"]')"
}

# pause_server SECONDS
pause_server() {
  kill -STOP "$server_pid"
  sleep "$1"
  kill -CONT "$server_pid"
}
