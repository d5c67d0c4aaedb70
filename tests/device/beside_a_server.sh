#!/usr/bin/env bash
# beside_a_server.sh PACKS [LIBRARY]: on a machine with a GPU, in an environment as a server has it: no compiler package, whichever tvm-ffi is
# installed. The device tests, then a certification shard of every family. LIBRARY, such as another compiler's libcute_dsl_runtime.so, is in
# the process before everything else, with its symbols in front of everybody's. PYTHON names the interpreter, SHARD the shard.
set -euo pipefail
packs=$(cd "$1" && pwd) library=${2:-}
python=${PYTHON:-python}
cd "$(dirname "$0")/../.."
"$python" - <<'P'
from importlib import metadata, util
assert util.find_spec("cutlass") is None and util.find_spec("nvidia_cutlass_dsl") is None, "a compiler package is installed"
print("tvm-ffi", metadata.version("apache-tvm-ffi"), "torch", metadata.version("torch"))
P
preload=()
if [ -n "$library" ]; then preload=(env "LD_PRELOAD=$library"); echo "first in the process: $library"; fi
out=$(mktemp -d)
trap 'rm -rf "$out"' EXIT
SPECPLAN_PACKS=$packs "${preload[@]}" "$python" -m pytest -q tests/device
for family in $("$python" -c "
import sys, specplan
pack = specplan.load(sys.argv[1], candidates=True)
print(*pack.manifest(pack.archs[0]).objects)" "$packs"); do
  "${preload[@]}" "$python" -m specplan.tools.cli certify --packs "$packs" --family "$family" --shard "${SHARD:-1/200}" --out "$out"
done
echo "every shard passed"
