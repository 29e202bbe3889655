#!/usr/bin/env bash
# Checks and times the kernels on the GPU of this machine, in at most 8 minutes:
#     bash bench/device_check.sh OUT [--dry-run]
# Needs Python 3.10 or newer with torch and triton ($PYTHON, default python3), and nothing from
# outside the repository. OUT gets a log and JSON of every step, a table (summary.txt) and the same
# as summary.json. A step that fails does not stop the others; the exit code is 1 if any failed or a
# target was missed. --dry-run takes tiny shapes, in Triton's interpreter on a CPU.
set -u
[ $# -ge 1 ] || { sed -n '2,8s/^# //p' "$0" >&2; exit 2; }
mkdir -p "$1" && out=$(cd "$1" && pwd) || exit 2
cd "$(dirname "$0")/.." || exit 2
python=${PYTHON:-python3}
export PYTHONPATH=src${PYTHONPATH:+:$PYTHONPATH} PYTHONDONTWRITEBYTECODE=1
if [ "${2-}" = --dry-run ]; then
  export TRITON_INTERPRET=1 OMP_NUM_THREADS=1 OPENBLAS_NUM_THREADS=1
  device=(--device cpu --small)
else
  unset TRITON_INTERPRET
  device=(--device cuda)
fi
: >"$out/steps.tsv"

# step NAME SECONDS SCRIPT ARGUMENTS…: runs bench/SCRIPT under a time limit, and notes how it ended.
step() {
  local name=$1 limit=$2 script=$3 started=$SECONDS
  shift 3
  echo "== $name (at most $limit s)"
  timeout -k 5 "$limit" "$python" "bench/$script" --out "$out" "${device[@]}" "$@" \
    >"$out/$name.log" 2>&1
  local code=$?
  printf '%s\t%s\t%s\t%s\n' "$name" "$limit" "$code" "$((SECONDS - started))" >>"$out/steps.tsv"
  tail -n 3 "$out/$name.log"
}

step facts 15 device_facts.py
step oracles 110 device_oracles.py
step repeats 45 device_repeats.py
step targets 50 device_targets.py
step tests 95 device_tests.py
step benches 75 device_benches.py
step sanitizer 80 device_sanitizer.py

"$python" bench/device_summary.py "$out" | tee "$out/summary.txt"
exit "${PIPESTATUS[0]}"
