#!/usr/bin/env bash
# The systemd unit and the example of its settings, as far as they can be tried without systemd at work: systemd's own
# check of an installed unit, and the settings given to attnd.
set -uo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
# shellcheck source=tests/e2e/attnctl_functions.sh
. "$here/attnctl_functions.sh"

root=$(cd "$here/../.." && pwd)
settings=$root/deploy/systemd/attnd.env

cmake --install "$root/build/release" --prefix "$work/prefix" --component runtime >"$work/install.log" 2>&1 ||
  { tail "$work/install.log" && exit 1; }
unit=$work/prefix/lib/systemd/system/attnd.service

# value KEY: what the unit sets it to.
value() { sed -n "s/^$1=//p" "$unit"; }

[ "$(value Type)" = notify ] || fail "attnd tells systemd when it is ready: Type=notify"
[ "$(value MemoryDenyWriteExecute)" = no ] || fail "the kernels' code is generated at run time"
drain=$("$bin/attnd" --print_config | sed -n 's/^--drain_timeout=\([0-9]*\)s$/\1/p')
stop=$(value TimeoutStopSec)
((${stop%s} > drain + 3)) || fail "TimeoutStopSec=$stop leaves no time for a drain of $drain s"

# What is commented out is the default.
"$bin/attnd" --print_config >"$work/defaults"
sed -n 's/^#\(ATTND_[A-Z_]*=\)/\1/p' "$settings" | grep -v -e TLS -e AUTH -e =/var/lib/attnd/ >"$work/env"
(($(wc -l <"$work/env") >= 6)) || fail "attnd.env names few settings"
expect 0 '' env -S "$(tr '\n' ' ' <"$work/env")" "$bin/attnd" --print_config
diff "$work/defaults" "$work/out" || fail "attnd.env names other defaults than attnd's"
# The directories are ones that the unit may write to.
[ "$(value StateDirectory)" = attnd ] || fail "the unit has no StateDirectory=attnd"
(($(grep -c '=/var/lib/attnd/' "$settings") == 3)) || fail "attnd.env names other directories than the unit's own"
expect 0 '' env -S "ATTND_EVICTION=lru $(sed -n 's/^#\(ATTND_.*=\/var\/lib\/attnd\/\)/\1/p' "$settings" | tr '\n' ' ')" \
  "$bin/attnd" --print_config
# And the others are settings that there are.
sed -n 's/^#\(ATTND_[A-Z_]*\)=.*/\1/p' "$settings" >"$work/names"
while read -r name; do
  flag=$(tr '[:upper:]' '[:lower:]' <<<"${name#ATTND_}")
  grep -q -- "^--$flag=" "$work/defaults" || fail "attnd.env: attnd has no --$flag"
done <"$work/names"

if ! command -v systemd-analyze >/dev/null; then
  echo "skipped: there is no systemd-analyze to check the unit with"
  ((failures == 0)) && exit 77
  finish
fi
systemd-analyze verify "$unit" >"$work/verify" 2>&1 || fail "systemd-analyze verify"
[ ! -s "$work/verify" ] || fail "systemd-analyze verify: $(cat "$work/verify")"
# From 0, nothing is allowed, to 100: it was 14 when this was written.
expect 0 'exposure level' systemd-analyze security --offline=yes --threshold=20 "$unit"
finish
