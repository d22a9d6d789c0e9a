# Shell functions of the attnctl tests: a server of one's own, and what is expected of a command. To be sourced.
# shellcheck shell=bash

bin=${ATTND_BIN_DIR:-$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)/build/release/bin}
work=$(mktemp -d)
server_pid=
server=
metrics=

# start_server [FLAG...]: sets server, metrics and server_pid. Port 0 unless a --listen is among the flags.
start_server() {
  local waited=0 line
  : >"$work/server.out"
  "$bin/attnd" --listen=127.0.0.1:0 --metrics_listen=127.0.0.1:0 --kv_cache_bytes=512MiB "$@" \
    >"$work/server.out" 2>"$work/server.err" &
  server_pid=$!
  until line=$(grep -m 1 'serving on' "$work/server.out"); do
    if ! kill -0 "$server_pid" 2>/dev/null || ((++waited > 200)); then
      echo "the server did not start:" && cat "$work/server.err"
      exit 1
    fi
    sleep 0.05
  done
  server=${line#*serving on }
  server=${server%%,*}
  # shellcheck disable=SC2034 # for the scripts that source this
  metrics=${line##* }
  export ATTND_SERVER=$server
}

# stop_server [SIGNAL]
stop_server() {
  [ -n "$server_pid" ] || return 0
  kill "-${1:-TERM}" "$server_pid" 2>/dev/null
  wait "$server_pid" 2>/dev/null
  server_pid=
}

clean_up() {
  if [ -n "$server_pid" ]; then
    kill -CONT "$server_pid" 2>/dev/null
    stop_server KILL
  fi
  rm -rf "$work"
}
trap clean_up EXIT

failures=0

fail() {
  echo "FAILED: $*"
  failures=$((failures + 1))
}

# expect STATUS PATTERN COMMAND...: exit status, and an extended regular expression in what it printed.
expect() {
  local status=$1 pattern=$2 got=0
  shift 2
  "$@" >"$work/out" 2>&1 </dev/null || got=$?
  if ((got != status)); then fail "$* : exit status $got, not $status: $(tail -n 3 "$work/out")"; fi
  grep -Eq -- "$pattern" "$work/out" || fail "$* : no '$pattern' in: $(cat "$work/out")"
}

finish() {
  ((failures == 0)) || exit 1
  echo "passed"
}
