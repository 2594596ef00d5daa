# rlsys with the versions of a lock file.
#   CPU:  docker build -t rlsys .
#   CUDA: docker build -t rlsys --build-arg BASE=nvidia/cuda:13.0.2-devel-ubuntu24.04 --build-arg LOCK=gpu \
#           --build-arg TORCH_INDEX=https://download.pytorch.org/whl/cu130 .
ARG BASE=ubuntu:24.04
FROM ${BASE}
ARG LOCK=cpu
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
# hadolint ignore=DL3008  the versions of build tools are those of the base image
RUN apt-get update \
    && apt-get install -y --no-install-recommends build-essential curl git python3-dev python3-venv wget \
    && rm -rf /var/lib/apt/lists/*
ENV VIRTUAL_ENV=/opt/rlsys PATH=/opt/rlsys/bin:$PATH
RUN python3 -m venv "$VIRTUAL_ENV"
WORKDIR /workspace
COPY requirements/${LOCK}.txt requirements/
RUN pip install --no-cache-dir -r requirements/${LOCK}.txt --extra-index-url ${TORCH_INDEX}
COPY . .
RUN pip install --no-cache-dir --no-deps .
CMD ["rlsys", "--help"]
