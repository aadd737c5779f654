#!/bin/bash
# Run every script of findings/ on this GPU and keep what it prints in bench/results/findings/NAME.txt.
#
#     bench/h200/findings.sh [SECONDS for each script, 240] [NAME ...]
#
# The kernels' files are those of the version cache (GDNCHECK_CACHE, else ~/.cache/gdncheck), put there by
# `gdncheck kernels fetch`; FlashInfer's compiled module lies in FLASHINFER_DIR. A script that has a result
# already is left out, so that a run that was cut off goes on. Exit statuses: 1 the fault shows, 0 it does not.
set -u
cd "$(dirname "$0")/../.."
limit=${1:-240}
shift || true
cache=${GDNCHECK_CACHE:-$HOME/.cache/gdncheck}/kernels
results=bench/results/findings
mkdir -p "$results"
for directory in findings/*/; do
    name=$(basename "$directory")
    if [ $# -gt 0 ] && [[ " $* " != *" $name "* ]]; then continue; fi
    if [ -s "$results/$name.txt" ] && grep -q '^exit status' "$results/$name.txt"; then continue; fi
    family=${name%%-[0-9]*}
    version=$(sed -E 's/^[a-z]+-([0-9.]+)-.*/\1/' <<<"$name")
    folder=""
    if [ -d "$cache/$family/$version" ]; then folder=$cache/$family/$version; fi
    if [ "$family" = flashinfer ]; then folder=${FLASHINFER_DIR:-.gpu/whl}; fi
    words=()
    if [ -n "$folder" ]; then words=(--folder "$folder"); fi
    echo "$name: $(date +%T)"
    {
        echo "python -I findings/$name/repro.py ${words[*]:+--folder ...}"
        timeout -k 10 "$limit" "${PYTHON:-python}" -I "$directory/repro.py" "${words[@]}" 2>&1
        echo "exit status $?"
    } >"$results/$name.txt.part"
    mv "$results/$name.txt.part" "$results/$name.txt"
    tail -2 "$results/$name.txt"
done
