# The router: no torch, no compiler. From the root of the repository:
#   docker build -f docker/router.Dockerfile -t baton-router:VERSION .
# BASE may be any Debian or Ubuntu with Python 3.11 to 3.13 and its venv module. Pin it by digest where you build.
ARG BASE=python:3.12.12-slim-bookworm
# What the chart needs: finding workers by EndpointSlices, simulated workers, traces. EXTRAS= leaves all of it out.
ARG EXTRAS=kubernetes,sim,otel

FROM ${BASE} AS build
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
# Where pip looks, if not at PyPI.
ARG PIP_INDEX_URL
ARG PIP_EXTRA_INDEX_URL
ARG PIP_TRUSTED_HOST
ARG EXTRAS
RUN apt-get update && apt-get install -y --no-install-recommends binutils \
    && python3 -m venv --without-pip /opt/baton
WORKDIR /src
COPY pyproject.toml constraints.txt README.md LICENSE ./
COPY services services
COPY kernels kernels
COPY docker/trim docker/trim
RUN python3 -m pip --python /opt/baton/bin/python install ".${EXTRAS:+[$EXTRAS]}" -c constraints.txt \
    && docker/trim /opt/baton \
    && /opt/baton/bin/python -c 'import importlib.util, sys; sys.exit(importlib.util.find_spec("torch") is not None)'

FROM ${BASE}
ARG VERSION=unknown
ARG REVISION=unknown
ARG CREATED=unknown
LABEL org.opencontainers.image.title="baton-router" \
      org.opencontainers.image.description="Baton's front door, and simulated workers" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.revision="${REVISION}" \
      org.opencontainers.image.created="${CREATED}"
RUN apt-get update && apt-get install -y --no-install-recommends tini && rm -rf /var/lib/apt/lists/* \
    && groupadd --gid 10001 baton \
    && useradd --uid 10001 --gid 10001 --no-create-home --home-dir /var/cache/baton --shell /usr/sbin/nologin baton \
    && install -d -o 10001 -g 10001 /var/cache/baton /models
COPY --from=build /opt/baton /opt/baton
COPY LICENSE /usr/share/doc/baton/LICENSE
# The root may be read-only: nothing is written but below these, and /tmp.
ENV PATH=/opt/baton/bin:$PATH HOME=/var/cache/baton BATON_CACHE_DIR=/var/cache/baton/kernels HF_HOME=/models/huggingface \
    PYTHONDONTWRITEBYTECODE=1 PYTHONUNBUFFERED=1
USER 10001:10001
EXPOSE 8000 8001
STOPSIGNAL SIGTERM
# That it answers at all. Kubernetes has probes of its own and takes no notice.
HEALTHCHECK --interval=10s --timeout=3s --start-period=60s \
    CMD ["python3", "-c", "import urllib.request as r; r.urlopen('http://127.0.0.1:8000/version', timeout=2)"]
# Process 1 must hear SIGTERM from its first moment: tini passes it on, and keeps the exit status.
ENTRYPOINT ["tini", "--", "baton"]
CMD ["router", "--host", "0.0.0.0", "--discovery", "kubernetes"]
