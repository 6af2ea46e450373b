# kvtierd in a container; docs/CONTAINERS.md says how it is run and how engines reach it.
# The installation is `make install`, without what is for developing, into a folder that stays when the source is gone.
ARG BASE=python:3.11-slim-bookworm
FROM ${BASE}

ENV KVTIERD__CACHE_DIR=/var/cache/kvtierd \
    KVTIERD__SERVER__RUNTIME_DIR=/run/kvtierd \
    KVTIERD__NVME__DIRECTORY=/var/lib/kvtierd \
    PATH=/usr/local/lib/kvtierd/bin:${PATH}

# The numbers are what folders of the host are given to; a build argument changes them.
ARG UID=990
ARG GID=990
RUN groupadd --system --gid ${GID} kvtierd \
    && useradd --system --uid ${UID} --gid ${GID} --no-create-home --home-dir /var/lib/kvtierd kvtierd \
    && install -d -o kvtierd -g kvtierd -m 0755 /run/kvtierd \
    && install -d -o kvtierd -g kvtierd -m 0700 /var/lib/kvtierd \
    && install -d -m 0700 /var/cache/kvtierd

COPY . /src
WORKDIR /src
RUN apt-get update \
    && apt-get install -y --no-install-recommends make \
    && make install VENV=/usr/local/lib/kvtierd PACKAGE='.[daemon]' DEBIAN=libgomp1 \
    && chown -R kvtierd:kvtierd /var/cache/kvtierd \
    && apt-get purge -y --auto-remove make \
    && rm -rf /src "${HOME}/.cache" /var/lib/apt/lists/*

WORKDIR /
USER kvtierd
VOLUME ["/var/lib/kvtierd"]
STOPSIGNAL SIGTERM
HEALTHCHECK --interval=10s --timeout=5s --start-period=120s CMD ["kvtierctl", "ping", "--quiet", "--endpoint", "ipc:///run/kvtierd/default/kvtierd.sock"]
ENTRYPOINT ["kvtierd"]
