# Smoke tests of scripts/package: each installs a package in an empty place and checks that it denies a request there.
# shellcheck shell=bash disable=SC2154

# A temporary directory, the process of the server under test, and its network namespace, if any; they end with the script.
PLACE=
SERVER=
NAMESPACE=
clean_up() {
    stop_server
    [ -z "$NAMESPACE" ] || as_root ip netns delete "$NAMESPACE"
    [ -z "$PLACE" ] || rm -rf "$PLACE"
}
trap clean_up EXIT

empty_place() {
    [ -z "$PLACE" ] || rm -rf "$PLACE"
    PLACE=$(mktemp -d)
}

stop_server() {
    [ -n "$SERVER" ] || return 0
    # SIGINT skips the phase in which load balancers remove the instance.
    kill -INT "$SERVER" 2>/dev/null || true
    wait "$SERVER" 2>/dev/null || true
    SERVER=
}

# Free ports on loopback, whatever the configuration contains.
LOOPBACK=(SLUICEGATE_HTTP=127.0.0.1:0 SLUICEGATE_GRPC=off SLUICEGATE_RESP=off)

# start_server COMMAND...: starts a server in the background and sets URL.
start_server() {
    local log=$PLACE/server.log
    "$@" >"$log" 2>&1 &
    SERVER=$!
    for _ in $(seq 100); do
        URL=$(sed -n 's#^sluicegate listening on \(http://[0-9.:]*\)$#\1#p' "$log")
        [ -n "$URL" ] && return
        kill -0 "$SERVER" 2>/dev/null || break
        sleep 0.1
    done
    cat "$log" >&2
    fail "the server did not start: $*"
}

# expect_denial COMMAND...: five logins are allowed and the sixth is denied; COMMAND runs sluicegate.
expect_denial() {
    local status=0 number
    for number in 1 2 3 4 5; do
        "$@" check route=login ip=203.0.113.9 --server "$URL" >/dev/null || fail "login $number was not allowed: $*"
    done
    "$@" check route=login ip=203.0.113.9 --server "$URL" >"$PLACE/denial" || status=$?
    [ "$status" -eq 1 ] || fail "login 6 was not denied: exit status $status"
    say "denied: $(head -1 "$PLACE/denial")"
}

# expect_version COMMAND...
expect_version() {
    local printed
    printed=$("$@" --version)
    [ "$printed" = "sluicegate $VERSION" ] || fail "$* --version prints \"$printed\" instead of \"sluicegate $VERSION\""
}

smoke_tarball() {
    empty_place
    local name=sluicegate-$VERSION-$ARCH-linux program file
    (cd "$OUT" && sha256sum --check --quiet "$name.tar.gz.sha256")
    tar --extract --gzip --file "$OUT/$name.tar.gz" --directory "$PLACE"
    program=$PLACE/$name/sluicegate
    expect_static "$program"
    expect_version "$program"
    for file in man/sluicegate.1 man/sluicegate-check.1 completions/{sluicegate.bash,_sluicegate,sluicegate.fish} LICENSE-MIT \
        LICENSE-APACHE THIRD-PARTY-LICENCES sluicegate.toml; do
        [ -s "$PLACE/$name/$file" ] || fail "the tarball has no $file"
    done
    bash -n "$PLACE/$name/completions/sluicegate.bash"
    "$program" rules check "$PLACE/$name/sluicegate.toml"
    start_server env -i "${LOOPBACK[@]}" "$program" serve --config "$PLACE/$name/sluicegate.toml"
    expect_denial "$program"
    stop_server
}

# expect_static FILE: the program needs no shared libraries and contains no paths of this machine.
expect_static() {
    if readelf --dynamic "$1" | grep -q NEEDED; then fail "$1 needs shared libraries"; fi
    if grep --quiet --binary-files=text --fixed-strings "$PWD/crates" "$1"; then fail "$1 contains paths of this machine"; fi
}

smoke_deb() {
    empty_place
    local root=$PLACE/root deb=("$OUT"/sluicegate_"$VERSION"*.deb)
    debian_system "$root"
    cp "${deb[0]}" "$root/sluicegate.deb"
    inside() { as_root chroot "$root" env PATH=/usr/sbin:/usr/bin:/sbin:/bin DEBIAN_FRONTEND=noninteractive "$@"; }
    quietly inside dpkg --install /sluicegate.deb
    inside getent passwd sluicegate | grep -q ':/nonexistent:/usr/sbin/nologin$' || fail "the package created no system user"
    inside dpkg-query --show --showformat='${Conffiles}' sluicegate | grep -q /etc/sluicegate/sluicegate.toml ||
        fail "the configuration is not a conffile"
    expect_version inside sluicegate

    # As systemd would start it: the command of the unit, as its user.
    local unit command user
    unit=$(find "$root/lib/systemd" "$root/usr/lib/systemd" -name sluicegate.service | head -1)
    command=$(sed -n 's/^ExecStart=//p' "$unit")
    user=$(sed -n 's/^User=//p' "$unit")
    # shellcheck disable=SC2086 # the command of the unit is several words
    start_server "${ROOT[@]}" chroot --userspec="$user" "$root" /usr/bin/env -i "${LOOPBACK[@]}" $command
    expect_denial inside sluicegate
    stop_server

    as_root sh -c "echo '# changed by the administrator' >>'$root/etc/sluicegate/sluicegate.toml'"
    quietly inside dpkg --install --force-confdef /sluicegate.deb
    quietly inside dpkg --remove sluicegate
    grep -q 'changed by the administrator' "$root/etc/sluicegate/sluicegate.toml" ||
        fail "an upgrade or removal lost changes of the configuration"
    quietly inside dpkg --purge sluicegate
    [ ! -e "$root/etc/sluicegate" ] || fail "purge kept /etc/sluicegate"
    say "installed, upgraded, removed and purged in an empty Debian system"
    as_root rm -rf "$root"
}

# debian_system DIRECTORY: unpacks a minimal system of the release and the package sources of this machine.
debian_system() {
    local release sources archive
    # shellcheck source=/dev/null
    release=$(. /etc/os-release && echo "$VERSION_CODENAME")
    archive=$TOOLS/debian-$release.tar
    if [ ! -e "$archive" ]; then
        debian_tool mmdebstrap mmdebstrap
        say "unpacking a minimal $release system"
        sources=$(grep -lsE "^(Suites:|deb [^#]*) $release( |\$)|^deb [^#]* $release " /etc/apt/sources.list \
            /etc/apt/sources.list.d/* || true)
        sources=${sources%%$'\n'*}
        quietly as_root mmdebstrap --quiet --format=tar --variant=essential --include=adduser "$release" "$archive.new" "$sources"
        as_root mv "$archive.new" "$archive"
    fi
    mkdir "$1"
    as_root tar --extract --file "$archive" --directory "$1" --exclude './dev/*'
}

smoke_wheel() {
    empty_place
    local wheel=("$OUT"/sluicegate_server-"$VERSION"-*.whl)
    python3 -m venv "$PLACE/venv"
    quietly "$PLACE/venv/bin/pip" install --disable-pip-version-check --no-index "${wheel[0]}"
    expect_static "$PLACE/venv/bin/sluicegate"
    expect_version "$PLACE/venv/bin/sluicegate"
    start_server env -i "${LOOPBACK[@]}" "$PLACE/venv/bin/sluicegate" serve --config deploy/sluicegate.toml
    expect_denial "$PLACE/venv/bin/sluicegate"
    stop_server
}

smoke_python() {
    [ -e clients/python/pyproject.toml ] || return 0
    build_binary
    empty_place
    local wheel=("$OUT"/sluicegate-"$VERSION"-*.whl)
    python3 -m venv "$PLACE/venv"
    quietly "$PLACE/venv/bin/pip" install --disable-pip-version-check --no-index "${wheel[0]}"
    start_server env -i "${LOOPBACK[@]}" "$BINARY" serve --config deploy/sluicegate.toml
    URL=$URL VERSION=$VERSION "$PLACE/venv/bin/python" - <<'PYTHON'
import os
import sluicegate

assert sluicegate.__version__ == os.environ["VERSION"], sluicegate.__version__
client = sluicegate.Client(os.environ["URL"], deadline=5)
allowed = [client.check({"route": "login", "ip": "203.0.113.9"}).allowed for _ in range(6)]
assert allowed == [True] * 5 + [False], allowed
PYTHON
    stop_server
    say "the sixth login was denied"
}

smoke_node() {
    [ -e clients/node/package.json ] || return 0
    build_binary
    empty_place
    quietly npm install --prefix "$PLACE" --no-audit --no-fund --omit=dev "$OUT/sluicegate-$VERSION.tgz"
    start_server env -i "${LOOPBACK[@]}" "$BINARY" serve --config deploy/sluicegate.toml
    cat >"$PLACE/login.mjs" <<'JAVASCRIPT'
import assert from "node:assert";
import { Client } from "sluicegate";

const client = new Client({ url: process.env.URL, deadlineMs: 5000 });
const allowed = [];
for (let i = 0; i < 6; i++) {
  allowed.push((await client.check({ labels: { route: "login", ip: "203.0.113.9" } })).allowed);
}
assert.deepEqual(allowed, [true, true, true, true, true, false]);
process.exit();
JAVASCRIPT
    URL=$URL node "$PLACE/login.mjs"
    stop_server
    say "the sixth login was denied"
}

smoke_image() {
    empty_place
    debian_tool skopeo skopeo
    gzip --decompress --stdout "$IMAGE_ARCHIVE.gz" >"$PLACE/image.tar"
    skopeo inspect --config --raw "docker-archive:$PLACE/image.tar" >"$PLACE/config.json"
    expect_image_config "$PLACE/config.json"
    if has podman && podman_can_run; then
        smoke_image_with_podman
    else
        say "podman cannot run containers here: unpacking the image and running it under chroot"
        smoke_image_with_chroot
    fi
}

# expect_image_config FILE: the image has an unprivileged user, a health check and the version.
expect_image_config() {
    python3 - "$1" "$VERSION" <<'PYTHON'
import json
import sys

config = json.load(open(sys.argv[1]))["config"]
assert config["User"] == "65532:65532", config
assert config["Healthcheck"]["Test"] == ["CMD", "/sluicegate", "health"], config
assert config["Labels"]["org.opencontainers.image.version"] == sys.argv[2], config
assert "8080/tcp" in config["ExposedPorts"], config
PYTHON
}

podman_can_run() { podman run --rm "$IMAGE" --version >/dev/null 2>&1; }

smoke_image_with_podman() {
    local container
    container=$(podman run --detach --publish 127.0.0.1::8080 --read-only --cap-drop all "$IMAGE")
    URL=http://$(podman port "$container" 8080/tcp)
    for _ in $(seq 50); do podman exec "$container" /sluicegate health >/dev/null 2>&1 && break; sleep 0.1; done
    expect_denial "$BINARY"
    quietly podman rm --force "$container"
}

# Runs the image's own command as its user in a network namespace, where port 8080 is free.
smoke_image_with_chroot() {
    debian_tool umoci umoci
    debian_tool ip iproute2
    quietly skopeo copy "docker-archive:$PLACE/image.tar" "oci:$PLACE/oci:sluicegate"
    quietly as_root umoci unpack --image "$PLACE/oci:sluicegate" "$PLACE/bundle"
    local -a run command
    mapfile -t command < <(python3 -c '
import json, sys
config = json.load(open(sys.argv[1]))["config"]
print(*config["Entrypoint"], *config["Cmd"], sep="\n")' "$PLACE/config.json")
    NAMESPACE=sluicegate-package-$$
    as_root ip netns add "$NAMESPACE"
    as_root ip -netns "$NAMESPACE" link set lo up
    run=("${ROOT[@]}" ip netns exec "$NAMESPACE" chroot --userspec=65532:65532 "$PLACE/bundle/rootfs")
    start_server "${run[@]}" "${command[@]}"
    URL=http://127.0.0.1:8080
    "${run[@]}" /sluicegate health
    expect_version "${run[@]}" /sluicegate
    expect_denial "${run[@]}" /sluicegate
    stop_server
    as_root rm -rf "$PLACE/bundle"
}
