# Head and workers of a Ray cluster.     docker build -f deploy/images/worker.Dockerfile -t thinwire-worker:0.1.0 .
# KubeRay calls wget in it unless the RayCluster says rayVersion 2.53 or newer.
# With CUDA: --build-arg DEVICE=cuda. The wheels bring CUDA, the node its driver.
ARG PYTHON=python:3.11.13-slim-bookworm

FROM ${PYTHON} AS build
ARG DEVICE=cpu
COPY . /src
RUN /src/deploy/images/install.sh worker /opt/thinwire ${DEVICE}

FROM ${PYTHON}
COPY --from=build /opt/thinwire /opt/thinwire
ENV PATH=/opt/thinwire/bin:$PATH PYTHONUNBUFFERED=1
RUN useradd --uid 1000 --create-home ray
USER 1000:1000
WORKDIR /home/ray
CMD ["ray", "--version"]
