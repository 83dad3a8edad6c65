#!/usr/bin/env bash
# Trains a recipe on the devices of several machines: starts Ray on each, the trainer on the first, and stops Ray again.
# Run the same command on every machine.
#
#   plain shells  NUM_NODES=2 NODE_RANK=0 HEAD_ADDRESS=10.0.0.1 examples/run_experiment_multi_node.sh RECIPE [KEY=VALUE ...]
#                 and on the other machine with NODE_RANK=1
#   SLURM         sbatch --nodes=2 --gpus-per-node=8 --ntasks-per-node=1 examples/run_experiment_multi_node.sh RECIPE ...
#   Kubernetes    as the entrypoint of examples/launch/rayjob.yaml: KubeRay has started Ray, so the trainer joins RAY_ADDRESS
#
# NUM_NODES         machines; SLURM says it itself
# NODE_RANK         which of them this is, from 0, the one that trains; SLURM says it itself
# HEAD_ADDRESS      address of machine 0 that the others reach; never 127.0.0.1. SLURM says it itself
# DEVICES_PER_NODE  default: the GPUs of this machine, or 1 without any
# RAY_PORT          port of Ray on machine 0; default 6379
# START_TIMEOUT_S   longest wait for machine 0; default 300
# RAY_AUTH_TOKEN    a secret that all machines share; without one (or ~/.ray/auth_token) whoever reaches the port can run code
# OUTPUT_DIR, ENTRY, RUN, DRY_RUN: as in run_experiment_single_node.sh
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
# sbatch copies the script elsewhere; what it sources stays.
[[ -f $here/launch.sh ]] || here=${SLURM_SUBMIT_DIR:-.}/examples
# shellcheck source=examples/launch.sh
source "$here/launch.sh"

[[ $# -ge 1 ]] || usage "${BASH_SOURCE[0]}"

if [[ -n ${RAY_ADDRESS:-} ]]; then
  require_count NUM_NODES "${NUM_NODES:-}"
  require_count DEVICES_PER_NODE "${DEVICES_PER_NODE:-}"
  train "$1" "num_devices=$((NUM_NODES * DEVICES_PER_NODE))" runtime=ray "cluster.num_nodes=$NUM_NODES" "${@:2}"
  exit
fi

if [[ -n ${SLURM_JOB_ID:-} ]]; then
  if [[ -z ${SLURM_STEP_ID:-} ]]; then # the batch script itself: once on every node
    run srun --nodes="$SLURM_JOB_NUM_NODES" --ntasks="$SLURM_JOB_NUM_NODES" --ntasks-per-node=1 \
      "$here/run_experiment_multi_node.sh" "$@"
    exit
  fi
  NUM_NODES=$SLURM_JOB_NUM_NODES
  NODE_RANK=$SLURM_NODEID
  hosts=$(scontrol show hostnames "$SLURM_JOB_NODELIST")  # read whole: a pipe that closes early would end the script
  HEAD_ADDRESS=${HEAD_ADDRESS:-${hosts%%$'\n'*}}
fi

require_count NUM_NODES "${NUM_NODES:-}"
[[ ${NODE_RANK:-} =~ ^[0-9]+$ ]] || fail "NODE_RANK = '${NODE_RANK:-}' must be 0 to $((NUM_NODES - 1)), another one on every machine"
((NODE_RANK < NUM_NODES)) || fail "NODE_RANK = $NODE_RANK is not below NUM_NODES = $NUM_NODES"
case ${HEAD_ADDRESS:-} in
  "") fail "HEAD_ADDRESS is not set: the address of the machine with NODE_RANK=0, as the others reach it" ;;
  127.* | localhost) fail "HEAD_ADDRESS = $HEAD_ADDRESS is reached by one machine only; give its address in the network" ;;
esac
devices=${DEVICES_PER_NODE:-$(num_gpus)}
devices=$((devices > 0 ? devices : 1))
require_count DEVICES_PER_NODE "$devices"
port=${RAY_PORT:-6379}
settle_authentication
gpus=()
if (($(num_gpus) > 0)); then
  gpus=(--num-gpus="$devices")
fi

if ((NODE_RANK == 0)); then
  start_ray --head --node-ip-address="$HEAD_ADDRESS" --port="$port" --include-dashboard=false "${gpus[@]}"
  wait_for "$HEAD_ADDRESS" "$port" "${START_TIMEOUT_S:-300}"
  export RAY_ADDRESS=$HEAD_ADDRESS:$port
  train "$1" "num_devices=$((NUM_NODES * devices))" runtime=ray "cluster.num_nodes=$NUM_NODES" "${@:2}"
else
  wait_for "$HEAD_ADDRESS" "$port" "${START_TIMEOUT_S:-300}"
  start_ray --address="$HEAD_ADDRESS:$port" "${gpus[@]}"
  wait_until_gone "$HEAD_ADDRESS" "$port"
fi
