#!/bin/sh
# usage: setup.sh ENVIRONMENT. A Python environment with the CUDA build of PyTorch and no library of NVIDIA's, and the
# headers that the fake libraries are compiled against. 1.6 GB stay, another 1 GB is loaded and dropped.
set -eu
environment=$1
here=$(dirname "$0")
wheels=$environment/wheels
pip="$environment/bin/python -m pip --quiet --disable-pip-version-check"
python3 -m venv "$environment"
# "===" takes the wheel of that very name, which is the one with CUDA 13, and not 2.13.0+cpu of some other index.
# Without its dependencies, which are the nvidia-* packages that the fake libraries replace, and these few; bitsandbytes, whose
# states in 8 bits are kernels of its own, asks for nothing else.
$pip install --no-deps 'torch===2.13.0'
$pip install --no-deps --constraint "$here/../../constraints.txt" bitsandbytes
$pip install --constraint "$here/../../constraints.txt" sympy networkx jinja2 fsspec typing-extensions filelock \
    setuptools numpy optree transformers psutil highspy pytest pytest-xdist hypothesis
$pip download --no-deps --dest "$wheels" 'nvidia-cuda-runtime==13.0.*' 'nvidia-cublas==13.0.*' \
    'nvidia-cuda-nvrtc==13.0.*' 'nvidia-cuda-crt==13.0.*' 'nvidia-cudnn-cu13==9.20.*'
for wheel in "$wheels"/*.whl; do
    "$environment/bin/python" - "$wheel" "$environment/headers" << 'UNZIP'
import sys
import zipfile

with zipfile.ZipFile(sys.argv[1]) as wheel:
    wheel.extractall(sys.argv[2], [name for name in wheel.namelist() if "/include/" in name])
UNZIP
done
rm -r "$wheels"
