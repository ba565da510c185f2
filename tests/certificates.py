"""Certificates for tests, made by openssl: NAME.crt and NAME.key in a folder."""

from __future__ import annotations

import subprocess
from pathlib import Path

from tests.conftest import missing

_KEY = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")


def self_signed(folder: Path, name: str, names: str) -> None:
    """One that signs itself, for these names, as IP:127.0.0.1."""
    _openssl(
        *("req", "-x509", *_KEY, "-days", "2", "-subj", f"/CN={name}", "-addext", f"subjectAltName={names}"),
        *("-keyout", str(folder / f"{name}.key"), "-out", str(folder / f"{name}.crt")),
    )


def signed(folder: Path, name: str, names: str, by: str) -> None:
    """One that the CA `by` of the folder has signed."""
    request, extensions = folder / f"{name}.csr", folder / f"{name}.ext"
    extensions.write_text(f"subjectAltName={names}\n")
    _openssl("req", *_KEY, "-subj", f"/CN={name}", "-keyout", str(folder / f"{name}.key"), "-out", str(request))
    _openssl(
        *("x509", "-req", "-in", str(request), "-days", "2", "-extfile", str(extensions), "-CAcreateserial"),
        *("-CA", str(folder / f"{by}.crt"), "-CAkey", str(folder / f"{by}.key"), "-out", str(folder / f"{name}.crt")),
    )


def authority(folder: Path, name: str) -> None:
    """A CA."""
    _openssl(
        *("req", "-x509", *_KEY, "-days", "2", "-subj", f"/CN={name}", "-addext", "keyUsage=critical,keyCertSign"),
        *("-keyout", str(folder / f"{name}.key"), "-out", str(folder / f"{name}.crt")),
    )


def _openssl(*words: str) -> None:
    try:
        subprocess.run(["openssl", *words], check=True, capture_output=True)
    except FileNotFoundError:
        missing("openssl")
