#!/bin/bash
# publish.sh REGISTRY TAG FOLDER [cpu|cuda]
# Build both images from this commit, push them, sign them, and write into FOLDER what is in them and the values of the
# chart that name them by digest. PYTHON: the base image with the digest that you have checked, python:3.11.13-slim-bookworm@sha256:...
# Needs docker with buildx, logged in to the registry, and cosign 2 with an identity: publish.yaml is a pipeline with both.
set -euo pipefail
registry=$1 tag=$2 out=$3 device=${4:-cpu}
cd "$(dirname "$0")/../.."
refuse() { echo "publish.sh: $1" >&2; exit 2; }

[[ ${PYTHON:-} =~ ^[a-z0-9./_:-]+@sha256:[0-9a-f]{64}$ ]] ||
  refuse "PYTHON is '${PYTHON:-}', it must be a base image by its digest, python:3.11.13-slim-bookworm@sha256:..."
[[ $tag != latest ]] || refuse "the tag is latest, which moves: name the version"
[[ -z $(git status --porcelain) ]] || refuse "the clone differs from its commit: the images would be of no commit"
# The same commit makes the same layers' times.
SOURCE_DATE_EPOCH=$(git log -1 --format=%ct)
export SOURCE_DATE_EPOCH
mkdir -p "$out"
for image in service worker; do
  name=$registry/thinwire-$image
  docker buildx build --file "deploy/images/$image.Dockerfile" --platform linux/amd64 \
    --build-arg "PYTHON=$PYTHON" --build-arg "DEVICE=$device" \
    --label "org.opencontainers.image.revision=$(git rev-parse HEAD)" \
    --provenance mode=max --metadata-file "$out/$image.json" --tag "$name:$tag" --push .
  digest=$(python3 -c 'import json, sys; print(json.load(open(sys.argv[1]))["containerimage.digest"])' "$out/$image.json")
  [[ $digest =~ ^sha256:[0-9a-f]{64}$ ]] || refuse "docker gave $name the digest '$digest'"
  # By digest: a tag may move between two commands.
  container=$(docker create "$name@$digest")
  docker cp "$container:/opt/thinwire/sbom.cdx.json" "$out/$image.cdx.json"
  docker rm "$container" > /dev/null
  cosign sign --yes "$name@$digest"
  cosign attest --yes --type cyclonedx --predicate "$out/$image.cdx.json" "$name@$digest"
  case $image in
    service) printf 'image: {repository: %s, digest: "%s"}\n' "$name" "$digest" > "$out/values.yaml" ;;
    worker) printf 'kuberay: {image: "%s@%s"}\n' "$name" "$digest" >> "$out/values.yaml" ;;
  esac
done
cat "$out/values.yaml"
