#!/usr/bin/env bash
# Builds, tests and measures on the machine at hand: one command, no make, no network, under 8 minutes on a GPU.
#   bench/device_check.sh [--device cuda|cpu] [--tiny] [--only SECTION,SECTION]
#   --device cpu --tiny   every part that a CPU can run, by Triton's interpreter, whose times mean nothing
#   PYTHON                the interpreter (python3); wheels that it lacks are taken from .whl/
# decode, prefill and chunk_latency need the section model. Each section has a time limit, and one that fails doesn't
# hide the others. Logs: build/device_check/.
set -u
cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit 2

sections="build tests kernels model decode prefill chunk_latency loss"
device=cuda tiny="" only=all
while [ $# -gt 0 ]; do
  case $1 in
    --device) device=${2:-}; shift ;;
    --tiny) tiny=--tiny ;;
    --only) only=${2:-}; shift ;;
    *) echo "device_check: unknown option $1; there are --device cuda|cpu, --tiny, --only SECTION,SECTION" >&2; exit 2 ;;
  esac
  shift
done
case $device$tiny in
  cuda | cuda--tiny | cpu--tiny) ;;
  *) echo "device_check: --device is cuda or cpu, and cpu goes with --tiny" >&2; exit 2 ;;
esac
[ -n "$tiny" ] || sections+=" decode_batches chunk_latency_wrong"
wanted=${only//,/ }
[ "$only" = all ] && wanted=$sections
[ -n "${wanted// /}" ] || wanted=nothing
for name in $wanted; do
  case " $sections " in
    *" $name "*) ;;
    *) echo "device_check: --only $name: there are $sections" >&2; exit 2 ;;
  esac
done

python=${PYTHON:-python3}
logs=$PWD/build/device_check
site=$logs/site
mkdir -p "$logs"
holds=$("$python" -V 2>&1; compgen -G ".whl/*.whl")
if [ "$holds" != "$(cat "$site.holds" 2>/dev/null)" ]; then
  rm -rf "$site" "$site.holds"
  if ! compgen -G ".whl/*.whl" >/dev/null ||
    "$python" -m pip install -q --no-index --no-deps --target "$site" .whl/*.whl; then
    echo "$holds" >"$site.holds"
  fi
fi
export PYTHONPATH="$PWD/.typing:$site${PYTHONPATH:+:$PYTHONPATH}" PATH="$site/bin:$PATH"

# What is missing: lines "need ..." end the run, lines "without ..." leave something out.
missing=$("$python" - "$device" <<'PYTHON'
import importlib.util, shutil, sys
device, have = sys.argv[1], importlib.util.find_spec
if sys.version_info < (3, 11):
    print(f"need Python 3.11 or newer, this is {sys.version.split()[0]}")
for name in ("torch", "triton", "numpy", "pytest", "psutil", "rich", "safetensors", "tokenizers", "transformers", "gguf", "jinja2", "yaml"):
    if have(name) is None:
        print(f"need the Python package {name}")
if have("torch") and device == "cuda":
    import torch
    if not torch.cuda.is_available():
        print(f"need a GPU that torch {torch.__version__} can use: torch.cuda.is_available() is False")
if have("triton") and have("numpy"):
    import numpy, triton
    version = lambda module: tuple(int(part) for part in module.__version__.split(".")[:2])
    if version(triton) < (3, 7) and version(numpy) >= (2, 4):
        print(f"need numpy < 2.4 for Triton {triton.__version__}, this is {numpy.__version__}")
for name in ("pybind11", "setuptools"):
    if have(name) is None:
        print(f"without the Python package {name}: nothing is built")
for tool in ("cmake", "ninja", "c++"):
    if shutil.which(tool) is None:
        print(f"without {tool}: nothing is built")
if shutil.which("nvcc") is None:
    print("without nvcc: no CUDA C++ kernels")
for name in ("flashinfer",) if device == "cuda" else ():
    if have(name) is None:
        print(f"without {name}: not measured beside ours")
PYTHON
) || missing="need a Python: '$python' does not run; say PYTHON=/path/to/python3"
echo "missing: ${missing:-nothing}"
case $missing in *"need "*) exit 2 ;; esac

total=470 rounds=3 model=qwen2.5-7b-random
first="--works decode.6144,decode_b8" batches="--works decode_b32,decode_b128"
turns="--works turn1024.5000.100,turn1024.5000.80,turn1024.5000.one_pass"
if [ -n "$tiny" ]; then
  model=tiny-random first="" turns=""
fi
if [ "$device" = cpu ]; then
  export TRITON_INTERPRET=1
  total=3000 rounds=1
fi
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
summary="" failed=0

# run NAME SECONDS COMMAND...: under its limit, or what is left of the whole; its output is shown and kept.
run() {
  local name=$1 limit=$2 start=$SECONDS code left=$((total - SECONDS))
  shift 2
  case " $wanted " in *" $name "*) ;; *) return ;; esac
  [ "$device" = cpu ] && limit=$total
  [ $limit -gt $left ] && limit=$left
  echo "== $name"
  if [ $limit -le 0 ]; then
    code="no time left"
  else
    timeout -k 5 $limit "$@" >"$logs/$name.log" 2>&1
    code=$?
    cat "$logs/$name.log"
  fi
  case $code in
    0) code=ok ;;
    124 | 137) code="stopped after $limit s" failed=1 ;;
    *) code="failed ($code)" failed=1 ;;
  esac
  summary+=$(printf '%-22s %5d s  %s' "$name" $((SECONDS - start)) "$code")$'\n'
}
bench() { # NAME SECONDS BENCH OPTIONS...
  local name=$1 limit=$2 of=$3
  shift 3
  run "$name" "$limit" "$python" -m palimpsest bench "$of" --backend triton $tiny --rounds $rounds "$@"
}

case $missing in
  *"nothing is built"*) ;;
  *) MAX_JOBS=$(nproc) run build 150 "$python" setup.py -q build_ext --inplace ;;
esac
run tests 130 "$python" -m pytest -q -p no:cacheprovider tests/triton_kernels tests/csrc/test_cuda.py
run kernels 70 "$python" -m palimpsest bench kernels --device $device $tiny --rounds $rounds
run model 90 "$python" -m palimpsest.bench.random_model $model "$work/model"
bench decode 60 decode --model "$work/model" $first
bench prefill 50 prefill --model "$work/model"
bench chunk_latency 70 chunk_latency --model "$work/model" $turns
bench loss 40 loss
if [ -z "$tiny" ]; then
  bench decode_batches 110 decode --model "$work/model" $batches
  bench chunk_latency_wrong 70 chunk_latency --model "$work/model" --works turn1024.5000.0
fi
echo "== in $SECONDS s"
printf '%s' "$summary"
exit $failed
