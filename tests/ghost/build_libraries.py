"""Build fake CUDA libraries, those that a wheel of torch needs, where the wheel looks for them.

usage: PYTHON build_libraries.py INCLUDE_DIR..., with the Python of an environment that has the wheel, and the folders
of the headers.

Every symbol that the libraries of the wheel and of bitsandbytes leave undefined is defined by cudart.c or libraries.c,
or here as "return 0", under the version and in the library that it is asked from. What makes something, by its name,
gives fresh memory in its first argument: handles must differ, since PyTorch keeps a workspace for each.
"""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

HERE = Path(__file__).resolve().parent
RUNTIME, DRIVER, NVML = "libcudart", "libcuda.so.1", "libnvidia-ml.so.1"
SYSTEM = re.compile(r"lib(c|m|dl|rt|pthread|gcc_s|stdc\+\+|util)\.so|ld-linux")
# Whose a symbol without a version is, by how it begins.
BY_PREFIX = {
    "cuFile": "libcufile.so.0",
    "cusparseLt": "libcusparseLt.so.0",
    "nccl": "libnccl.so.2",
    "nvshmem": "libnvshmem_host.so.3",
    "curand": "libcurand.so.10",
    "cu[A-Z]": DRIVER,
}
# The version that its symbols have where it is not the library's name.
BY_VERSION = {"NVSHMEM": "libnvshmem_host.so.3"}
# The libraries of which a part is written: the macro that selects it in libraries.c.
WRITTEN = {
    "libcublas": "GHOST_CUBLAS",
    "libcublasLt": "GHOST_CUBLASLT",
    "libnvrtc": "GHOST_NVRTC",
    "libnccl": "GHOST_NCCL",
    "libcudnn": "GHOST_CUDNN",
    "libnvidia-ml": "GHOST_NVML",
}


def output(*command: str | Path) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def undefined(lib_dir: Path, *others: Path) -> dict[str, dict[str, set[str]]]:
    """What the wheel's libraries and `others` ask for: names by version by library."""
    needed, wanted, defined = {DRIVER, NVML}, defaultdict(set), set()
    for lib in (*sorted(lib_dir.glob("*.so*")), *others):
        needed |= set(re.findall(r"NEEDED.*\[(.*?)\]", output("readelf", "-d", lib)))
        for line in output("nm", "-D", lib).splitlines():
            kind, symbol = line.split()[-2:]
            name, _, version = symbol.partition("@")
            if kind in "Uw":
                wanted[name].add(version.strip("@"))
            else:
                defined.add(name)
    here = {lib.name for lib in lib_dir.iterdir()}
    libraries = {name: defaultdict(set) for name in needed if name not in here and not SYSTEM.match(name)}
    for name, versions in wanted.items():
        for version in versions:
            soname = BY_VERSION.get(version, version)
            if not version and name not in defined:
                soname = next((soname for prefix, soname in BY_PREFIX.items() if re.match(prefix, name)), "")
            if soname in libraries:
                libraries[soname][version].add(name)
    runtime = next(name for name in libraries if name.startswith(RUNTIME))
    libraries[runtime][runtime] |= libraries[DRIVER].pop("", set())  # the driver is in the runtime's library
    return libraries


def build(soname: str, names_by_version: dict[str, set[str]], runtime: str, out: Path, flags: list[str]) -> str:
    """Compile one library; says how many of its symbols are written and how many generated."""
    stem = soname.partition(".")[0]
    source = HERE / ("cudart.c" if soname == runtime else "libraries.c")
    part, generated, script = out / "part.o", out / f"{stem}.c", out / f"{stem}.map"
    own, parts = set(), []
    if soname == runtime or stem in WRITTEN:
        subprocess.run(["gcc", *flags, "-c", f"-D{WRITTEN.get(stem, 'GHOST_RUNTIME')}", source, "-o", part], check=True)
        own = {line.split()[-1] for line in output("nm", "--defined-only", "-g", part).splitlines()}
        parts = [part]
    missing = sorted(set().union(*names_by_version.values()) - own)
    makes = re.compile(r"Create|InitRank$")
    text = ["#include <stdlib.h>", "int ghost_here;"]
    for name in missing:
        if makes.search(name):
            text.append(f"int {name}(void **made) {{ *made = calloc(1, 4096); return 0; }}")
        else:
            text.append(f"int {name}(void) {{ return 0; }}")
    generated.write_text("\n".join(text) + "\n")
    versions = []
    for version, names in sorted(names_by_version.items()):
        if version:
            everything = ["*"] if version == soname else []
            versions.append(
                f"{version} {{ global: " + " ".join(f"{name};" for name in sorted(names) + everything) + " };"
            )
    command = ["gcc", *flags, "-shared", f"-Wl,-soname,{soname}", "-Wl,-rpath,$ORIGIN", f"-L{out}", generated, *parts]
    if versions:
        script.write_text("\n".join(versions) + "\n")
        command.append(f"-Wl,--version-script={script}")
    if soname == DRIVER:
        command += ["-Wl,--no-as-needed", f"-l:{runtime}"]
    subprocess.run([*command, "-o", out / soname, "-ldl", "-lpthread"], check=True)
    for path in (part, generated, script):
        path.unlink(missing_ok=True)
    return f"{soname}: {len(own)} written, {len(missing)} generated"


def build_allocator(torch: Path, runtime: str, out: Path, flags: list[str]) -> str:
    """Compile what follows the caching allocator, against the headers of the wheel."""
    inside = [f"-I{torch / 'include'}", f"-L{torch / 'lib'}", f"-L{out}", "-lc10", "-lc10_cuda", f"-l:{runtime}"]
    source, library = HERE / "allocator.cpp", out / "libghost_allocator.so"
    subprocess.run(["g++", "-std=c++20", "-shared", *flags, source, *inside, "-o", library], check=True)
    return f"{library.name}: written"


def main(*includes: str) -> None:
    found = importlib.util.find_spec("torch")
    assert found is not None, f"{sys.executable} has no torch"
    assert found.origin is not None
    torch = Path(found.origin).parent
    out = torch.parent / "nvidia" / "cu13" / "lib"
    out.mkdir(parents=True, exist_ok=True)
    flags = ["-O1", "-fPIC", "-w", *(f"-I{path}" for path in includes)]
    libraries = undefined(torch / "lib", *torch.parent.glob("bitsandbytes/libbitsandbytes_cuda130.so"))
    runtime = next(name for name in libraries if name.startswith(RUNTIME))
    for soname in sorted(libraries, key=lambda soname: soname != runtime):
        print(build(soname, libraries[soname], runtime, out, flags))
    print(build_allocator(torch, runtime, out, flags))


if __name__ == "__main__":
    main(*sys.argv[1:])
