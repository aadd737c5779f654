#!/usr/bin/env bash
# Everything marked `gpu`, on a host that has torch, triton and pytest but neither network nor .venv.
# usage: bash bench/h200/gpu_tests.sh WHEELS OUT [PYTEST ARGUMENTS]
# WHEELS as for setup.sh and engines.sh; OUT gets gpu-tests.log and gpu-tests.xml. Under 8 minutes on one card.
set -u
wheels=$1 out=$2
shift 2
mkdir -p "$out"
source bench/h200/setup.sh "$wheels" >"$out/setup.log" 2>&1 || { cat "$out/setup.log"; exit 1; }
# Installed as well as cached: some test modules ask at import which fla is installed.
python3 -m pip install -q --no-index --no-deps --no-compile "$wheels"/fla_core-0.4.0-*.whl >>"$out/setup.log" 2>&1
source bench/h200/engines.sh "$wheels" >>"$out/setup.log" 2>&1 || { cat "$out/setup.log"; exit 1; }
set +eu
# Packages of the tests that the host lacks, where they were carried.
for name in msgspec pytest pytest_timeout hypothesis iniconfig pluggy packaging sortedcontainers mpmath rich; do
  python3 -c "import $name" 2>/dev/null ||
    python3 -m pip install -q --no-index --no-deps --no-compile "$wheels/$name"-*.whl ||
    echo "$name is missing and no wheel of it was carried"
done
# Without the carried library FlashInfer's kernels would be compiled first, for minutes.
skipped=()
[ -n "${GDNCHECK_FLASHINFER_LIBRARY:-}" ] || skipped=(--deselect tests/kernels/test_flashinfer.py)
[ ${#skipped[@]} -eq 0 ] || echo "no gdn_prefill_sm90.so in $wheels: FlashInfer's tests are left out"
SECONDS=0
export PYTEST_ADDOPTS="-p no:cacheprovider --durations=15 --junitxml=$out/gpu-tests.xml ${skipped[*]:-} $*"
set -o pipefail
timeout 540 make gpu-test GPU_PYTHON=python3 2>&1 | tee "$out/gpu-tests.log"
status=$?
echo "gpu tests: exit status $status after $SECONDS s"
exit $status
