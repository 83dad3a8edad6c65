# What the launchers share. Sourced, not run.
# shellcheck shell=bash

export RAY_ENABLE_UV_RUN_RUNTIME_ENV=0 # Ray would build an environment for every worker
export RAY_USAGE_STATS_ENABLED=0

fail() {
  printf 'error: %s\n' "$1" >&2
  exit 2
}

usage() { # SCRIPT: print its leading comment
  sed -n '2,/^set /{/^set /d;s/^# \{0,1\}//;p;}' "$1" >&2
  exit 2
}

require_count() { # NAME VALUE
  [[ $2 =~ ^[1-9][0-9]*$ ]] || fail "$1 = '$2' must be a number of at least 1"
}

num_gpus() {
  if [[ -n ${CUDA_VISIBLE_DEVICES+set} ]]; then
    tr ',' '\n' <<<"$CUDA_VISIBLE_DEVICES" | grep -c '[0-9A-Za-z]' || true
  elif command -v nvidia-smi >/dev/null; then
    nvidia-smi --list-gpus | grep -c '^GPU' || true
  else
    echo 0
  fi
}

run() { # COMMAND ...: or, with DRY_RUN=1, print it
  if [[ ${DRY_RUN:-0} == 1 ]]; then
    printf '%q ' "$@" | sed 's/ $//'
    printf '\n'
  else
    "$@"
  fi
}

run_tool() { # PROGRAM ...: of the project's environment
  read -r -a starter <<<"${RUN-uv run --no-sync}"
  run "${starter[@]}" "$@"
}

train() { # RECIPE KEY=VALUE ...
  local program=(trainer)
  if [[ -n ${ENTRY:-} ]]; then
    program=(python -m "$ENTRY")
  fi
  local output=()
  if [[ -n ${OUTPUT_DIR:-} ]]; then
    output=("run_dir='$OUTPUT_DIR'")
  fi
  run_tool "${program[@]}" "$@" "${output[@]}"
}

start_ray() { # OPTION ...: Ray in the background, ended with this script; other clusters of the machine are left alone
  if [[ ${DRY_RUN:-0} == 1 ]]; then
    run_tool ray start "$@" --disable-usage-stats --block
    return
  fi
  read -r -a starter <<<"${RUN-uv run --no-sync}"
  "${starter[@]}" ray start "$@" --disable-usage-stats --block &
  ray_process=$! # the program itself, so that what it started ends with it
  trap 'kill "$ray_process" 2>/dev/null; wait "$ray_process" || true' EXIT
}

settle_authentication() { # the head, the other machines and the trainer must agree
  if [[ -z ${RAY_AUTH_MODE:-} ]]; then
    if [[ -n ${RAY_AUTH_TOKEN:-}${RAY_AUTH_TOKEN_PATH:-} || -f ~/.ray/auth_token ]]; then
      export RAY_AUTH_MODE=token
    else
      export RAY_AUTH_MODE=disabled
      printf 'warning: Ray runs without authentication; set RAY_AUTH_TOKEN on every machine\n' >&2
    fi
  fi
}

wait_for() { # HOST PORT SECONDS: until it accepts connections
  local deadline=$((SECONDS + $3))
  if [[ ${DRY_RUN:-0} == 1 ]]; then
    return
  fi
  until (exec 3<>"/dev/tcp/$1/$2") 2>/dev/null; do
    ((SECONDS < deadline)) || fail "no Ray answers at $1:$2 after $3 s; did the machine with NODE_RANK=0 start?"
    require_ray
    sleep 2
  done
}

wait_until_gone() { # HOST PORT: until machine 0 is done, or Ray here has ended
  if [[ ${DRY_RUN:-0} == 1 ]]; then
    return
  fi
  while (exec 3<>"/dev/tcp/$1/$2") 2>/dev/null; do
    require_ray
    sleep 2
  done
}

require_ray() { # fail where Ray was started here and has ended
  if [[ -n ${ray_process:-} ]] && ! kill -0 "$ray_process" 2>/dev/null; then
    fail "Ray has ended on this machine; its own messages above say why"
  fi
}
