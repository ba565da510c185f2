#!/bin/bash
# install.sh service|worker FOLDER [cpu|cuda]
# Make a virtual environment in FOLDER, with what is locked for this image, by its hashes, and thinwire itself: all that
# a Dockerfile here does, so that it can be tried without Docker. TORCH_INDEX: where the CPU build of torch comes from.
set -eu
image=$1 folder=$2 device=${3:-cpu}
images=$(cd "$(dirname "$0")" && pwd)
: "${TORCH_INDEX:=https://download.pytorch.org/whl/cpu}"

case $device in
  cpu | cuda) ;;
  *) echo "install.sh: the device is $device, it must be cpu or cuda" >&2; exit 2 ;;
esac
python3 -m venv "$folder"
tools=$(mktemp -d)
python3 -m venv "$tools"
into() { "$1/bin/python" -m pip --disable-pip-version-check --no-cache-dir install --no-deps "${@:2}"; }
locked() { into "$1" --require-hashes --requirement "$images/$2.lock" "${@:3}"; }
case "$image $device" in
  "worker cpu") locked "$folder" torch-cpu --index-url "$TORCH_INDEX" ;;  # PyPI's build is for CUDA
  "worker cuda") locked "$folder" torch-cuda ;;
esac
locked "$folder" "$image"
# Built by what is locked too: pip would fetch the newest setuptools by itself.
locked "$tools" tools
"$tools/bin/python" -m pip --disable-pip-version-check wheel --no-deps --no-build-isolation --wheel-dir "$tools/dist" "$images/../.."
into "$folder" --no-index "$tools"/dist/thinwire-*.whl
"$folder/bin/python" -m pip check
# What is in the image, for whoever has to know (CycloneDX); the tool itself stays outside of it.
"$tools/bin/cyclonedx-py" environment --output-reproducible --output-file "$folder/sbom.cdx.json" "$folder/bin/python"
rm -rf "$tools"
