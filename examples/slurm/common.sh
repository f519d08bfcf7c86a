# shellcheck shell=bash
# What shared.sbatch and split.sbatch share: the nodes, the token, the steps of the job, and its end. Environment:
#
#   ACCELERATE_CONFIG   accelerate's file (default config/deepspeed/zero3_4GPU.yaml); its numbers of machines and
#                       processes are replaced by those of the job
#   PROCESSES_PER_NODE  training processes on a node (default: its GPUs)
#   TOKEN_FILE          where the token of server and trainer is kept (default ~/.classroom_token)
#   SERVER_PORT, MAIN_PROCESS_PORT  (defaults 8005 and 29500) free on every node
set -euo pipefail

ACCELERATE_CONFIG=${ACCELERATE_CONFIG:-config/deepspeed/zero3_4GPU.yaml}
PROCESSES_PER_NODE=${PROCESSES_PER_NODE:-${SLURM_GPUS_ON_NODE:-1}}
TOKEN_FILE=${TOKEN_FILE:-$HOME/.classroom_token}
SERVER_PORT=${SERVER_PORT:-8005}
MAIN_PROCESS_PORT=${MAIN_PROCESS_PORT:-29500}

hostnames=$(scontrol show hostnames "$SLURM_JOB_NODELIST")
# shellcheck disable=SC2034  # the scripts use it
mapfile -t nodes <<<"$hostnames"

# In a file, because every user of a node can read command lines.
if [ ! -s "$TOKEN_FILE" ]; then
    (umask 077 && openssl rand -hex 32 >"$TOKEN_FILE")
fi
if [ "$(stat -c %a "$TOKEN_FILE")" != 600 ]; then
    echo "error: others may read $TOKEN_FILE. Do: chmod 600 $TOKEN_FILE" >&2
    exit 2
fi
CLASSROOM_TOKEN=$(<"$TOKEN_FILE")
export CLASSROOM_TOKEN

# server_urls HOST…: the override that names a server on each of these hosts.
server_urls() {
    local urls
    urls=$(printf ",http://%s:$SERVER_PORT" "$@")
    echo "generation.server_urls=[${urls:1}]"
}

# accelerate_flags NODE…: for a training on these nodes, without the rank. DeepSpeed would log in to the other nodes
# with pdsh; `standard` leaves it to srun to start there.
accelerate_flags() {
    printf '%s\n' --config_file "$ACCELERATE_CONFIG" --num_machines "$#" \
        --num_processes "$(($# * PROCESSES_PER_NODE))" --main_process_ip "$1" \
        --main_process_port "$MAIN_PROCESS_PORT" --deepspeed_multinode_launcher standard
}

# on_nodes FIRST COUNT COMMAND…: one task with all cores on each of COUNT nodes from node FIRST on, in the background. If
# one fails, all are ended.
steps=()
on_nodes() {
    srun --relative="$1" --nodes="$2" --ntasks="$2" --ntasks-per-node=1 --cpu-bind=none --kill-on-bad-exit=1 \
        "${@:3}" &
    steps+=("$!")
}

end_steps() {
    trap '' TERM USR1
    kill -TERM "${steps[@]}" 2>/dev/null || true
    wait
}

# SLURM sends USR1 before the time limit (--signal), TERM when the job is cancelled or preempted. Started again, a run
# continues: docs/overnight.md.
requeue() {
    echo "the time limit is near: the run stops, and continues when the job is started again"
    end_steps
    scontrol requeue "$SLURM_JOB_ID"
    exit 0
}
trap requeue USR1
trap 'end_steps; exit 143' TERM
