#!/usr/bin/env bash
# Makes .venv and installs the pinned requirements into it; does nothing when that has been done already.
#
#   PYTHON=python3.12            the interpreter to make .venv with (default: the first of python3, python3.14 … 3.11
#                                that is new enough)
#   REQUIREMENTS=requirements.txt or requirements-cpu.txt    (default: by whether nvidia-smi finds a GPU)
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../../.."

VENV=.venv
LOG=$VENV/install.log
STAMP=$VENV/installed.sha256   # hash of what was installed, written last
UNFINISHED=$VENV/unfinished    # there while an install is under way
DEV_REQUIREMENTS=requirements-dev.txt
PYTORCH_CPU_INDEX=https://download.pytorch.org/whl/cpu
NOT_NEEDED="torchvision torchaudio torchcodec"  # vLLM asks for them, for images and sound; see requirements-cpu.txt
IMPORTS='import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen3ForCausalLM
from vllm.v1.engine.async_llm import AsyncLLM'

fail() {
    printf 'error: %s\n' "$*" >&2
    exit 1
}

check_platform() {
    local system machine
    system=$(uname -s) machine=$(uname -m)
    [ "$system" = Linux ] && [ "$machine" = x86_64 ] ||
        fail "this is $system on $machine. vLLM and this project run on Linux x86-64; on Windows, use WSL 2."
}

# Prints the first interpreter that is new enough.
find_python() {
    local candidate
    for candidate in ${PYTHON:-python3 python3.14 python3.13 python3.12 python3.11}; do
        if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
            command -v "$candidate"
            return
        fi
    done
    fail "no Python 3.11 or newer found (${PYTHON:-python3} is $("${PYTHON:-python3}" --version 2>&1 | head -n 1))." \
        "Install one, or name it: make setup PYTHON=/path/to/python3.12"
}

choose_requirements() {
    if [ -n "${REQUIREMENTS:-}" ]; then
        [ -f "$REQUIREMENTS" ] || fail "REQUIREMENTS=$REQUIREMENTS is not a file."
        echo "$REQUIREMENTS"
    elif nvidia-smi -L 2>/dev/null | grep -q '^GPU '; then
        echo requirements.txt
    else
        echo requirements-cpu.txt
    fi
}

fingerprint() {
    { cat "$1" "$DEV_REQUIREMENTS" src/classroom_rl/launch/install.sh; cat pyproject.toml 2>/dev/null || true; } |
        sha256sum | cut -d ' ' -f 1
}

# Leaves a .venv that can be installed into, and $UNFINISHED in it until the install is done.
make_venv() {
    local python
    if [ -e "$UNFINISHED" ]; then
        echo "an earlier install did not finish: $VENV is made anew"
    elif "$VENV/bin/python" -m pip --version >/dev/null 2>&1; then
        touch "$UNFINISHED"
        return
    fi
    python=$(find_python) || exit 1
    "$python" -c 'import ensurepip, venv' 2>/dev/null ||
        fail "$python cannot make virtual environments. On Debian and Ubuntu: sudo apt install python3-venv"
    mkdir -p "$VENV"
    touch "$UNFINISHED"
    find "$VENV" -mindepth 1 -maxdepth 1 ! -path "$UNFINISHED" -exec rm -rf {} +
    "$python" -m venv "$VENV"
}

check_space() {
    local free needed=15
    case $1 in *cpu*) needed=6 ;; esac
    free=$(df --output=avail -k . | tail -1)
    [ "$free" -ge $((needed * 1024 * 1024)) ] ||
        fail "$((free / 1024 / 1024)) GiB are free here; the packages need $needed GiB."
}

# Runs a command with its output in the log and a sign of life on the terminal; ends with the command's status.
quietly() {
    local started=$SECONDS pid shown=0
    printf '\n$ %s\n' "$*" >>"$LOG"
    "$@" >>"$LOG" 2>&1 9>&- &
    pid=$!
    trap 'kill "$pid" 2>/dev/null || true; exit 130' INT TERM
    while kill -0 "$pid" 2>/dev/null; do
        sleep 1
        if [ -t 1 ]; then
            printf '\r  %d s' $((SECONDS - started))
        elif [ $((SECONDS - started - shown)) -ge 30 ]; then
            shown=$((SECONDS - started))
            printf '  %d s\n' "$shown"
        fi
    done
    [ ! -t 1 ] || printf '\r\033[K'
    trap - INT TERM
    wait "$pid"
}

pip_install() { quietly "$VENV/bin/python" -m pip install --disable-pip-version-check "$@"; }

install_torch_for_cpu() {
    local torch
    torch=$(grep -o '^torch==[^ ]*' "$1")
    echo "installing $torch"
    pip_install "$torch" && return
    echo "the index that pip is configured with has no $torch: trying $PYTORCH_CPU_INDEX"
    pip_install "$torch" --extra-index-url "$PYTORCH_CPU_INDEX"
}

install_requirements() {
    case $1 in
        *cpu*) install_torch_for_cpu "$1" || return 1 ;;
    esac
    echo "installing $1 and $DEV_REQUIREMENTS"
    pip_install -r "$1" -r "$DEV_REQUIREMENTS" || return 1
    if [ -f pyproject.toml ]; then
        pip_install --no-deps --no-build-isolation --editable . || return 1
    fi
    case $1 in
        *cpu*) take_out "$NOT_NEEDED" || return 1 ;;
    esac
    check_imports "$1"
}

# shellcheck disable=SC2086
take_out() { quietly "$VENV/bin/python" -m pip uninstall --yes $1; }

# A build of torchvision and the like that does not fit the one of torch keeps transformers from importing any model. Text
# models need none of them, so they are taken out where that is so; but on GPUs vLLM imports torchvision as an engine
# starts, whatever the model, so requirements.txt pins it and it stays.
check_imports() {
    local imports=$IMPORTS not_needed=$NOT_NEEDED
    grep -q '^transformers' "$1" || return 0
    if grep -q '^torchvision' "$1"; then
        imports="import torchvision; $IMPORTS" not_needed=${NOT_NEEDED/torchvision/}
    fi
    quietly "$VENV/bin/python" -c "$imports" && return
    echo "transformers and vLLM cannot be imported with $not_needed, which no part of this project needs: taking them out"
    take_out "$not_needed" || return 1
    quietly "$VENV/bin/python" -c "$imports"
}

main() {
    local requirements wanted
    check_platform
    exec 9<Makefile
    if ! flock -n 9; then
        echo "another make is setting up $VENV; waiting for it"
        flock -w 3600 9 || fail "the other make is still at it after an hour. Its log is $LOG."
    fi
    requirements=$(choose_requirements)
    wanted=$(fingerprint "$requirements")
    if [ -x "$VENV/bin/python" ] && [ ! -e "$UNFINISHED" ] && [ "$(cat "$STAMP" 2>/dev/null)" = "$wanted" ]; then
        return
    fi
    check_space "$requirements"
    make_venv
    rm -f "$STAMP"
    : >"$LOG"
    echo "setting up $VENV from $requirements: some minutes and 4 GB (GPU: 12 GB), once. Log: $LOG"
    install_requirements "$requirements" || {
        tail -n 15 "$LOG" >&2
        fail "the install failed; the whole log is $LOG. After mending the cause, run make again."
    }
    echo "$wanted" >"$STAMP"
    rm -f "$UNFINISHED"
    echo "$VENV is ready (${SECONDS} s)"
}

main "$@"
