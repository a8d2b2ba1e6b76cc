"""Certificates for tests, as files."""

from pathlib import Path

import trustme


def write_tls_files(folder: Path, authority: trustme.CA, *names: str) -> tuple[Path, Path, Path]:
    """Certificate for these names, its key and the authority, as PEM; paths in that order."""
    folder.mkdir(exist_ok=True)
    made = authority.issue_cert(*names)
    paths = (folder / "cert.pem", folder / "key.pem", folder / "ca.pem")
    made.cert_chain_pems[0].write_to_path(paths[0])
    made.private_key_pem.write_to_path(paths[1])
    authority.cert_pem.write_to_path(paths[2])
    return paths
