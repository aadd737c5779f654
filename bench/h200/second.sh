#!/usr/bin/env bash
# The second ten minutes of one H200: what the float64 side costs (alone), then the user's path at the real
# model's size, beside the matrix of what `all.sh` leaves out and how well the emulations have the kernels' bits.
# usage: bash bench/h200/second.sh WHEELS OUT
set -u
wheels=$1 out=$2
SECONDS=0
source bench/h200/setup.sh "$wheels" >"$out/setup.log" 2>&1
source bench/h200/engines.sh "$wheels" >>"$out/setup.log" 2>&1
set +eu
unset PYTHONSAFEPATH
echo "set up: $SECONDS s"
timeout 120 python3 bench/h200/speed.py --part truth --part emulation --part peers --part growth >"$out/speed.log" 2>&1
echo "speed, alone: $SECONDS s"
python3 bench/h200/real_size.py --seconds $((565 - SECONDS)) >"$out/real_size.log" 2>&1 &
(
  timeout 200 python3 bench/h200/speed.py --part kernels >"$out/speed-kernels.log" 2>&1
  timeout 200 python3 bench/h200/speed.py --part long >"$out/speed-long.log" 2>&1
) &
timeout 120 python3 bench/h200/bits.py --profile fla-0.4 --profile generic >"$out/bits.log" 2>&1
echo "bits: $SECONDS s"
python3 bench/h200/matrix.py --out "$out/matrix" --seconds $((560 - SECONDS)) >"$out/matrix.log" 2>&1 \
  --kernel flashinfer.chunk@0.6.6 --kernel sglang.chunk@0.5.23 --kernel vllm.recurrent@0.19.1 \
  --kernel vllm.recurrent@0.33.0
echo "matrix: $SECONDS s"
cp /dev/shm/gdncheck-real/steps.json "$out/" 2>/dev/null
