# Builds the packages of scripts/package.
# shellcheck shell=bash disable=SC2154

# A constant, because C libraries are compiled again when it changes: the start of 1980, the earliest time in a wheel.
BUILD_TIME=315532800

# Builds the static binary once for all packages.
build_binary() {
    debian_tool musl-gcc musl-tools
    rustup target add "$TARGET" >/dev/null 2>&1 || true
    # The revision label of sluicegate_build_info; a build from an archive has none.
    local revision
    revision=$(git rev-parse --short HEAD 2>/dev/null || true)
    export SLUICEGATE_REVISION=$revision
    # Equal sources give equal binaries in any directory: panic messages contain source paths, and mimalloc the time of its build.
    export RUSTFLAGS="--remap-path-prefix=${CARGO_HOME:-$HOME/.cargo}=/cargo --remap-path-prefix=$PWD=/src"
    export SOURCE_DATE_EPOCH=$BUILD_TIME
    cargo build --release --locked --target "$TARGET" --package sluicegate-cli
}

# Writes the files that several packages contain: manual pages, completions, licences, the unit of the Debian package.
stage() {
    build_binary
    rm -rf "$STAGE"
    mkdir -p "$STAGE"/{man,completions,systemd}
    "$BINARY" man --dir "$STAGE/man" >/dev/null
    "$BINARY" completions bash >"$STAGE/completions/sluicegate.bash"
    "$BINARY" completions zsh >"$STAGE/completions/_sluicegate"
    "$BINARY" completions fish >"$STAGE/completions/sluicegate.fish"
    sed -e '/^# /{/Install the program/,/Debian package/d}' -e 's#/usr/local/bin/#/usr/bin/#' \
        deploy/systemd/sluicegate.service >"$STAGE/systemd/sluicegate.service"
    scripts/packaging/third-party-licences "$TARGET" >"$STAGE/THIRD-PARTY-LICENCES"
}

build_tarball() {
    stage
    local name=sluicegate-$VERSION-$ARCH-linux directory
    directory=$STAGE/$name
    mkdir "$directory"
    cp -r "$STAGE/man" "$STAGE/completions" "$STAGE/THIRD-PARTY-LICENCES" "$directory"
    cp LICENSE-MIT LICENSE-APACHE CHANGELOG.md deploy/sluicegate.toml "$BINARY" deploy/systemd/sluicegate.service "$directory"
    tar --create --sort=name --mtime="@$TIME" --owner=0 --group=0 --numeric-owner --mode='go=rX' \
        --directory "$STAGE" "$name" | gzip -9n >"$OUT/$name.tar.gz"
    (cd "$OUT" && sha256sum "$name.tar.gz" >"$name.tar.gz.sha256")
    report "$OUT/$name.tar.gz"
}

build_deb() {
    cargo_tool cargo-deb "$CARGO_DEB"
    stage
    rm -f "$OUT"/*.deb
    quietly env SOURCE_DATE_EPOCH="$TIME" "$TOOLS/cargo-deb-$CARGO_DEB/bin/cargo-deb" --package sluicegate-cli --no-build --no-strip --target "$TARGET" \
        --output "$OUT"
    report "$(echo "$OUT"/*.deb)"
}

build_wheel() {
    python_tool maturin "$MATURIN"
    stage
    rm -f "$OUT"/sluicegate_server-*.whl
    # maturin adds licences only from the directory of the crate.
    cp "$STAGE/THIRD-PARTY-LICENCES" crates/sluicegate-cli/
    quietly "$TOOLS/maturin-$MATURIN/bin/maturin" build --release --target "$TARGET" --out "$OUT" \
        --compatibility manylinux2014 --compatibility musllinux_1_1 --manifest-path crates/sluicegate-cli/Cargo.toml
    rm crates/sluicegate-cli/THIRD-PARTY-LICENCES
    report "$(echo "$OUT"/sluicegate_server-*.whl)"
}

build_python() {
    [ -e clients/python/pyproject.toml ] || { say "skipped: clients/python does not exist"; return; }
    rm -f "$OUT"/sluicegate-*.whl
    python_tool pip "$PIP"
    quietly "$TOOLS/pip-$PIP/bin/pip" wheel --disable-pip-version-check --no-deps --wheel-dir "$OUT" ./clients/python
    report "$(echo "$OUT"/sluicegate-*.whl)"
}

build_node() {
    [ -e clients/node/package.json ] || { say "skipped: clients/node does not exist"; return; }
    debian_tool npm npm
    local copy=$STAGE/node
    rm -rf "$copy" "$OUT"/sluicegate-*.tgz
    mkdir -p "$copy"
    # A copy, because building writes into the directory.
    tar --create --directory clients/node --exclude=node_modules --exclude=dist . | tar --extract --directory "$copy"
    quietly npm install --prefix "$copy" --no-audit --no-fund --no-save --no-package-lock
    (cd "$copy" && quietly npm run build && quietly npm pack --pack-destination "$OUT")
    report "$(echo "$OUT"/sluicegate-*.tgz)"
}

# The name of the image in the archive and in the local storage.
IMAGE=localhost/sluicegate:$VERSION
IMAGE_ARCHIVE=$OUT/sluicegate-$VERSION-$ARCH-image.tar

build_image() {
    debian_tool buildah buildah
    stage
    local context=$STAGE/image
    rm -rf "$context" "$IMAGE_ARCHIVE"
    mkdir -p "$context/licences"
    cp LICENSE-* "$STAGE/THIRD-PARTY-LICENCES" "$context/licences"
    cp "$BINARY" deploy/container/sluicegate.toml /etc/ssl/certs/ca-certificates.crt "$context"
    # The last stage of the Dockerfile, with the files of this build instead of those of its first stage.
    sed -n '/^FROM scratch/,$p' deploy/container/Dockerfile |
        sed -E 's#^COPY (--from=build )?[^ ]*/([^/ ]+) #COPY \2 #' >"$context/Dockerfile"
    # The OCI format has no health checks.
    quietly buildah build --isolation chroot --format docker --timestamp "$TIME" \
        --label org.opencontainers.image.version="$VERSION" --label org.opencontainers.image.licenses="MIT OR Apache-2.0" \
        --tag "$IMAGE" "$context"
    quietly buildah push "$IMAGE" "docker-archive:$IMAGE_ARCHIVE:$IMAGE"
    gzip -9nf "$IMAGE_ARCHIVE"
    report "$IMAGE_ARCHIVE.gz"
}

# maturin writes the list into the wheel.
build_sbom() {
    build_wheel
    local name=sluicegate-$VERSION-$ARCH-linux.cdx.json
    python3 - "$OUT"/sluicegate_server-*.whl "$PWD" >"$OUT/$name" <<'PYTHON'
import json
import sys
import zipfile

wheel, root = zipfile.ZipFile(sys.argv[1]), sys.argv[2]
(member,) = [name for name in wheel.namelist() if "/sboms/" in name]
text = wheel.read(member).decode().replace(f"file://{root}/", "file:///src/")
assert len(json.loads(text)["components"]) > 100, text
print(text)
PYTHON
    report "$OUT/$name"
}

# report FILE: prints the name and the size of a package.
report() { say "built ${1#"$PWD/"} ($(($(stat --format %s "$1") / 1024)) KiB)"; }
