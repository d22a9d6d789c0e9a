#!/usr/bin/env bash
# attnctl attend, info, estimate and what they say about mistakes, against the real server. The problems are those of
# the text that the project started from.
set -u
# shellcheck source=tests/e2e/attnctl_functions.sh
. "$(dirname "${BASH_SOURCE[0]}")/attnctl_functions.sh"

start_server --compute_threads=2

# attend NAME PROBLEM EXPECTED: every number of EXPECTED within 1e-5 of the answer's.
attend() {
  local name=$1 problem=$2 expected=$3
  "$bin/attnctl" attend >"$work/answer" 2>"$work/err" <<<"$problem" || fail "$name: $(cat "$work/err")"
  python3 - "$work/answer" "$expected" <<'PYTHON' || fail "$name"
import json, sys
answer, expected = json.load(open(sys.argv[1])), json.loads(sys.argv[2])
def flat(x): return [x] if not isinstance(x, list) else [y for item in x for y in flat(item)]
def shape(x): return [] if not isinstance(x, list) else [len(x)] + shape(x[0])
for key, value in expected.items():
    got = answer[key]
    same = shape(got) == shape(value) and all(abs(a - b) <= 1e-5 * max(1, abs(b)) for a, b in zip(flat(got), flat(value)))
    if not same:
        sys.exit(f"{key}: {got}, expected {value}")
PYTHON
}

# refuse NAME PROBLEM PATTERN
refuse() {
  local name=$1 problem=$2 pattern=$3
  printf '%s' "$problem" >"$work/problem.json"
  expect 1 "$pattern" "$bin/attnctl" attend "$work/problem.json"
}

attend "zero scores mix evenly" '{"q":[[0]],"k":[[0],[0]],"v":[[2],[8]],"scale":1}' '{"out":[[5]],"weights":[[0.5,0.5]]}'
attend "scores (log 3, 0)" '{"q":[[1]],"k":[[1.0986122886681098],[0]],"v":[[2],[8]],"scale":1}' \
  '{"out":[[3.5]],"weights":[[0.75,0.25]]}'
attend "causal masks before normalizing" '{"q":[[0],[0]],"k":[[0],[0]],"v":[[2],[8]],"causal":true}' \
  '{"out":[[2],[5]],"weights":[[1,0],[0.5,0.5]]}'
attend "causal, keys 1 and 2" '{"q":[[0],[0]],"k":[[1],[2]],"v":[[2],[8]],"causal":true}' \
  '{"out":[[2],[5]],"weights":[[1,0],[0.5,0.5]]}'
attend "a constant added to every score" '{"q":[[1]],"k":[[101.09861228866811],[100]],"v":[[2],[8]],"scale":1}' \
  '{"out":[[3.5]]}'
attend "shapes 3x2, 5x2, 5x4" \
  '{"q":[[0,0],[0,0],[0,0]],"k":[[1,2],[3,4],[5,6],[7,8],[9,0]],"v":[[1,0,0,0],[0,1,0,0],[0,0,1,0],[0,0,0,1],[4,4,4,4]]}' \
  '{"out":[[1,1,1,1],[1,1,1,1],[1,1,1,1]],"weights":[[0.2,0.2,0.2,0.2,0.2],[0.2,0.2,0.2,0.2,0.2],[0.2,0.2,0.2,0.2,0.2]]}'
attend "mask" '{"q":[[0]],"k":[[0],[0],[0]],"v":[[1],[10],[3]],"mask":[[true,false,true]]}' '{"out":[[2]]}'
attend "window" '{"q":[[0],[0],[0]],"k":[[0],[0],[0]],"v":[[0],[1],[2]],"causal":true,"window":2}' \
  '{"out":[[0],[0.5],[1.5]]}'
attend "softcap before the mask" \
  '{"q":[[1]],"k":[[0],[5]],"v":[[0],[100]],"scale":1,"softcap":1,"mask":[[true,false]]}' '{"out":[[0]]}'
attend "grouped heads" '{"q":[[[0],[0],[0],[0]]],"k":[[[0],[0]]],"v":[[[10],[20]]]}' \
  '{"out":[[[10],[10],[20],[20]]],"weights":[[[1]],[[1]],[[1]],[[1]]]}'
attend "a query offset" '{"q":[[0]],"k":[[0],[0],[0]],"v":[[3],[5],[9]],"causal":true,"query_offset":1}' '{"out":[[4]]}'
attend "an empty row as zeros" '{"q":[[0]],"k":[[0]],"v":[[2]],"mask":[[false]],"empty_rows":"zero"}' '{"out":[[0]]}'

refuse "V has 4 rows for 5 keys" '{"q":[[0,0]],"k":[[0,0],[0,0],[0,0],[0,0],[0,0]],"v":[[0],[0],[0],[0]]}' \
  'INVALID_ARGUMENT: k has 5 rows and v has 4'
refuse "row with nothing allowed" '{"q":[[0]],"k":[[0],[0]],"v":[[2],[8]],"mask":[[false,false]]}' \
  'INVALID_ARGUMENT \(EMPTY_ROW\): .*row 0'
refuse "non-finite score operand" '{"q":[["nan"]],"k":[[0]],"v":[[1]]}' 'INVALID_ARGUMENT \(NOT_FINITE\): .*q'
refuse "non-finite value" '{"q":[[0]],"k":[[0]],"v":[["inf"]]}' 'INVALID_ARGUMENT \(NOT_FINITE\): .*v'
refuse "causal with unequal lengths" '{"q":[[0],[0]],"k":[[0],[0],[0]],"v":[[0],[0],[0]],"causal":true}' 'INVALID_ARGUMENT'
refuse "empty" '{"q":[],"k":[[0]],"v":[[0]]}' 'INVALID_ARGUMENT: q has no rows'
refuse "a window of zero" '{"q":[[0]],"k":[[0]],"v":[[0]],"causal":true,"window":0}' 'INVALID_ARGUMENT'
refuse "no JSON" '{"q":[[0' 'not JSON'
refuse "an unknown key" '{"q":[[0]],"k":[[0]],"v":[[0]],"scael":1}' "unknown key 'scael'"
expect 1 "cannot read '$work/none.json'" "$bin/attnctl" attend "$work/none.json"

expect 0 '^version +[0-9]' "$bin/attnctl" info
expect 0 'cache capacity +512 MiB' "$bin/attnctl" info
expect 0 'bytes per token +128 KiB' "$bin/attnctl" info --model=llama3-8b --kv=bf16
# Client and server agree on what a token of an odd shape costs: 3 layers x 2 heads x 2 bytes x (34 + 5).
odd=(--model=custom --layers=3 --q_heads=4 --kv_heads=2 --head_dim=33 --value_dim=5 --kv=bf16)
expect 0 'bytes per token +468 B' "$bin/attnctl" info "${odd[@]}"
expect 0 'per token, all layers +468 B' "$bin/attnctl" estimate "${odd[@]}" --tokens=1
expect 0 '512 MiB \(536870912 bytes\)' "$bin/attnctl" estimate --model=llama3-8b --kv=bf16 --tokens=4096

expect 0 '^SESSION' "$bin/attnctl" session list
expect 1 'NOT_FOUND \(NEVER_EXISTED\)' "$bin/attnctl" session get 00000000000000000000000000000000
expect 1 'NOT_FOUND \(NEVER_EXISTED\)' "$bin/attnctl" session close 00000000000000000000000000000000
expect 1 'NOT_FOUND \(NEVER_EXISTED\)' "$bin/attnctl" session fork 00000000000000000000000000000000
expect 2 'takes one session id, got 2' "$bin/attnctl" session fork a b

expect 2 "unknown flag '--frobnicate'" "$bin/attnctl" info --frobnicate
expect 2 "unknown command 'inof'" "$bin/attnctl" inof
expect 2 "'12x' is not a whole number" "$bin/attnctl" demo --sessions=12x
expect 2 'no verb' "$bin/attnctl" session lsit
for command in info session attend estimate demo; do
  expect 0 "^usage: attnctl $command" "$bin/attnctl" "$command" --help
done

finish
