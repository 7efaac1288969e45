# CUDA, torch and megalite's packages. Apex is optional: docker build --build-arg APEX=1 .
ARG BASE=pytorch/pytorch:2.11.0-cuda13.0-cudnn9-devel
FROM ${BASE}
ARG APEX=0
# the base image's packages are those of its system Python, which pip leaves alone otherwise (PEP 668)
ENV PIP_BREAK_SYSTEM_PACKAGES=1
WORKDIR /opt/megalite
COPY pyproject.toml README.md LICENSE ./
COPY megalite megalite
RUN pip install --no-cache-dir ".[tensorboard,plots,data]"
RUN if [ "$APEX" = "1" ]; then \
      apt-get update && apt-get install -y --no-install-recommends git && rm -rf /var/lib/apt/lists/* && \
      git clone --depth 1 https://github.com/NVIDIA/apex /tmp/apex && \
      APEX_CPP_EXT=1 APEX_CUDA_EXT=1 pip install --no-cache-dir --no-build-isolation /tmp/apex && rm -rf /tmp/apex; \
    fi
COPY pretrain_gpt.py ./
COPY tools tools
COPY examples examples
ENTRYPOINT ["python", "pretrain_gpt.py"]
CMD ["--help"]
