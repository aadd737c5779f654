#!/usr/bin/env bash
# Prepare a GPU host that has torch and triton but no network, from a folder of carried wheels.
# usage: source bench/h200/setup.sh WHEELS
# Leaves: a `gdncheck` command, and fla 0.4.0 and 0.6.0 in the version cache.
set -eu
wheels=$1
export PYTHONSAFEPATH=1 PYTHONUNBUFFERED=1
export GDNCHECK_CACHE=${GDNCHECK_CACHE:-$PWD/.gpu/cache}
python3 -m pip install -q --no-index --no-deps --no-compile "$wheels"/click-*.whl "$wheels"/msgspec-*.whl "$wheels"/einops-*.whl
python3 -m pip install -q --no-index --no-deps --no-build-isolation -e .
for version in 0.4.0 0.6.0; do
  gdncheck kernels fetch "fla@$version" --from-wheel "$wheels/fla_core-$version-py3-none-any.whl"
done
