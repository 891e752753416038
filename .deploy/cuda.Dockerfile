# An image for NVIDIA's GPUs, as cpu.Dockerfile. Nobody has run it yet: no machine here has had a card for
# a container. torch's own build for CUDA has the libraries; the host needs the driver and its container toolkit.
ARG BASE=python:3.11-slim-bookworm
FROM ${BASE} AS install
COPY dist/*.whl /wheels/
COPY constraints.txt /wheels/
RUN python3 -m venv /opt/penstock \
 && /opt/penstock/bin/pip install --no-cache-dir --find-links /wheels -c /wheels/constraints.txt \
      penstock-client penstock-llm \
 && /opt/penstock/bin/pip uninstall --yes pip

FROM ${BASE}
# Triton compiles a launcher for each kernel with the system's compiler.
# hadolint ignore=DL3008
RUN apt-get update \
 && apt-get install -y --no-install-recommends gcc libc6-dev \
 && rm -rf /var/lib/apt/lists/* \
 && useradd --uid 10001 --no-create-home --home-dir /tmp penstock \
 && mkdir /data /models \
 && chown penstock /data /models
COPY --from=install /opt/penstock /opt/penstock
ENV PATH=/opt/penstock/bin:$PATH \
    PENSTOCK_DATA_DIR=/data \
    PENSTOCK_CACHE_DIR=/models/cache \
    HF_HOME=/models/huggingface \
    TRITON_CACHE_DIR=/models/cache/triton \
    NVIDIA_VISIBLE_DEVICES=all \
    NVIDIA_DRIVER_CAPABILITIES=compute,utility
USER 10001
VOLUME ["/data", "/models"]
EXPOSE 8000
STOPSIGNAL SIGTERM
HEALTHCHECK --interval=10s --timeout=5s --start-period=600s \
  CMD ["python3", "-c", "import urllib.request; urllib.request.urlopen('http://127.0.0.1:8000/health', timeout=4)"]
ENTRYPOINT ["penstock", "serve", "--host", "0.0.0.0", "--port", "8000"]
