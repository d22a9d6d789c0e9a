# attnd, attnctl and attnload on Debian 13, built and run with Debian's own packages. With BuildKit or without:
#
#   docker build --tag attnd .
#
# Any Debian 13 will do as the base, for example one that debootstrap made and `docker import` took in:
#
#   docker build --tag attnd --build-arg BASE=my-debian:13 .
ARG BASE=debian:trixie-20260713-slim

# ---- build ------------------------------------------------------------------------------------------------------------

FROM ${BASE} AS build
WORKDIR /src

# Before the sources, so that a change of theirs does not install everything again.
COPY deploy/setup deploy/progress.sh deploy/
COPY deploy/source_builds deploy/source_builds
RUN deploy/setup

COPY CMakeLists.txt CMakePresets.json ./
COPY proto proto
COPY kernels kernels
COPY server server
COPY client client
COPY deploy/CMakeLists.txt deploy/
COPY deploy/cmake deploy/cmake
# Empty: as many as there are processors.
ARG BUILD_JOBS=
# No instruction set is named: the compiler's baseline (any x86-64) and, at run time, what the CPU has.
RUN cmake --preset release -DATTND_BUILD_TESTS=OFF \
  && cmake --build --preset release --parallel "${BUILD_JOBS:-$(nproc)}" --target attnd attnctl attnload \
  && mkdir -p /out/bin \
  && for program in attnd attnctl attnload; do strip -o /out/bin/$program build/release/bin/$program || exit 1; done

# The packages that hold the libraries that the programs name: what the image below installs, whatever their versions.
RUN objdump -p /out/bin/* | awk '$1 == "NEEDED" { print "*/" $2 }' | sort -u \
  | xargs dpkg-query --search | cut -d: -f1 | sort -u > /out/runtime-packages \
  && cat /out/runtime-packages

# ---- the image --------------------------------------------------------------------------------------------------------

FROM ${BASE}
COPY --from=build /out/runtime-packages /usr/local/share/attnd/
RUN apt-get update \
  && xargs env DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends \
    < /usr/local/share/attnd/runtime-packages \
  && apt-get clean \
  && rm -rf /var/lib/apt/lists/* /var/cache/apt /var/log/apt /var/log/dpkg.log /usr/share/doc /usr/share/man
COPY LICENSE /usr/local/share/attnd/
COPY --from=build /out/bin/ /usr/local/bin/

ARG VERSION=0.1.0
ARG REVISION=unknown
LABEL org.opencontainers.image.title="attnd" \
  org.opencontainers.image.description="The key/value cache of transformers, and their attention, as a gRPC service" \
  org.opencontainers.image.licenses="Apache-2.0" \
  org.opencontainers.image.version="${VERSION}" \
  org.opencontainers.image.revision="${REVISION}"

# Inside a container loopback is reached by nobody else. Publish the ports where they are wanted.
ENV ATTND_LISTEN=0.0.0.0:50051 ATTND_METRICS_LISTEN=0.0.0.0:9464
EXPOSE 50051 9464

# For --spill_dir, --snapshot_on_drain and --restore: nothing is written unless they are given. A volume that is mounted
# here takes the owner over.
RUN install --directory --owner=65532 --group=65532 --mode=0700 /var/lib/attnd

# A number, so that Kubernetes can see that it is not root.
USER 65532:65532
STOPSIGNAL SIGTERM
HEALTHCHECK --interval=10s --timeout=5s --start-period=60s --retries=3 CMD ["attnctl", "health", "--timeout=2s"]
# attnd is PID 1 and so gets SIGTERM itself. `docker stop` kills after 10 s unless told to wait: a drain may take
# ATTND_DRAIN_TIMEOUT (30 s), and saving sessions some more, so run it with --stop-timeout 120.
ENTRYPOINT ["attnd"]
