#!/usr/bin/env bash
# The third part on one H200, about eight minutes: the truth's profile alone, then everything around the chunk
# kernels at once (decode, verify, checkpoints, padded rows, convolutions, histories), long sequences, the
# exported findings, the user's path with fewer experts; the fuzzer last, when the GPU is free again.
# usage: bash bench/h200/third.sh WHEELS OUT [SECONDS]
set -u
wheels=$(realpath "$1") out=$2 limit=${3:-490}
SECONDS=0
source bench/h200/setup.sh "$wheels" >"$out/setup.log" 2>&1
source bench/h200/engines.sh "$wheels" >>"$out/setup.log" 2>&1
set +eu
unset PYTHONSAFEPATH
echo "set up: $SECONDS s"
timeout 40 python3 bench/h200/truth_speed.py >"$out/truth_speed.log" 2>&1
echo "truth alone: $SECONDS s"
until_fuzz=$((limit - 150))
export OMP_NUM_THREADS=2
(
  timeout 170 python3 bench/h200/build_causal_conv1d.py "$wheels"/causal_conv1d-1.6.0.tar.gz --jobs 10 >"$out/conv1d-build.log" 2>&1
  python3 bench/h200/convs.py --seconds $((until_fuzz - SECONDS)) --out "$out/convs" >"$out/convs.log" 2>&1
) &
timeout $((until_fuzz - SECONDS)) python3 bench/h200/decode_verify.py --seconds $((until_fuzz - SECONDS - 15)) >"$out/decode_verify.log" 2>&1 &
timeout $((until_fuzz - SECONDS)) python3 bench/h200/histories.py --seconds $((until_fuzz - SECONDS - 15)) --out "$out/histories" \
  --lane vllm-0.19.1 --lane vllm-0.19.1-recurrent --lane vllm-0.33.0 --lane vllm-0.33.0-packed --lane fla-0.6.0 \
  --lane sglang-0.5.23 >"$out/histories.log" 2>&1 &
timeout $((until_fuzz - SECONDS)) python3 bench/h200/long_sequences.py --seconds $((until_fuzz - SECONDS - 10)) \
  --work "$out/long" >"$out/long.log" 2>&1 &
(
  python3 bench/h200/matrix.py --out "$out/matrix" --seconds 70 --first 185 --kernel vllm.recurrent@0.19.1 \
    --kernel vllm.recurrent@0.33.0 >"$out/matrix.log" 2>&1
  timeout 130 python3 bench/h200/sglang_prefix.py --seconds 120 >"$out/sglang_prefix.log" 2>&1
  FLASHINFER_DIR=$wheels PYTHON=python3 timeout 150 bash bench/h200/findings.sh 45 >"$out/findings.log" 2>&1
) &
real="python3 bench/h200/real_size.py --experts 8 --kernel fla.chunk@0.4.0 --kernel fla.chunk@0.6.0 --name h200-real-size-2"
$real --seconds $((limit - 20 - SECONDS)) >"$out/real_size.log" 2>&1 &
while [ $SECONDS -lt $until_fuzz ]; do sleep 1; done
echo "to the fuzzer: $SECONDS s"
timeout $((limit - SECONDS)) python3 bench/h200/fuzz.py --seconds $((limit - SECONDS - 25)) --out "$out/fuzz" >"$out/fuzz.log" 2>&1
cp /dev/shm/gdncheck-real/steps.json "$out/" 2>/dev/null
rm -rf "$out/fuzz/cases"
echo "all: $SECONDS s"
