#!/usr/bin/env bash
# From a fresh clone to a quantized model that writes: needs Python 3.11 or newer and a C++ compiler, nothing else.
#
# Installs trirun into .venv, quantizes the demo model (configs/demo-model) to 2 bits, compares perplexity before and
# after, and lets the 2-bit model write a paragraph. Run it again at any time: what is done is not done twice.
#
# PYTHON=python3.12 chooses the interpreter, CXX=clang++ the compiler. TRIRUN_CUDA is 0 without an NVIDIA GPU and the
# architectures of the GPUs with one, unless it is set already.
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/environment.sh"

# The names nvcc gives the architectures of this machine's GPUs, or 0 when the kernels can use none of them.
gpu_archs() {
  command -v nvidia-smi >/dev/null || { echo 0; return; }
  { nvidia-smi --query-gpu=compute_cap --format=csv,noheader 2>/dev/null || true; } |
    awk '{ sub(/\./, ""); if ($1 + 0 >= 80) print ($1 == "90" ? "90a" : $1) }' | sort -u | paste -sd, | sed 's/^$/0/'
}

export TRIRUN_CUDA=${TRIRUN_CUDA-$(gpu_archs)}
if [ "$TRIRUN_CUDA" = 0 ]; then
  step "No usable NVIDIA GPU: building for the CPU alone"
else
  step "Building for the CPU and for CUDA architecture ${TRIRUN_CUDA:-every}"
fi
install ""

trirun=$venv/bin/trirun
model=demo
packed=build/quickstart/demo-2bit

if [ -d "$packed" ] && "$trirun" verify "$packed" --quiet; then
  step "The demo model is quantized already (delete $packed to do it again)"
else
  step "Quantizing $model to 2 bits (a minute or two)"
  mkdir -p "$(dirname "$packed")"
  "$trirun" quantize "$model" --wbits 2 --preset fast --out "$packed" --overwrite
fi

step "Perplexity on held-out text, before and after"
"$trirun" eval "$packed" --model "$model" --window 512 --limit 16

step "The 2-bit model continues a story"
"$trirun" generate "$packed" --prompt "The old house stood alone upon the hill, and" \
  --max-tokens 140 --temperature 0.7 --top-p 0.9 --seed 3

step "Done. Next:"
cat <<TEXT
  . .venv/bin/activate
  trirun generate $packed --prompt "Once upon a time"
  trirun quantize MODEL --wbits 2        # any Llama-like model directory
  trirun doctor                          # what this machine runs the kernels on
TEXT
