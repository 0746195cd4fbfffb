# kvbench in a container, for the CPU (docs/container.md):
#     docker build --tag kvbench .
# and for NVIDIA GPUs, on an image with nvcc, with which kvbench compiles its kernels:
#     docker build --tag kvbench:cuda --build-arg BASE=nvidia/cuda:13.0.1-devel-ubuntu24.04 .
ARG BASE=debian:bookworm-slim

FROM ${BASE} AS build
# What pip installs first, and where it also looks: the CPU's build of PyTorch is in an index of its own.
ARG TORCH="torch>=2.6,<2.14"
ARG PIP_EXTRA_INDEX_URL=""
ARG PIP_FIND_LINKS=""
ARG EXTRAS=""
SHELL ["/bin/bash", "-euo", "pipefail", "-c"]
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install -y --no-install-recommends ca-certificates python3 python3-venv \
    && rm -rf /var/lib/apt/lists/*
RUN python3 -m venv /opt/kvbench && /opt/kvbench/bin/pip install --no-cache-dir "${TORCH}"
COPY pyproject.toml README.md LICENSE MANIFEST.in /src/
COPY agentbench_kv /src/agentbench_kv
RUN /opt/kvbench/bin/pip install --no-cache-dir "/src${EXTRAS}"

FROM ${BASE}
SHELL ["/bin/bash", "-euo", "pipefail", "-c"]
# g++ compiles the CPU's kernels when they are first used, for the processor at hand.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install -y --no-install-recommends ca-certificates g++ python3 \
    && rm -rf /var/lib/apt/lists/* \
    && useradd --create-home --uid 10001 kvbench \
    && install -d -o kvbench -g kvbench /data /runs
COPY --from=build /opt/kvbench /opt/kvbench
ENV PATH=/opt/kvbench/bin:$PATH KVBENCH_HOME=/data
USER 10001
WORKDIR /runs
VOLUME ["/data", "/runs"]
EXPOSE 8000
# Healthy while `kvbench serve` answers; for other commands: docker run --no-healthcheck.
HEALTHCHECK --interval=30s --timeout=10s --start-period=120s --retries=3 CMD ["python3", "-c", \
    "import os, urllib.request as r; r.urlopen('http://127.0.0.1:' + os.environ.get('KVBENCH_PORT', '8000') + '/health', timeout=8)"]
ENTRYPOINT ["kvbench"]
CMD ["serve", "--host", "0.0.0.0"]
