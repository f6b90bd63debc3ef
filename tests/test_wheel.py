"""The wheel is pure Python and works in an environment that has never seen this tree."""

import json
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from email.parser import Parser
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


def run(*command: object, cwd: Path) -> str:
    done = subprocess.run([str(part) for part in command], cwd=cwd, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    # A copy, since the build leaves its folders beside pyproject.toml.
    source = tmp_path_factory.mktemp("source")
    for name in ("pyproject.toml", "LICENSE", "README.md"):
        shutil.copy(ROOT / name, source)
    shutil.copytree(ROOT / "memscale", source / "memscale", ignore=shutil.ignore_patterns("__pycache__"))
    out = tmp_path_factory.mktemp("wheel")
    pip = (sys.executable, "-m", "pip", "--disable-pip-version-check", "wheel")
    run(*pip, "--quiet", "--no-deps", "--no-build-isolation", "--no-index", "-w", out, source, cwd=out)
    (built,) = out.iterdir()
    return built


def test_the_wheel_contains_the_package_alone(wheel: Path):
    assert wheel.name.startswith("memscale_transforms-")
    assert wheel.name.endswith("-py3-none-any.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        (metadata_name,) = (name for name in names if name.endswith(".dist-info/METADATA"))
        metadata = Parser().parsestr(archive.read(metadata_name).decode())
    assert {Path(name).suffix for name in names if not name.partition("/")[0].endswith(".dist-info")} == {
        ".css",
        ".html",
        ".js",
        ".py",
        ".typed",
    }
    files = [path for path in (ROOT / "memscale").rglob("*") if path.suffix in (".css", ".html", ".js", ".py")]
    sources = {str(path.relative_to(ROOT).as_posix()) for path in files}
    assert sources <= set(names)
    assert "memscale/py.typed" in names
    assert any(name.endswith(".dist-info/licenses/LICENSE") for name in names)
    assert metadata["License-Expression"] == "Apache-2.0"
    assert metadata["Requires-Python"] == ">=3.10"
    required = [line for line in metadata.get_all("Requires-Dist") if "extra ==" not in line]
    assert sorted(line.partition(">")[0] for line in required) == ["highspy", "jinja2", "numpy", "optree", "torch"]


def test_it_imports_in_an_empty_environment(wheel: Path, tmp_path: Path):
    run(sys.executable, "-m", "venv", "--without-pip", tmp_path / "venv", cwd=tmp_path)
    bin_folder, python_name = ("Scripts", "python.exe") if sys.platform == "win32" else ("bin", "python")
    python = tmp_path / "venv" / bin_folder / python_name
    code = "import sysconfig; print(sysconfig.get_path('purelib'))"
    site_packages = Path(run(python, "-c", code, cwd=tmp_path).strip())
    # Only torch and its like come from here. A path that a .pth file names has its own .pth files ignored,
    # so an editable install of this tree stays invisible.
    (site_packages / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    with zipfile.ZipFile(wheel) as archive:  # all that an installer does with a pure wheel, scripts apart
        archive.extractall(site_packages)
    code = (
        "import importlib.metadata, json, memscale; "
        "print(json.dumps([memscale.__file__, importlib.metadata.version('memscale-transforms')]))"
    )
    file, version = json.loads(run(python, "-I", "-W", "error", "-c", code, cwd=tmp_path))
    assert Path(file).resolve().is_relative_to(site_packages.resolve())
    assert version == wheel.name.split("-")[1]
    assert (site_packages / "memscale" / "py.typed").is_file()
