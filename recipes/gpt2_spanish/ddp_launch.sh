#!/usr/bin/env bash
# Train on several machines with torchrun: the same on all of them, but for NODE_RANK. What follows is for the training.
#
#   MASTER_ADDR=192.168.1.50 MASTER_PORT=12355 NNODES=5 NODE_RANK=0 GPUS_PER_NODE=1 ./ddp_launch.sh --epochs 3
#
# Machines that do not reach each other in both directions, or only over a public address, are refused with what to
# type instead. Without a GPU, GPUS_PER_NODE is the number of processes. When a rank or a machine is lost, all of them
# begin again from the newest checkpoint, up to three times; a lost machine is back with the same command.
set -euo pipefail

restarts=3
address=${MASTER_ADDR:-127.0.0.1}
port=${MASTER_PORT:-12355}
machines=${NNODES:-1}
number=${NODE_RANK:-0}
for value in "$port" "$machines" "$number" "${GPUS_PER_NODE:-1}"; do
  case $value in
  '' | *[!0-9]*)
    echo "error: MASTER_PORT, NNODES, NODE_RANK and GPUS_PER_NODE are numbers, and one of them is '$value'" >&2
    exit 2
    ;;
  esac
done
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
card=$(mktemp)
child=
stopped=
trap 'rm -f "$card"' EXIT
trap 'stopped=yes; [ -z "$child" ] || kill -TERM "$child" 2>/dev/null || true' INT TERM HUP

# In the background, so that a signal is passed on at once. Returns its exit code.
attended() {
  "$@" &
  child=$!
  local code
  while :; do
    wait "$child" && code=0 || code=$?
    kill -0 "$child" 2>/dev/null || break
  done
  child=
  return "$code"
}

meet() { # SECONDS [again]
  TORCH_CPP_LOG_LEVEL=FATAL exec python "$here/preflight.py" "$address" "$port" "$machines" "$number" "$@" >"$card"
}

# torchrun does not take back a machine that was lost: between machines it ends, and all of them meet again.
train() {
  local again=$restarts
  [ "$machines" -eq 1 ] || again=0
  exec python -m torch.distributed.run \
    --nnodes "$machines" --node-rank "$number" --nproc-per-node "${GPUS_PER_NODE:-1}" \
    --master-addr "$address" --master-port "$port" --max-restarts "$again" \
    "$here/train_gpt2_spanish.py" "$@"
}

patience=(300)
for tries in $(seq 0 "$restarts"); do
  if [ "$machines" -gt 1 ]; then
    attended meet "${patience[@]}"
    name=$(cat "$card")
    export GLOO_SOCKET_IFNAME="$name" NCCL_SOCKET_IFNAME="=$name"
    echo "torchrun: $machines machines, this is number $number, over $name" >&2
  elif [ "$(uname)" = Linux ]; then
    export GLOO_SOCKET_IFNAME=lo NCCL_SOCKET_IFNAME=lo # one machine: nobody else has to reach its ranks
  fi
  code=0
  attended train "$@" || code=$?
  if [ "$code" -eq 0 ] || [ -n "$stopped" ] || [ "$machines" -eq 1 ] || [ "$tries" -eq "$restarts" ]; then
    exit "$code"
  fi
  patience=(1800 again)
  echo "torchrun: ended with exit code $code; all machines meet again ($((tries + 1)) of $restarts)" >&2
done
