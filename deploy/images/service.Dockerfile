# The control plane: no torch, no Ray.   docker build -f deploy/images/service.Dockerfile -t thinwire-service:0.1.0 .
ARG PYTHON=python:3.11.13-slim-bookworm

FROM ${PYTHON} AS build
COPY . /src
RUN /src/deploy/images/install.sh service /opt/thinwire

FROM ${PYTHON}
COPY --from=build /opt/thinwire /opt/thinwire
ENV PATH=/opt/thinwire/bin:$PATH PYTHONUNBUFFERED=1
RUN useradd --uid 1000 --create-home thinwire
USER 1000:1000
CMD ["thinwire", "serve"]
