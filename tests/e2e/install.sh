#!/usr/bin/env bash
# `cmake --install` into a prefix, a consumer's project built against it there and again after the prefix was moved,
# and the installed server to run both with.
set -uo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
# shellcheck source=tests/e2e/attnctl_functions.sh
. "$here/attnctl_functions.sh"

root=$(cd "$here/../.." && pwd)
build=$root/build/release
first=$work/first
moved=$work/moved/elsewhere

# Prints a log, and gives up.
give_up() {
  echo "FAILED: $1"
  tail -n 30 "$2"
  exit 1
}

# build_consumer PREFIX FOLDER
build_consumer() {
  cmake -S "$here/consumer" -B "$2" -G Ninja -DCMAKE_PREFIX_PATH="$1" >"$work/configure.log" 2>&1 ||
    give_up "the consumer cannot be configured" "$work/configure.log"
  cmake --build "$2" >"$work/build.log" 2>&1 || give_up "the consumer cannot be built" "$work/build.log"
  # From there and from nowhere else: this tree has headers of the same names.
  grep -q "attnd_DIR:PATH=$1/" "$2/CMakeCache.txt" || fail "attnd was not found in $1"
  expect 0 '^prefill 2 2 5 5$' "$2/consumer" "$server"
  expect 0 '^decode 3 3$' "$2/consumer" "$server"
  expect 0 '^version 0\.1\.0$' "$2/stub_consumer" "$server"
}

cmake --install "$build" --prefix "$first" >"$work/install.log" 2>&1 || give_up "cmake --install" "$work/install.log"
for file in bin/attnd bin/attnctl include/attnd/client.h include/attnd/v1/attnd.grpc.pb.h \
  share/attnd/proto/attnd/v1/attnd.proto share/attnd/proto/attnd/v1/error_details.proto share/doc/attnd/LICENSE \
  lib/systemd/system/attnd.service; do
  [ -s "$first/$file" ] || fail "no $file was installed"
done
! [ -e "$build/bin/attnload" ] || [ -x "$first/bin/attnload" ] || fail "no bin/attnload was installed"
grep -q "^ExecStart=$first/bin/attnd\$" "$first/lib/systemd/system/attnd.service" || fail "the unit starts another attnd"
# Nothing that was installed may lead back to where it was built.
if grep -rlE "$root|$work" "$first" --include='*.cmake' --include='*.h' --include='*.proto'; then
  fail "these files hold a path of this machine"
fi
for program in "$first"/bin/*; do
  ! readelf -d "$program" | grep -E 'R(UN)?PATH' || fail "$program has a search path for libraries"
  expect 0 "$(basename "$program")" "$program" --help
done

bin=$first/bin
start_server --max_sessions=100
build_consumer "$first" "$work/consumer-first"
stop_server

# The whole prefix goes elsewhere; where it was, nothing is left.
mkdir -p "$(dirname "$moved")" && mv "$first" "$moved"
bin=$moved/bin
start_server --max_sessions=100
build_consumer "$moved" "$work/consumer-moved"
expect 0 'checked' "$moved/bin/attnctl" demo --sessions=2 --layers=1 --prefill=64 --decode=4

# A version that promises less or more than this one is not taken for it.
sed 's/find_package(attnd 0.1/find_package(attnd 0.2/' "$here/consumer/CMakeLists.txt" >"$work/newer.txt"
mkdir -p "$work/newer" && cp "$here"/consumer/*.cc "$work/newer" && cp "$work/newer.txt" "$work/newer/CMakeLists.txt"
expect 1 'requested version "0\.2"' cmake -S "$work/newer" -B "$work/newer-build" -G Ninja -DCMAKE_PREFIX_PATH="$moved"

# A package builder's way, a component at a time.
DESTDIR=$work/stage cmake --install "$build" --prefix /usr --component runtime >"$work/install.log" 2>&1 ||
  give_up "cmake --install --component runtime" "$work/install.log"
[ -x "$work/stage/usr/bin/attnd" ] || fail "DESTDIR: no usr/bin/attnd"
grep -q '^ExecStart=/usr/bin/attnd$' "$work/stage/usr/lib/systemd/system/attnd.service" || fail "DESTDIR: the unit's path"
! [ -e "$work/stage/usr/include" ] || fail "the runtime component holds headers"
DESTDIR=$work/stage cmake --install "$build" --prefix /usr --component dev >"$work/install.log" 2>&1
[ -s "$work/stage/usr/include/attnd/client.h" ] || fail "the dev component holds no header"

finish
