# CUDA, torch, and megalite with its packages; how to run it: docs/launch.md. With NVIDIA's apex: --build-arg APEX=1.
# tests/distribution/test_dockerfile.py runs what is written here as far as that goes without docker.
ARG BASE=pytorch/pytorch:2.11.0-cuda13.0-cudnn9-devel
FROM ${BASE}
SHELL ["/bin/bash", "-euo", "pipefail", "-c"]
# The base image's packages, and its torchrun, are those of its system Python, which pip leaves alone otherwise (PEP 668)
ENV PIP_BREAK_SYSTEM_PACKAGES=1 PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
WORKDIR /opt/megalite

# Compiled for minutes and seldom changed, so before all of megalite. Its setup.py imports packaging, and without a list
# of compute capabilities would build for seven.
ARG APEX=0
ARG APEX_COMMIT=6424da3b4faa6c8f062da4a48c424fff3f02d42d
ARG TORCH_CUDA_ARCH_LIST="8.0;9.0;10.0"
# hadolint ignore=DL3008
RUN if [ "$APEX" = 1 ]; then \
      apt-get update && apt-get install -y --no-install-recommends git && rm -rf /var/lib/apt/lists/*; \
      git init -q /tmp/apex && git -C /tmp/apex fetch -q --depth 1 https://github.com/NVIDIA/apex "$APEX_COMMIT"; \
      git -C /tmp/apex checkout -q FETCH_HEAD; \
      pip install setuptools==80.9.0 packaging==25.0 ninja==1.13.0; \
      APEX_CPP_EXT=1 APEX_CUDA_EXT=1 APEX_PARALLEL_BUILD="$(nproc)" pip install --no-build-isolation /tmp/apex; \
      rm -rf /tmp/apex; \
    fi

# What megalite needs, in the versions that its tests ran with; torch and its triton stay the base image's. No hashes:
# pip takes them of all packages or of none, and what the image brought has no file left to hash. Of the sources the version is enough
# here: a change of code installs nothing anew.
COPY pyproject.toml constraints.txt ./
COPY megalite/__init__.py megalite/
RUN sed -i '/^torch==/d' constraints.txt && touch README.md && \
    pip install -c constraints.txt ".[tensorboard,plots,data,s3,fast]" && rm -rf build ./*.egg-info

COPY README.md LICENSE pretrain_gpt.py ./
COPY tools tools
COPY examples examples
COPY megalite megalite
# Compiled now, as no user can write it later; what a run writes goes below runs and data
RUN pip install --no-deps -e . && python -m compileall -q megalite tools && mkdir -m 1777 runs data home

# Any user will do (docker run --user): caches of compiled kernels go to HOME, and torch asks for a name
ENV HOME=/opt/megalite/home USER=megalite
USER 1000:1000
# no ENTRYPOINT, so that commands are those of the documents: docker run IMAGE torchrun --nproc_per_node 8 pretrain_gpt.py
CMD ["python", "pretrain_gpt.py", "--help"]
