#!/usr/bin/env bash
# The part of tpu_vm.sh that runs on each worker:
#
#   tpu_worker.sh install           a virtual environment with this checkout and the extra [tpu]
#   tpu_worker.sh run ID ARGS...    the run, detached; shows its log until it ends, and exits with its status
#   tpu_worker.sh stop GRACE        SIGTERM to the run, and after GRACE seconds SIGKILL
#
# ``run`` with the ID of a run that was started already only shows its log: gcloud repeats a command when its link broke.

set -euo pipefail

root=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd)
self=$root/launch/tpu_worker.sh
runs=$HOME/yatt_jax_runs

# A Python that the package supports, which the machine images do not all have.
find_python() {
  local name works='import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))'
  for name in python3 python3.13 python3.12 python3.11; do
    if command -v "$name" >/dev/null && "$name" -c "$works" 2>/dev/null; then
      echo "$name"
      return
    fi
  done
  sudo apt-get update -qq >&2
  sudo apt-get install -y -qq python3.11 python3.11-venv >&2
  echo python3.11
}

install() {
  cd "$root"
  local stamp=.venv/.installed-tpu
  cmp -s pyproject.toml "$stamp" && return
  local python
  python=$(find_python)
  "$python" -m venv .venv
  .venv/bin/python -m pip install --quiet --disable-pip-version-check --editable '.[tpu]'
  cp pyproject.toml "$stamp"
}

# Detached from the link: starts the process, and leaves its number and at last its status in STATE.
supervise() {
  local state=$1 code=0 child
  cd "$root"
  PYTHONUNBUFFERED=1 setsid .venv/bin/python -m yatt_jax.main "${@:2}" --distributed </dev/null &
  child=$!
  echo "$child" >"$state/child"
  wait "$child" 2>/dev/null || code=$?
  kill -KILL -- "-$child" 2>/dev/null || true # children that it left behind
  echo "$code" >"$state/status.new"
  mv "$state/status.new" "$state/status"
}

run() {
  local state=$runs/$1 lines=+1 code=1
  mkdir -p "$runs"
  if mkdir "$state" 2>/dev/null; then
    stop 0 # whatever an earlier attempt left
    : >"$state/log"
    setsid nohup bash "$self" supervise "$state" "${@:2}" </dev/null >>"$state/log" 2>&1 &
    echo "$!" >"$state/supervisor"
  else
    lines=10
  fi
  until [[ -s $state/supervisor ]]; do sleep 0.1; done
  tail -n "$lines" -s 0.2 -f --pid="$(<"$state/supervisor")" "$state/log" | sed -u "s/^/[$(hostname)] /" || true
  [[ -s $state/status ]] && code=$(<"$state/status")
  echo "[$(hostname)] exit status $code"
  exit "$code"
}

# The process of every run that has not ended. After a restart of the machine its number may be another's.
running() {
  local state pid
  for state in "$runs"/*/; do
    [[ -s $state/child && ! -e $state/status ]] || continue
    pid=$(<"$state/child")
    if grep -qs yatt_jax.main "/proc/$pid/cmdline"; then echo "$pid"; fi
  done
}

stop() {
  local grace=$1 pid
  for pid in $(running); do
    kill -TERM "$pid" 2>/dev/null || true
  done
  local deadline=$((SECONDS + grace))
  for pid in $(running); do
    while kill -0 "$pid" 2>/dev/null && ((SECONDS < deadline)); do sleep 0.2; done
    kill -KILL -- "-$pid" 2>/dev/null || true
  done
}

case ${1-} in
  install) install ;;
  supervise) supervise "${@:2}" ;;
  run) run "${@:2}" ;;
  stop) stop "$2" ;;
  *)
    sed -n '2,/^$/ s/^# \{0,1\}//p' "$self" >&2
    exit 2
    ;;
esac
