# syntax=docker/dockerfile:1.7
# Hosts of slices: vllm-tpu, tpu-inference and libtpu. Versions: deployments/images/tpu.lock.
#
#   docker build -f deployments/images/tpu.Dockerfile -t slicewise-tpu:0.1.0 .
#
# Python 3.12: vllm-tpu has a wheel for no other. The digest is the one that public Dockerfiles pin
# beside this tag; read 2026-11-21, not pulled.
FROM python:3.12.12-slim-bookworm@sha256:593bd06efe90efa80dc4eee3948be7c0fde4134606dd40d8dd8dbcade98e669c AS packages

# Where pip finds torch's CPU build: other indexes have it with CUDA, which is most of 11 GB.
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
ENV PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_ROOT_USER_ACTION=ignore PIP_CACHE_DIR=/var/cache/pip
RUN python -m venv /opt/venv
COPY deployments/images/tpu.lock /build/packages.lock
# vllm-tpu and tpu-inference bring their tests along, as the packages `tests` and `tools`.
RUN --mount=type=cache,target=/var/cache/pip \
    /opt/venv/bin/python -m pip install --no-deps --extra-index-url "${TORCH_INDEX}" -r /build/packages.lock \
    && rm -rf /opt/venv/lib/python3.12/site-packages/tests /opt/venv/lib/python3.12/site-packages/tools

# After the packages: a change of ours does not fetch them again.
COPY pyproject.toml README.md LICENSE /build/source/
COPY serving /build/source/serving
COPY deployments /build/source/deployments
COPY autoscaling /build/source/autoscaling
COPY loadtest /build/source/loadtest
RUN --mount=type=cache,target=/var/cache/pip \
    /opt/venv/bin/python -m pip install --no-deps --no-build-isolation /build/source \
    && /opt/venv/bin/slicewise doctor --help > /dev/null


FROM python:3.12.12-slim-bookworm@sha256:593bd06efe90efa80dc4eee3948be7c0fde4134606dd40d8dd8dbcade98e669c

LABEL org.opencontainers.image.title="slicewise-tpu" \
      org.opencontainers.image.description="Slicewise: hosts of TPU slices, with vllm-tpu" \
      org.opencontainers.image.version="0.1.0" \
      org.opencontainers.image.licenses="Apache-2.0"

# As the pods say: user and group 1000.
RUN groupadd --gid 1000 slicewise \
    && useradd --uid 1000 --gid 1000 --create-home --shell /usr/sbin/nologin slicewise \
    && install --directory --owner=1000 --group=1000 /var/cache/slicewise

COPY --from=packages /opt/venv /opt/venv
COPY deployments/images/tpu.lock /opt/slicewise/packages.lock

# Ray gives its workers niceness 15, which leaves every stream behind any other process.
ENV PATH=/opt/venv/bin:$PATH \
    RAY_worker_niceness=0 \
    RAY_USAGE_STATS_ENABLED=0 \
    DO_NOT_TRACK=1 \
    PYTHONUNBUFFERED=1 \
    SLICEWISE_LOCK=/opt/slicewise/packages.lock
WORKDIR /opt/slicewise
USER 1000:1000
# KubeRay gives its own. Kubernetes probes what runs, hence no HEALTHCHECK.
CMD ["slicewise", "doctor"]
