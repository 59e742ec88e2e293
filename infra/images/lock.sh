#!/usr/bin/env bash
# Renews the pinned requirements of the images, with hashes. Needs uv (pip install uv).
set -euo pipefail
cd "$(dirname "$0")"
compile() {
    uv pip compile --quiet --generate-hashes --no-header --no-annotate --python-version 3.11 \
        --python-platform x86_64-manylinux_2_28 --constraint ../../constraints-cpu.txt "$@"
}
compile ../../pyproject.toml router.in --output-file requirements-router.txt
compile ../../pyproject.toml worker.in --output-file requirements-worker.txt
compile build.in --output-file requirements-build.txt
