# Shell functions that show what a long command is doing. To be sourced by the set-up and test scripts.
#
#   run_step LABEL LOG COMMAND [ARGUMENT...]
#
# runs COMMAND with its output in the file LOG. On a terminal one line shows LABEL, the elapsed time and the newest
# line of LOG; elsewhere there is one plain line at the start and one at the end, so that a CI log stays short.
# A failing command's last lines are shown, without empty ones and those that match STEP_NOISE (an extended regular
# expression; may be unset). Returns the command's exit status.
# shellcheck shell=bash

step_elapsed() {
  local seconds=$(($(date +%s) - $1))
  if ((seconds < 60)); then printf '%ds' "$seconds"; else printf '%dm%02ds' $((seconds / 60)) $((seconds % 60)); fi
}

# Redraws the progress line until the process ends.
step_watch() {
  local process=$1 label=$2 log=$3 start=$4 columns newest line
  while kill -0 "$process" 2>/dev/null; do
    columns=$(tput cols 2>/dev/null || echo 80)
    newest=$(tail -n 1 "$log" 2>/dev/null | tr '\r' '\n' | tail -n 1 | tr -cd '[:print:]' || true)
    line="$label  $(step_elapsed "$start")  $newest"
    printf '\r\033[K%s' "${line:0:columns - 1}"
    sleep 0.5
  done
  printf '\r\033[K'
}

run_step() {
  local label=$1 log=$2 start status=0
  shift 2
  start=$(date +%s)
  mkdir -p "$(dirname "$log")"
  : >"$log"
  if [ -t 1 ]; then
    "$@" >>"$log" 2>&1 </dev/null &
    local process=$!
    # Without this an interrupt would leave the command running behind the prompt.
    trap 'kill "$process" 2>/dev/null; exit 130' INT TERM
    step_watch "$process" "$label" "$log" "$start"
    wait "$process" || status=$?
    trap - INT TERM
  else
    echo "$label ..."
    "$@" >>"$log" 2>&1 </dev/null || status=$?
  fi
  if ((status == 0)); then
    echo "$label: done in $(step_elapsed "$start")"
  else
    echo "$label: FAILED (exit status $status) after $(step_elapsed "$start"); the last lines of $log:" >&2
    grep -avE -- "${STEP_NOISE:-^$}" "$log" | tail -n 60 | sed 's/^/    /' >&2
  fi
  return "$status"
}
