# The image of every role in compose.yaml, for the processor; with --build-arg TORCH_BUILD=cu130 for NVIDIA cards. amd64 and
# arm64: nothing below names an architecture.
#
#   docker build -t cuadrilla:cpu .
#
# Libraries are pinned by hash; torch comes from an index of its own and is pinned by version. Written for any builder: no
# cache mounts, no BuildKit.
ARG BASE_IMAGE=python:3.12-slim-bookworm
# Debian or Ubuntu with Python 3.11 to 3.14. torch's wheels carry CUDA themselves.
FROM ${BASE_IMAGE}
# cpu, cu130, or cu126: for cards before Turing (GTX 10xx and older) and for drivers before 580.
ARG TORCH_BUILD=cpu
# HOME and USER: as-owner's user may have no entry in /etc/passwd. PATH again for `bash -l`: see install.sh.
ENV PATH=/opt/venv/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin \
    HOME=/home/cuadrilla USER=cuadrilla CUADRILLA_HOME=/var/lib/cuadrilla \
    PYTHONUNBUFFERED=1 RAY_USAGE_STATS_ENABLED=0 \
    NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility
COPY docker/install.sh docker/requirements-build.txt docker/requirements-cpu.txt tools/pick_torch.py constraints.txt /opt/build/
RUN /opt/build/install.sh system
RUN /opt/build/install.sh libraries
RUN /opt/build/install.sh torch ${TORCH_BUILD}
COPY docker/as-owner docker/nvidia-smi /usr/local/bin/
COPY docker/healthy /usr/local/bin/cuadrilla-healthy
COPY pyproject.toml hatch_build.py README.md LICENSE /opt/build/cuadrilla/
COPY src /opt/build/cuadrilla/src
RUN /opt/build/install.sh cuadrilla
WORKDIR /workspace
# A training saves and stops; compose waits for it (stop_grace_period).
STOPSIGNAL SIGTERM
HEALTHCHECK --interval=30s --timeout=10s --start-period=60s CMD ["cuadrilla-healthy"]
ENTRYPOINT ["as-owner"]
CMD ["cuadrilla", "--help"]
