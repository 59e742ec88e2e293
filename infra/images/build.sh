#!/usr/bin/env bash
# Builds one image: infra/images/build.sh router | worker-cpu | worker-cuda [--push] [--dry-run]
#   REGISTRY       where to (ghcr.io/shoal-serving)
#   ENGINE         podman, docker or buildah; the first that is there
#   PYTHON_IMAGE   the base, best by digest: docker.io/library/python@sha256:…
#   TORCH_INDEX    another index for torch, a mirror for instance
#   DEMO_MODEL     empty: no model inside
set -euo pipefail
root="$(cd "$(dirname "$0")/../.." && pwd)"
image="" push=false dry_run=false
for argument in "$@"; do
    case "$argument" in
        router | worker-cpu | worker-cuda) image="$argument" ;;
        --push) push=true ;;
        --dry-run) dry_run=true ;;
        *) echo "unknown argument '$argument'; give router, worker-cpu or worker-cuda, and --push or --dry-run" >&2; exit 2 ;;
    esac
done
if [[ -z "$image" ]]; then
    echo "which image? router, worker-cpu or worker-cuda" >&2
    exit 2
fi

engine="${ENGINE:-}"
for candidate in podman docker buildah; do
    if [[ -z "$engine" ]] && command -v "$candidate" >/dev/null; then engine="$candidate"; fi
done
if [[ -z "$engine" ]]; then
    if ! $dry_run; then echo "no image engine: install podman, docker or buildah, or name one in ENGINE" >&2; exit 1; fi
    engine=podman
fi

version="$(sed -n 's/^version = "\(.*\)"/\1/p' "$root/pyproject.toml" | head -1)"
revision="$(git -C "$root" rev-parse HEAD 2>/dev/null || echo unknown)"
if [[ "$image" == router ]]; then
    name=shoal-router tag="$version" file=router arguments=()
else
    variant="${image#worker-}"
    name=shoal-worker tag="$version-$variant" file=worker arguments=(--build-arg "VARIANT=$variant")
fi
for variable in PYTHON_IMAGE TORCH_INDEX DEMO_MODEL; do
    if [[ -n "${!variable+set}" ]]; then arguments+=(--build-arg "$variable=${!variable}"); fi
done
target="${REGISTRY:-ghcr.io/shoal-serving}/$name:$tag"

run() {
    if $dry_run; then echo "$*"; else "$@"; fi
}
run "$engine" build --file "$root/infra/images/$file.Containerfile" --tag "$target" \
    --build-arg "VERSION=$version" --build-arg "REVISION=$revision" "${arguments[@]}" "$root"
if $push; then run "$engine" push "$target"; fi
