#!/usr/bin/env bash
# N processes of one run on this machine, on its CPU: for development and tests, and to see how processes meet.
#
#   launch/local.sh N --config=configs/NAME.py --workdir=DIR [--config.KEY=VALUE ...]
#
#   DEVICES    CPU devices of the whole run, a multiple of N     (JAX_NUM_CPU_DEVICES if that is set, else N)
#   GRACE      seconds the others get to end by themselves after one process failed, and all after SIGTERM   (75)
#   RESTARTS   how often the same command is run again after a failure     (0)
#   PYTHON     interpreter     (.venv/bin/python of this checkout if there is one, else python3)
#
# The exit status is that of the process that failed first; 0 when all finished. 2 (bad input) is never tried again.
# Ctrl-C and SIGTERM reach every process as SIGTERM, which saves and stops the run; a second one kills it.
# Output of processes other than 0 is prefixed with their number. Linux with bash 4.4 and util-linux.

set -euo pipefail

root=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd)
alive=()    # process number -> pid, of those that run; every one leads a session and process group of its own
filters=()  # pids of what prefixes the output
status=0    # of this attempt
deadline=-1 # on the clock SECONDS, when whatever still runs is killed; -1: none
stopping=0  # 1 after SIGTERM

exec {console}>&2
say() { echo "local.sh: $*" >&"$console"; }

bad_input() {
  say "$*"
  exit 2
}

usage() { sed -n '2,/^$/ s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"; }

whole_number() { [[ $1 =~ ^[0-9]{1,9}$ ]]; }

# This launcher divides CPU devices only: several processes would fight over the same accelerators.
check_platform() {
  [[ ${JAX_PLATFORMS-} == cpu ]] && return
  local found="" pattern
  for pattern in '/dev/nvidia[0-9]*' '/dev/accel[0-9]*' '/dev/vfio/[0-9]*' /dev/kfd; do
    found=${found:-$(compgen -G "$pattern" | head -n 1 || true)}
  done
  if [[ -n ${JAX_PLATFORMS-} || -n $found ]]; then
    bad_input "this launcher is for the CPU, and ${found:-JAX_PLATFORMS=$JAX_PLATFORMS} asks for an accelerator:" \
      "one process drives all devices of a machine, so start python -m yatt_jax.main itself;" \
      "to use the CPU all the same, set JAX_PLATFORMS=cpu"
  fi
}

# A port of 127.0.0.1 that nobody listens on, below those that the system gives to outgoing connections.
free_port() {
  local port
  for _ in {1..50}; do
    port=$((20000 + RANDOM % 12000))
    if ! (: <>"/dev/tcp/127.0.0.1/$port") 2>/dev/null; then
      echo "$port"
      return
    fi
  done
  bad_input "found no free port on 127.0.0.1"
}

# Reads to the end whatever signals come, so that no process loses its last words.
prefix() {
  trap '' INT TERM HUP
  exec sed -u "s/^/[$1] /"
}

# start INDEX PORT ARGS...: one process. setpriv lets the kernel kill it should this script die.
start() {
  local index=$1 port=$2 out err
  local command=("$PYTHON" -m yatt_jax.main "${@:3}" "--coordinator=127.0.0.1:$port" "--processes=$processes"
    "--process=$index")
  if ((index == 0)); then
    exec {out}>&1 {err}>&2
  else
    exec {out}> >(prefix "$index") && filters+=($!)
    exec {err}> >(prefix "$index" >&2) && filters+=($!)
  fi
  JAX_PLATFORMS=cpu JAX_NUM_CPU_DEVICES=$((devices / processes)) JAX_COORDINATOR_BIND_ADDRESS=127.0.0.1:$port \
    PYTHONUNBUFFERED=1 setsid setpriv --pdeathsig KILL "${command[@]}" </dev/null >&"$out" 2>&"$err" \
    {out}>&- {err}>&- {console}>&- &
  alive[index]=$!
  exec {out}>&- {err}>&-
}

# SIGKILL to what still runs, with its children. It works on stopped processes too.
kill_all() {
  local pid
  for pid in "${alive[@]}"; do
    kill -KILL -- "-$pid" 2>/dev/null || kill -KILL "$pid" 2>/dev/null || true
  done
}

ask_to_stop() {
  local pid
  for pid in "${alive[@]}"; do
    kill -TERM "$pid" 2>/dev/null || true
  done
}

# shellcheck disable=SC2317 # called by trap
stop() {
  if ((stopping)); then
    say "killing what still runs"
    kill_all
    return
  fi
  stopping=1
  deadline=$((SECONDS + GRACE))
  say "asking every process to save and stop, within $GRACE s; once more kills them"
  ask_to_stop
}

# Notes how process INDEX, which is no more, ended.
ended() {
  local index=$1 pid=${alive[$1]} code=0
  wait "$pid" 2>/dev/null || code=$?
  unset "alive[$index]"
  kill -KILL -- "-$pid" 2>/dev/null || true # children it left behind
  ((code)) || return 0
  if ((code <= 128)); then
    say "process $index ended with status $code"
  else
    say "process $index was killed by signal $((code - 128))"
  fi
  ((status)) && return
  status=$code
  if ((${#alive[@]} && deadline < 0)); then
    say "the others get $GRACE s"
    deadline=$((SECONDS + GRACE))
  fi
}

# One attempt: starts all processes and returns when none is left, with ``status`` set.
attempt() {
  local port index pid
  status=0 deadline=-1 filters=()
  port=$(free_port)
  for ((index = 0; index < processes; index++)); do
    start "$index" "$port" "$@"
  done
  ((!stopping)) || ask_to_stop # those that the signal came too early for
  while ((${#alive[@]})); do
    sleep 0.1 || true
    for index in "${!alive[@]}"; do
      kill -0 "${alive[index]}" 2>/dev/null || ended "$index"
    done
    if ((deadline >= 0 && SECONDS >= deadline && ${#alive[@]})); then
      say "killing what still runs: process ${!alive[*]}"
      deadline=-1
      kill_all
    fi
  done 2>/dev/null # where the shell itself tells of killed jobs
  for pid in "${filters[@]}"; do # let the last lines through
    for _ in {1..20}; do
      kill -0 "$pid" 2>/dev/null || break
      sleep 0.1 || true
    done
  done
}

if [[ ${1-} == -h || ${1-} == --help ]]; then
  usage
  exit
fi
processes=${1-}
if ! whole_number "$processes" || ((10#$processes == 0)); then
  usage >&2
  bad_input "first comes the number of processes, as in: launch/local.sh 2 --config=configs/ppo_digits.py --workdir=runs/a"
fi
processes=$((10#$processes))
shift
devices=${DEVICES:-${JAX_NUM_CPU_DEVICES:-$processes}}
GRACE=${GRACE:-75}
RESTARTS=${RESTARTS:-0}
for name in devices GRACE RESTARTS; do
  whole_number "${!name}" || bad_input "${name^^} = ${!name}: must be a whole number"
done
if ((devices < processes || devices % processes)); then
  bad_input "DEVICES = $devices: must be a multiple of the $processes processes"
fi
if [[ -z ${PYTHON-} ]]; then
  PYTHON=python3
  [[ -x $root/.venv/bin/python ]] && PYTHON=$root/.venv/bin/python
fi
for tool in "$PYTHON" setsid setpriv sed; do
  command -v "$tool" >/dev/null || bad_input "$tool is missing; see the head of this script"
done
check_platform

trap stop INT TERM HUP
trap kill_all EXIT
for ((try = 0; ; try++)); do
  attempt "$@"
  if ((status == 0 || status == 2 || stopping || try >= RESTARTS)); then
    exit "$status"
  fi
  say "status $status: restart $((try + 1)) of $RESTARTS"
done
