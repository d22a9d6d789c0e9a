#!/usr/bin/env bash
# attnctl health: 0 exactly while the server takes work, also where it asks for tokens or certificates.
set -u
# shellcheck source=tests/e2e/attnctl_functions.sh
. "$(dirname "${BASH_SOURCE[0]}")/attnctl_functions.sh"

health=("$bin/attnctl" health --timeout=2s)

# O09: a saturated server answers its probe at once. The demo's 64 sessions keep all threads busy meanwhile.
probe_under_load() {
  local load start took slowest=0 probes=0
  "$bin/attnctl" demo --sessions=64 --layers=1 --prefill=512 --decode=2000 >"$work/load" 2>&1 &
  load=$!
  until [ "$("$bin/attnctl" session list | wc -l)" -gt 64 ]; do sleep 0.05; done
  while ((probes < 30)) && kill -0 "$load" 2>/dev/null; do
    start=$(date +%s%N)
    "${health[@]}" >"$work/out" 2>&1 || fail "no SERVING under load: $(cat "$work/out")"
    took=$((($(date +%s%N) - start) / 1000000))
    ((took <= slowest)) || slowest=$took
    probes=$((probes + 1))
    sleep 0.1
  done
  kill "$load" 2>/dev/null
  wait "$load" 2>/dev/null
  echo "$probes probes under load, processes and all: the slowest took $slowest ms"
  ((probes == 30)) || fail "the load ended after $probes probes"
  # The call itself is bounded to 100 ms by the service tests; here a process starts and connects for each, on
  # processors that are taken.
  ((slowest < 1000)) || fail "a probe took $slowest ms"
}

expect 1 'UNAVAILABLE' "${health[@]}" --server=127.0.0.1:1
start_server --compute_threads=2
expect 0 '^SERVING$' "${health[@]}"
expect 0 '^SERVING$' "${health[@]}" --service=attnd.v1.Attention
expect 1 'NOT_FOUND' "${health[@]}" --service=nobody
expect 2 'unknown flag' "${health[@]}" --nonsense
probe_under_load

# While it drains: a stream without an end holds it open.
"$bin/attnctl" demo --sessions=1 --layers=1 --prefill=8 --decode=1000000 --stream >"$work/demo" 2>&1 &
demo=$!
until [ "$("$bin/attnctl" session list | wc -l)" -gt 1 ]; do sleep 0.05; done
kill -TERM "$server_pid"
for _ in $(seq 100); do
  "${health[@]}" >"$work/out" 2>&1 || break
  sleep 0.01
done
grep -Eq '^NOT_SERVING$|UNAVAILABLE' "$work/out" || fail "a draining server said: $(cat "$work/out")"
kill "$demo" 2>/dev/null
wait "$demo" 2>/dev/null
stop_server

# A token is not asked for, a certificate is.
certificate() { # NAME SUBJECT [OPENSSL_FLAG...]
  local name=$1 subject=$2
  shift 2
  openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2 -subj "/CN=$subject" \
    -addext "subjectAltName=DNS:$subject" -keyout "$work/$name.key" -out "$work/$name.pem" "$@" 2>"$work/openssl"
}
certificate server attnd.example
certificate client somebody
echo 0123456789abcdef0123 >"$work/tokens"
start_server --compute_threads=1 --auth_tokens_file="$work/tokens" --tls_cert="$work/server.pem" \
  --tls_key="$work/server.key" --tls_client_ca="$work/client.pem"
tls=(--tls_roots="$work/server.pem" --tls_name=attnd.example --tls_cert="$work/client.pem" --tls_key="$work/client.key")
expect 0 '^SERVING$' "${health[@]}" "${tls[@]}"
expect 1 'UNAVAILABLE' "${health[@]}" "${tls[@]:0:2}"
expect 1 'UNAVAILABLE' "${health[@]}"
expect 1 'UNAVAILABLE' "${health[@]}" "${tls[@]}" --tls_name=other.example
expect 1 'cannot read' "${health[@]}" --tls_roots=/nowhere
stop_server
finish
