#!/usr/bin/env bash
# One run on GPU machines under mpirun (Open MPI 4 or 5), one process on each machine with all its GPUs.
#
#   HOSTFILE=hosts launch/gpu_mpi.sh --config=configs/NAME.py --workdir=DIR [--config.KEY=VALUE ...]
#
#   HOSTFILE      Open MPI's hostfile, a machine a line; without it this machine alone
#   PER_HOST      processes on each machine: 1, or the number of its GPUs for one process each     (1)
#   GPUS          GPUs of each machine     (counted by nvidia-smi)
#   COORDINATOR   HOST:PORT of process 0, for networks where the first machine's name in HOSTFILE does not lead to it
#   GRACE         seconds to save in after SIGTERM     (75)
#   LAST_WORDS    seconds the others get to end by themselves after one failed, before mpirun kills them     (15)
#   RESTARTS      how often the same command is run again after a failure     (3)
#   PYTHON        interpreter, the same path on all machines     (.venv/bin/python of this checkout if there is one, else python3)
#
# Checkout, interpreter and DIR are at the same paths everywhere. jax finds process 0 from Open MPI 4 when that runs on
# this machine; else it is told. Environment variables JAX_*, XLA_*, NCCL_*, CUDA_*, HF_*, LIBTPU_* and LD_LIBRARY_PATH go along.
# The exit status is that of the process that failed first. 2 (bad input) is never tried again. SIGTERM and Ctrl-C make
# every process save and stop, a second one kills them.

set -euo pipefail

self=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd)/$(basename -- "${BASH_SOURCE[0]}")
root=$(dirname -- "$(dirname -- "$self")")

say() { echo "gpu_mpi.sh: $*" >&2; }

bad_input() {
  say "$*"
  exit 2
}

# How many GPUs this machine has for us; nothing when it has none.
count_gpus() {
  if [[ -n ${GPUS-} ]]; then
    echo "$GPUS"
  elif [[ -n ${CUDA_VISIBLE_DEVICES-} ]]; then
    tr ',' '\n' <<<"$CUDA_VISIBLE_DEVICES" | grep -c .
  elif command -v nvidia-smi >/dev/null; then
    nvidia-smi --list-gpus | grep -c .
  fi || true
}

# What mpirun starts: one process of the run. The process leads a session of its own, so that mpirun's signals come to this
# shell: SIGUSR1 and SIGTERM are passed on as SIGTERM, and if this shell is killed the kernel kills the process.
worker() {
  local coordinator=$1 gpus child code caught join=(--distributed)
  shift
  if [[ $coordinator != detect ]]; then
    join=("--coordinator=$coordinator" "--processes=$OMPI_COMM_WORLD_SIZE" "--process=$OMPI_COMM_WORLD_RANK")
  fi
  if ((OMPI_COMM_WORLD_LOCAL_SIZE > 1)); then
    export JAX_LOCAL_DEVICE_IDS=$OMPI_COMM_WORLD_LOCAL_RANK
  else
    gpus=$(count_gpus)
    JAX_LOCAL_DEVICE_IDS=$(seq -s, 0 $((${gpus:-1} - 1)))
    export JAX_LOCAL_DEVICE_IDS
  fi
  child=""
  trap 'caught=1; [[ -z $child ]] || kill -TERM "$child" 2>/dev/null || true' TERM USR1
  PYTHONUNBUFFERED=1 setsid setpriv --pdeathsig KILL "$PYTHON" -m yatt_jax.main "$@" "${join[@]}" </dev/null &
  child=$!
  while :; do
    caught=0 code=0
    wait "$child" || code=$?
    ((caught)) || break
  done
  kill -KILL -- "-$child" 2>/dev/null || true # children that it left behind
  # mpirun kills all others as soon as one shell reports a failure; bad input is known to all by then.
  if ((code != 0 && code != 2)); then
    setpriv --pdeathsig KILL sleep "$LAST_WORDS" || true
  fi
  exit "$code"
}

first_host() { awk '!/^[[:space:]]*(#|$)/ { print $1; exit }' "$HOSTFILE"; }

is_here() {
  local name
  for name in localhost 127.0.0.1 "$(hostname)" "$(hostname -s)" $(hostname -f 2>/dev/null; hostname -I 2>/dev/null); do
    [[ $1 == "$name" ]] && return
  done
  return 1
}

# Where process 0 will be, or "detect" where jax finds out from mpirun. mpirun 4 names its own machine, mpirun 5 none.
find_coordinator() {
  local host=127.0.0.1
  [[ -z ${HOSTFILE-} ]] || host=$(first_host)
  if [[ -n ${COORDINATOR-} ]]; then
    echo "$COORDINATOR"
  elif ((version < 5)) && is_here "$host"; then
    echo detect
  else
    echo "$host:$((20000 + RANDOM % 12000))"
  fi
}

# Sets ``options`` for mpirun.
make_options() {
  local name
  options=(--map-by "ppr:$PER_HOST:node:oversubscribe" --bind-to none)
  if ((version < 5)); then
    options+=(--tag-output)
  else
    options+=(--output tag)
  fi
  [[ -z ${HOSTFILE-} ]] || options+=(--hostfile "$HOSTFILE")
  ((EUID)) || options+=(--allow-run-as-root) # as in containers
  while read -r name; do
    options+=(-x "$name")
  done < <(compgen -e | grep -E '^(JAX|XLA|NCCL|CUDA|HF|LIBTPU)_|^(LD_LIBRARY_PATH|PYTHON|GPUS|LAST_WORDS)$')
}

# shellcheck disable=SC2317 # called by trap
stop() {
  caught=1
  if ((stopping++)); then
    kill -TERM "$mpirun" 2>/dev/null || true
    return
  fi
  say "asking every process to save and stop, within $GRACE s; once more kills them"
  deadline=$((SECONDS + GRACE))
  [[ -z $mpirun ]] || kill -USR1 "$mpirun" 2>/dev/null || true # mpirun hands this on, and ends everything itself on SIGTERM
}

# One attempt; sets ``status``.
attempt() {
  local coordinator
  coordinator=$(find_coordinator)
  deadline=-1
  setsid setpriv --pdeathsig KILL mpirun "${options[@]}" \
    setpriv --pdeathsig KILL bash "$self" --worker "$coordinator" "$@" </dev/null &
  mpirun=$!
  while kill -0 "$mpirun" 2>/dev/null; do
    sleep 0.2 || true
    if ((deadline >= 0 && SECONDS >= deadline)); then
      say "killing what still runs"
      deadline=-1
      kill -TERM "$mpirun" 2>/dev/null || true
    fi
  done
  status=0
  wait "$mpirun" || status=$?
}

export PYTHON=${PYTHON:-}
if [[ -z $PYTHON ]]; then
  PYTHON=python3
  [[ -x $root/.venv/bin/python ]] && PYTHON=$root/.venv/bin/python
fi
if [[ ${1-} == --worker ]]; then
  worker "${@:2}"
fi
if [[ ${1-} == -h || ${1-} == --help ]]; then
  sed -n '2,/^$/ s/^# \{0,1\}//p' "$self"
  exit
fi
PER_HOST=${PER_HOST:-1}
GRACE=${GRACE:-75}
RESTARTS=${RESTARTS:-3}
export LAST_WORDS=${LAST_WORDS:-15}
for name in PER_HOST GRACE LAST_WORDS RESTARTS; do
  [[ ${!name} =~ ^[0-9]{1,9}$ ]] || bad_input "$name = ${!name}: must be a whole number"
done
((PER_HOST)) || bad_input "PER_HOST = 0: must be at least 1"
for tool in mpirun setsid setpriv; do
  command -v "$tool" >/dev/null || bad_input "$tool is missing: this needs Linux with util-linux and Open MPI 4 or 5"
done
[[ -z ${HOSTFILE-} || -r $HOSTFILE ]] || bad_input "HOSTFILE = $HOSTFILE: no such file"
version=$(mpirun --version | sed -n 's/.*(Open MPI) \([0-9]*\)\..*/\1/p')
[[ -n $version ]] || bad_input "mpirun is not Open MPI's: $(mpirun --version | head -n 1)"
make_options

stopping=0 mpirun="" deadline=-1
trap stop INT TERM HUP
for ((try = 0; ; try++)); do
  attempt "$@"
  if ((status == 0 || status == 2 || stopping || try >= RESTARTS)); then
    exit "$status"
  fi
  say "status $status: restart $((try + 1)) of $RESTARTS"
done
