# One image for every role; the command picks it:
#
#   docker build -t baton .
#   docker run baton decode --model smollm2 --name decode-0 --advertise-host decode-0
#   docker run baton router --model smollm2 --decode decode-0:50051 --mode colocated
#
# torch is by far the largest part. Its CPU build is a tenth of its CUDA build, and comes from an
# index of its own:
#
#   docker build --build-arg TORCH_INDEX=https://download.pytorch.org/whl/cpu -t baton .
#
# For cards EXTRA=cuda adds FlashInfer. This image has no nvcc to compile its kernels: JIT_CACHE
# names the index of FlashInfer's own package of compiled ones. Without it attention is torch's.
FROM python:3.11-slim-bookworm

ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_ROOT_USER_ACTION=ignore
WORKDIR /opt/baton

# What changes rarely comes first: torch, the other dependencies, then Baton itself.
COPY constraints.txt pyproject.toml ./
ARG TORCH_INDEX=""
RUN grep '^torch==' constraints.txt > torch.txt \
    && pip install ${TORCH_INDEX:+--index-url "$TORCH_INDEX"} --requirement torch.txt
ARG EXTRA=""
RUN python -c 'import sys, tomllib; project = tomllib.load(open("pyproject.toml", "rb"))["project"]; \
        extra = project["optional-dependencies"].get(sys.argv[1], []); \
        print(*project["dependencies"], *extra, sep="\n")' "$EXTRA" > requirements.txt \
    && pip install --constraint constraints.txt --requirement requirements.txt
ARG JIT_CACHE=""
RUN sed -n 's/^flashinfer-python==/flashinfer-jit-cache==/p' constraints.txt > kernels.txt \
    && if [ -n "$JIT_CACHE" ]; then \
        pip install --no-deps --index-url "$JIT_CACHE" --requirement kernels.txt; fi
COPY . .
RUN pip install --no-deps . && useradd --uid 1000 --create-home baton \
    && mkdir /cache && chown baton:baton /cache

# Where a role listens, unless its flags say otherwise; the health check asks there.
ENV BATON_HOST=0.0.0.0 BATON_PORT=8000 BATON_GRPC_PORT=50051 BATON_METRICS_PORT=9100
# Models are kept here: mount one volume for all containers.
ENV BATON_CACHE=/cache HF_HOME=/cache/huggingface FLASHINFER_WORKSPACE_BASE=/cache
VOLUME /cache
EXPOSE 8000 50051 9100

USER 1000:1000
WORKDIR /home/baton
HEALTHCHECK --interval=10s --timeout=8s --start-period=120s --retries=3 \
    CMD ["python", "-m", "deploy.health"]
ENTRYPOINT ["baton"]
CMD ["--help"]
