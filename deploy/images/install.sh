#!/bin/sh
# install.sh service|worker FOLDER [cpu|cuda]
# Make a virtual environment in FOLDER, with what is locked for this image and thinwire itself: all that a Dockerfile
# here does, so that it can be tried without Docker. TORCH_INDEX: where the CPU build of torch comes from.
set -eu
image=$1 folder=$2 device=${3:-cpu}
images=$(cd "$(dirname "$0")" && pwd)
: "${TORCH_INDEX:=https://download.pytorch.org/whl/cpu}"

case $device in
  cpu | cuda) ;;
  *) echo "install.sh: the device is $device, it must be cpu or cuda" >&2; exit 2 ;;
esac
python3 -m venv "$folder"
pip() { "$folder/bin/python" -m pip --disable-pip-version-check --no-cache-dir "$@"; }
if [ "$image $device" = "worker cpu" ]; then  # PyPI's build is for CUDA
  pip install --no-deps --index-url "$TORCH_INDEX" "$(grep '^torch==' "$images/worker.lock")"
fi
pip install --requirement "$images/$image.lock"
pip install --no-deps "$images/../.."
pip check
# What is in the image, for whoever has to know (CycloneDX); the tool itself stays outside of it.
tool=$(mktemp -d)
python3 -m venv "$tool"
"$tool/bin/python" -m pip --disable-pip-version-check --no-cache-dir install --quiet --requirement "$images/sbom.lock"
"$tool/bin/cyclonedx-py" environment --output-reproducible --output-file "$folder/sbom.cdx.json" "$folder/bin/python"
rm -rf "$tool"
