#!/usr/bin/env bash
# Train on several machines with torchrun: the same on all of them, but for NODE_RANK. What follows is for the training.
#
#   MASTER_ADDR=192.168.1.50 MASTER_PORT=12355 NNODES=5 NODE_RANK=0 GPUS_PER_NODE=1 ./ddp_launch.sh --epochs 3
#
# Machines that do not reach each other in both directions, or only over a public address, are refused with what to
# type instead. Without a GPU, GPUS_PER_NODE is the number of processes.
set -euo pipefail

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

if [ "$machines" -gt 1 ]; then
  card=$(python -m cuadrilla check island "$address:$port" --machines "$machines" --number "$number")
  export GLOO_SOCKET_IFNAME="$card" NCCL_SOCKET_IFNAME="=$card"
  echo "torchrun: $machines machines, this is number $number, over $card" >&2
elif [ "$(uname)" = Linux ]; then
  export GLOO_SOCKET_IFNAME=lo NCCL_SOCKET_IFNAME=lo # one machine: nobody else has to reach its ranks
fi
exec python -m torch.distributed.run \
  --nnodes "$machines" --node-rank "$number" --nproc-per-node "${GPUS_PER_NODE:-1}" \
  --master-addr "$address" --master-port "$port" --max-restarts 3 \
  "$here/train_gpt2_spanish.py" "$@"
