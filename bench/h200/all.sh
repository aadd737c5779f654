#!/usr/bin/env bash
# Everything in ten minutes of one H200, each part with its own end, so that none eats another:
# the main job at size first and alone (its times count), then every kernel's matrix beside a thousand seeded
# cases on FLA, then the kkt stage at the longest prompt beside FlashInfer and honest kernels on idle cores.
# FlashInfer's library is compiled meanwhile where it was not carried.
# usage: bash bench/h200/all.sh WHEELS OUT
set -u
wheels=$1 out=$2
SECONDS=0
source bench/h200/setup.sh "$wheels" >"$out/setup.log" 2>&1
source bench/h200/engines.sh "$wheels" >>"$out/setup.log" 2>&1
set +eu
if [ -z "${GDNCHECK_FLASHINFER_LIBRARY:-}" ]; then
  data=$(find "$GDNCHECK_CACHE" -type d -path '*flashinfer/data' | head -1)
  export GDNCHECK_FLASHINFER_LIBRARY=$out/gdn_prefill_sm90.so
  nice python3 -m gdncheck.kernels.flashinfer_build "$data" "$GDNCHECK_FLASHINFER_LIBRARY" --jobs 6 \
    >"$out/flashinfer_build.log" 2>&1 &
fi
# The scripts import their neighbours, which safe-path mode would hide; none runs from the root of the tree.
unset PYTHONSAFEPATH
echo "set up: $SECONDS s"

timeout 230 python3 bench/h200/main_job.py >"$out/main_job.log" 2>&1 &
main=$!
until grep -q "kernels timed" "$out/main_job.log" || ! kill -0 $main 2>/dev/null; do sleep 1; done
echo "main job, kernels timed: $SECONDS s"

for shard in 0 1 2 3 4 5 6 7; do
  GDNCHECK_TUNE=never OMP_NUM_THREADS=1 python3 bench/specificity.py --one-shape --device cuda \
    --kernel fla.chunk@0.4.0 --kernel fla.chunk@0.6.0 --start $((shard * 125)) --cases 125 \
    --seconds $((430 - SECONDS)) --log "$out/specificity-$shard.jsonl" --name "h200-specificity-$shard" \
    >"$out/specificity-$shard.log" 2>&1 &
done
matrix="python3 bench/h200/matrix.py --out $out/matrix"
$matrix --seconds 230 >"$out/matrix.log" 2>&1 \
  --kernel fla.chunk@0.4.0 --kernel fla.chunk@0.6.0 --kernel vllm.chunk@0.19.1 --kernel vllm.chunk@0.33.0 \
  --kernel sglang.chunk@0.5.23 --kernel fla.recurrent@0.6.0 --kernel vllm.recurrent@0.19.1 \
  --kernel vllm.recurrent@0.33.0 --kernel sglang.recurrent@0.5.23
echo "matrix: $SECONDS s"
timeout 60 python3 bench/h200/truth_speed.py >"$out/truth_speed.log" 2>&1
OMP_NUM_THREADS=1 python3 bench/specificity.py --start 1596 --cases 2200 --processes 10 \
  --seconds $((570 - SECONDS)) --log "$out/honest.jsonl" --name specificity-cpu-2 >"$out/honest.log" 2>&1 &
$matrix --seconds $((572 - SECONDS)) --kernel flashinfer.chunk@0.6.6 >"$out/matrix-flashinfer.log" 2>&1 &
timeout $((585 - SECONDS)) python3 bench/h200/autotune_kkt.py --only vllm-0.19.1 --tokens 11686 --tunings 10 \
  --seconds $((572 - SECONDS)) --work "$out/kkt" --name h200-autotune-kkt-long >"$out/autotune_kkt.log" 2>&1
echo "autotune: $SECONDS s"
