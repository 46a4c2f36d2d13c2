# The image of gpu-fleet: one static binary on the base of k8s-gpu's image, of which it uses the certificates of authorities. No shell, no package
# manager, no user 0. "make image" builds it.
ARG BASE=gcr.io/distroless/base-nossl-debian12@sha256:36e60081779eefd6a7dc9796e6aafaecd632bc282a8ba76fdb7c8f89a75ea6c7
FROM ${BASE}
ARG VERSION
ARG REVISION
ARG CREATED
LABEL org.opencontainers.image.title="gpu-fleet" \
      org.opencontainers.image.description="Moves work away from faulty NVIDIA GPUs, within a budget" \
      org.opencontainers.image.vendor="Tandem" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.url="https://github.com/tandem-gpu/tandem" \
      org.opencontainers.image.documentation="https://github.com/tandem-gpu/tandem/blob/main/docs/rescue.md" \
      org.opencontainers.image.source="https://github.com/tandem-gpu/tandem" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.revision="${REVISION}" \
      org.opencontainers.image.created="${CREATED}"
COPY licenses /licenses
COPY gpu-fleet /usr/bin/gpu-fleet
USER 65532:65532
# Calls that are under way get their answers, and the lead is released.
STOPSIGNAL SIGTERM
ENTRYPOINT ["/usr/bin/gpu-fleet"]
