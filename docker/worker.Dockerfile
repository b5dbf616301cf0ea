# A worker, for CPUs or for CUDA. From the root of the repository:
#   docker build -f docker/worker.Dockerfile --build-arg DEVICE=cpu  -t baton-worker:VERSION-cpu .
#   docker build -f docker/worker.Dockerfile --build-arg DEVICE=cuda -t baton-worker:VERSION-cuda .
# Torch brings the CUDA libraries it wants; the driver comes from the node (NVIDIA's container toolkit).
ARG BASE=python:3.12.12-slim-bookworm
ARG DEVICE=cpu

FROM ${BASE} AS build
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
ARG PIP_INDEX_URL
# PyTorch's index of CPU wheels makes the CPU's image some 5 GB smaller.
ARG TORCH_CPU_INDEX=https://download.pytorch.org/whl/cpu
ARG PIP_TRUSTED_HOST
ARG DEVICE
RUN apt-get update && apt-get install -y --no-install-recommends binutils \
    && python3 -m venv --without-pip /opt/baton
WORKDIR /src
COPY pyproject.toml constraints.txt README.md LICENSE ./
COPY services services
COPY kernels kernels
COPY docker/trim docker/trim
RUN case "${DEVICE}" in \
      cpu) extras=worker; if [ -n "${TORCH_CPU_INDEX}" ]; then export PIP_EXTRA_INDEX_URL="${TORCH_CPU_INDEX}"; fi ;; \
      cuda) extras=worker,gpu,ucx,nixl ;; \
      *) echo "DEVICE must be cpu or cuda, not ${DEVICE}" >&2; exit 1 ;; \
    esac \
    && python3 -m pip --python /opt/baton/bin/python install ".[${extras}]" -c constraints.txt \
    && docker/trim /opt/baton

FROM ${BASE}
ARG VERSION=unknown
ARG REVISION=unknown
ARG CREATED=unknown
ARG DEVICE
LABEL org.opencontainers.image.title="baton-worker" \
      org.opencontainers.image.description="Baton's worker: prefill, decode or both (${DEVICE})" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.revision="${REVISION}" \
      org.opencontainers.image.created="${CREATED}"
# The kernels of the CPU are built where they run, for its processor; triton builds its launchers with the compiler too.
# By libibverbs NCCL reaches RDMA devices. NIXL's wheel has a UCX of its own with verbs; the wheel of UCX has none.
RUN if [ "${DEVICE}" = cuda ]; then verbs="libibverbs1 ibverbs-providers"; fi \
    && apt-get update && apt-get install -y --no-install-recommends g++ tini ${verbs:-} && rm -rf /var/lib/apt/lists/* \
    && groupadd --gid 10001 baton \
    && useradd --uid 10001 --gid 10001 --no-create-home --home-dir /var/cache/baton --shell /usr/sbin/nologin baton \
    && install -d -o 10001 -g 10001 /var/cache/baton /models
COPY --from=build /opt/baton /opt/baton
COPY LICENSE /usr/share/doc/baton/LICENSE
ENV PATH=/opt/baton/bin:$PATH HOME=/var/cache/baton BATON_CACHE_DIR=/var/cache/baton/kernels \
    TRITON_CACHE_DIR=/var/cache/baton/triton HF_HOME=/models/huggingface \
    NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility \
    PYTHONDONTWRITEBYTECODE=1 PYTHONUNBUFFERED=1
USER 10001:10001
EXPOSE 9000 9100
STOPSIGNAL SIGTERM
# That its metrics are served, on whatever address it listens: a worker that has not loaded has no port.
HEALTHCHECK --interval=10s --timeout=3s --start-period=1800s \
    CMD ["python3", "-c", "import os, urllib.request as r; h = os.environ.get('POD_IP', '127.0.0.1'); r.urlopen('http://%s:9100/metrics' % ('[%s]' % h if ':' in h else h), timeout=2)"]
# Process 1 must hear SIGTERM from its first moment: tini passes it on, and keeps the exit status.
ENTRYPOINT ["tini", "--", "baton"]
CMD ["both", "--host", "0.0.0.0", "--port", "9000", "--metrics-port", "9100"]
