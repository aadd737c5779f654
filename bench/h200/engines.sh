#!/usr/bin/env bash
# After setup.sh: put the engines' kernels into the version cache from a folder of small wheels (slim.py),
# and name FlashInfer's compiled library if it was carried.
# usage: source bench/h200/engines.sh WHEELS
set -eu
wheels=$1
for file in "$wheels"/vllm-*.whl "$wheels"/sglang-*.whl "$wheels"/flashinfer_python-*.whl; do
  [ -e "$file" ] || continue
  name=$(basename "$file"); family=${name%%-*}; family=${family%_python}
  version=${name#*-}; version=${version%%-*}
  gdncheck kernels fetch "$family@$version" --from-wheel "$file"
done
if ls "$wheels"/apache_tvm_ffi-*.whl >/dev/null 2>&1; then
  python3 -m pip install -q --no-index --no-deps --no-compile "$wheels"/apache_tvm_ffi-*.whl
fi
if [ -e "$wheels/gdn_prefill_sm90.so" ]; then
  export GDNCHECK_FLASHINFER_LIBRARY=$(realpath "$wheels/gdn_prefill_sm90.so")
fi
