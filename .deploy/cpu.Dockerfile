# An image for CPUs, of the wheels that `make wheels` builds:
#   make wheels && docker build -f .deploy/cpu.Dockerfile -t penstock .
#   docker run --rm --read-only --tmpfs /tmp -v data:/data -v models:/models -p 8000:8000 \
#     -e PENSTOCK_API_KEY=... penstock demo
# Buildah and Podman keep the health check with `--format docker` only.
ARG BASE=python:3.11-slim-bookworm
FROM ${BASE} AS install
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
COPY dist/*.whl /wheels/
COPY constraints.txt /wheels/
# The CPU build of torch: on the package index is that for CUDA, of some gigabytes more.
RUN python3 -m venv /opt/penstock \
 && /opt/penstock/bin/pip install --no-cache-dir --extra-index-url "${TORCH_INDEX}" --find-links /wheels \
      -c /wheels/constraints.txt penstock-client penstock-llm \
 && /opt/penstock/bin/pip uninstall --yes pip

FROM ${BASE}
RUN useradd --uid 10001 --no-create-home --home-dir /tmp penstock \
 && mkdir /data /models \
 && chown penstock /data /models
COPY --from=install /opt/penstock /opt/penstock
ENV PATH=/opt/penstock/bin:$PATH \
    PENSTOCK_DATA_DIR=/data \
    PENSTOCK_CACHE_DIR=/models/cache \
    HF_HOME=/models/huggingface
USER 10001
VOLUME ["/data", "/models"]
EXPOSE 8000
STOPSIGNAL SIGTERM
HEALTHCHECK --interval=10s --timeout=5s --start-period=120s \
  CMD ["python3", "-c", "import urllib.request; urllib.request.urlopen('http://127.0.0.1:8000/health', timeout=4)"]
ENTRYPOINT ["penstock", "serve", "--host", "0.0.0.0", "--port", "8000"]
