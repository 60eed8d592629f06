# jaxgrpo in a container, for a CPU unless ACCELERATOR says otherwise:
#   docker build -t jaxgrpo .
#   docker build -t jaxgrpo:cuda13 --build-arg ACCELERATOR=cuda13 .
#   docker run --rm jaxgrpo doctor
#   docker run --rm --gpus all -v jaxgrpo:/home/jaxgrpo jaxgrpo:cuda13 quickstart
# The volume of the last line keeps runs, models and compiled programs.
ARG PYTHON=3.12
FROM python:${PYTHON}-slim

# cpu, cuda12, cuda13 or tpu: an extra of jax. Its wheels bring CUDA or libtpu, not the GPU's driver.
ARG ACCELERATOR=cpu
# Of jaxgrpo: gcs reads and writes buckets, math judges mathematics, sandbox runs programs.
ARG EXTRAS=gcs,math,sandbox

WORKDIR /opt/jaxgrpo
COPY constraints.txt ./
# Before the source is copied, so that a change of the source does not download it again.
RUN case "$ACCELERATOR" in \
      cpu|cuda12|cuda13|tpu) ;; \
      *) echo "ACCELERATOR=$ACCELERATOR: expected cpu, cuda12, cuda13 or tpu" >&2; exit 1 ;; \
    esac; \
    pip install --no-cache-dir -c constraints.txt "jax[$ACCELERATOR]"
COPY pyproject.toml hatch_build.py README.md LICENSE ./
COPY jaxgrpo jaxgrpo
COPY configs configs
RUN pip install --no-cache-dir -c constraints.txt ".[$EXTRAS]"

RUN useradd --create-home --uid 1000 jaxgrpo
USER jaxgrpo
WORKDIR /home/jaxgrpo
# jaxgrpo gets the signals of `docker stop` and of Kubernetes itself: it saves, and exits with 143.
ENTRYPOINT ["jaxgrpo"]
CMD ["doctor"]
