#!/usr/bin/env bash
# One run on every worker of a Cloud TPU VM slice, from any machine that has gcloud.
#
#   launch/tpu_vm.sh [--print] NAME ZONE --config=configs/NAME.py --workdir=DIR [--config.KEY=VALUE ...]
#   launch/tpu_vm.sh [--print] --stop NAME ZONE      ask every worker to save and stop, then kill what still runs
#
#   PROJECT       Google Cloud project     (gcloud's own setting)
#   SSH_FLAGS     further flags of gcloud's ssh and scp, as --internal-ip     (none)
#   GRACE         seconds that workers get to end by themselves after one failed, and to save in after SIGTERM     (75)
#   RESTARTS      how often the same command is run again after a failure     (3)
#
# Copies this checkout (tracked files, and new ones that git does not ignore) to ~/yatt_jax of each worker, installs it
# there with the extra [tpu], and runs it in ~/yatt_jax; DIR is shared by the workers. --print shows the commands and runs
# none. The run goes on without this script: start it inside tmux on a machine near the slice, and if it is lost, use --stop.
#
# The exit status is that of the worker that failed first. 2 (bad input) is never tried again. Ctrl-C and SIGTERM make
# every worker save and stop. Workers' logs stay in ~/yatt_jax_runs. A slice that was taken away has to be made again first.

set -euo pipefail

root=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd)
helper='bash yatt_jax/launch/tpu_worker.sh'
print=0 only_stop=0 stopping=0 scratch=""

say() { echo "tpu_vm.sh: $*" >&2; }

bad_input() {
  say "$*"
  exit 2
}

# Runs a command, or shows it under --print.
execute() {
  if ((print)); then
    printf '%s\n' "${*@Q}"
  else
    "$@"
  fi
}

on_all_workers() { execute gcloud compute tpus tpu-vm ssh "$name" "${place[@]}" --worker=all --command="$1"; }

# The checkout as one archive, copied and unpacked on every worker, and installed.
install() {
  local archive=$scratch/yatt_jax.tgz
  if ((!print)); then
    (cd "$root" && git ls-files -z --cached --others --exclude-standard | tar -czf "$archive" --null --ignore-failed-read -T -)
  fi
  execute gcloud compute tpus tpu-vm scp "$archive" "$name:yatt_jax.tgz" "${place[@]}" --worker=all
  on_all_workers "mkdir -p yatt_jax && tar -xzf yatt_jax.tgz -C yatt_jax && $helper install"
}

stop_workers() { on_all_workers "$helper stop $GRACE" </dev/null; }

# Passes the workers' output on and notes the status of each that ends.
watch() {
  trap '' INT TERM HUP
  local line
  while IFS= read -r line || [[ -n $line ]]; do
    printf '%s\n' "$line"
    if [[ $line =~ ^\[[^]]*\]\ exit\ status\ ([0-9]+)$ ]]; then
      echo "${BASH_REMATCH[1]}" >>"$scratch/ended"
    fi
  done
}

first_failure() { grep -m 1 -v '^0$' "$scratch/ended" || true; }

# One attempt on all workers; sets ``status``.
attempt() {
  local id command out watcher remote deadline=-1 code=0 stopped=0
  id=$(date +%Y%m%d-%H%M%S)-$$-$try
  printf -v command ' %q' "$id" "$@"
  if ((print)); then
    on_all_workers "$helper run$command"
    status=0
    return
  fi
  : >"$scratch/ended"
  exec {out}> >(watch)
  watcher=$!
  setsid gcloud compute tpus tpu-vm ssh "$name" "${place[@]}" --worker=all --command="$helper run$command" \
    </dev/null >&"$out" 2>&1 {out}>&- &
  remote=$!
  exec {out}>&-
  while kill -0 "$remote" 2>/dev/null; do
    sleep 0.5 || true
    if ((deadline < 0)) && { ((stopping)) || [[ -n $(first_failure) ]]; }; then
      deadline=$((SECONDS + (stopping ? 0 : GRACE)))
      ((stopping)) || say "a worker failed with status $(first_failure); the others get $GRACE s"
    fi
    if ((deadline >= 0 && SECONDS >= deadline)); then
      say "stopping every worker"
      stop_workers || say "gcloud could not reach every worker"
      deadline=$((SECONDS + 60)) # gcloud returns by itself once the workers' processes are gone
      ((!stopped++)) || kill -KILL -- "-$remote" 2>/dev/null || true
    fi
  done
  wait "$remote" || code=$?
  for _ in {1..20}; do # let the last lines through
    kill -0 "$watcher" 2>/dev/null || break
    sleep 0.1 || true
  done
  status=$(first_failure)
  status=${status:-$code}
  # a worker whose link broke may still run
  ((status == 0 || stopped)) || stop_workers || say "gcloud could not reach every worker"
}

while [[ ${1-} == --print || ${1-} == --stop ]]; do
  [[ $1 == --print ]] && print=1 || only_stop=1
  shift
done
if [[ ${1-} == -h || ${1-} == --help ]]; then
  sed -n '2,/^$/ s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"
  exit
fi
name=${1-} zone=${2-}
if [[ -z $name || -z $zone || $name == -* || $zone == -* ]]; then
  bad_input "first come the name and the zone of the TPU VM, as in: launch/tpu_vm.sh my-v5e us-west4-a --config=... --workdir=..."
fi
shift 2
GRACE=${GRACE:-75}
RESTARTS=${RESTARTS:-3}
for setting in GRACE RESTARTS; do
  [[ ${!setting} =~ ^[0-9]{1,9}$ ]] || bad_input "$setting = ${!setting}: must be a whole number"
done
((print)) || command -v gcloud >/dev/null || bad_input "gcloud is missing"
read -ra flags <<<"${SSH_FLAGS-}"
place=("--zone=$zone" ${PROJECT:+"--project=$PROJECT"} "${flags[@]}")
if ((only_stop)); then
  stop_workers
  exit
fi

scratch=/tmp
if ((!print)); then
  scratch=$(mktemp -d)
  trap 'rm -rf "$scratch"' EXIT
fi
install
trap 'stopping=1' INT TERM HUP
for ((try = 0; ; try++)); do
  attempt "$@"
  if ((status == 0 || status == 2 || stopping || try >= RESTARTS)); then
    exit "$status"
  fi
  say "status $status: restart $((try + 1)) of $RESTARTS"
done
