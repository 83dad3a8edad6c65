#!/usr/bin/env bash
# Trains a recipe on the devices of this machine.
#
#   examples/run_experiment_single_node.sh RECIPE [KEY=VALUE ...]
#   DRY_RUN=1 examples/run_experiment_single_node.sh sd3/flowgrpo num_rollouts=10
#
# NUM_DEVICES  devices to use; default: the GPUs of this machine, or 1 without any
# OUTPUT_DIR   folder of the run; default: the recipe's own, runs/<recipe>/<time>
# ENTRY        Python module to run in place of the trainer command, such as unirl.train_diffusion
# RUN          how programs of the environment are started; default: uv run --no-sync. Empty: as they are on PATH
# DRY_RUN      1 prints the commands in place of running them
set -euo pipefail
# shellcheck source=examples/launch.sh
source "$(dirname "${BASH_SOURCE[0]}")/launch.sh"

[[ $# -ge 1 ]] || usage "${BASH_SOURCE[0]}"
devices=${NUM_DEVICES:-$(num_gpus)}
devices=$((devices > 0 ? devices : 1))
require_count NUM_DEVICES "$devices"
overrides=("num_devices=$devices")
if ((devices > 1)); then
  overrides+=(runtime=ray cluster.num_nodes=1)
fi
# A cluster that the shell happens to know is not this machine.
unset RAY_ADDRESS
train "$1" "${overrides[@]}" "${@:2}"
