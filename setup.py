"""Build of the extension `palimpsest._C` with CMake. All else is in pyproject.toml. Torch is not needed to build."""

import os
import subprocess
import sys
import sysconfig
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).resolve().parent
FOLDERS = ("engine", "triton_kernels", "rl", "bench")


class CMakeBuild(build_ext):
    """Configure, build and install the CMake project into the place where setuptools wants the extension."""

    def build_extension(self, ext: Extension) -> None:
        import pybind11

        out = Path(self.get_ext_fullpath(ext.name)).resolve().parent
        # Not build_temp, which pip makes anew for each install: what is built already is not built again.
        work = ROOT / "build" / f"cmake-{sysconfig.get_platform()}-{sys.implementation.cache_tag}"
        work.mkdir(parents=True, exist_ok=True)
        configure = [
            *("cmake", "-S", str(ROOT), "-B", str(work), "-G", "Ninja", "-DCMAKE_BUILD_TYPE=Release"),
            f"-DPython_EXECUTABLE={sys.executable}",
            f"-Dpybind11_DIR={pybind11.get_cmake_dir()}",
            f"-DPALIMPSEST_CUDA={os.environ.get('PALIMPSEST_CUDA', 'AUTO')}",
        ]
        subprocess.run(configure, check=True)
        subprocess.run(["cmake", "--build", str(work), "-j", os.environ.get("MAX_JOBS", "2")], check=True)
        subprocess.run(["cmake", "--install", str(work), "--prefix", str(out)], check=True)


def packages() -> list[str]:
    """Every folder of the package that holds an __init__.py, as a dotted name. The repository root is the package."""
    inits = sorted(path for folder in FOLDERS for path in (ROOT / folder).rglob("__init__.py"))
    return ["palimpsest", *(".".join(("palimpsest", *path.parent.relative_to(ROOT).parts)) for path in inits)]


setup(
    packages=packages(),
    ext_modules=[Extension("palimpsest._C", sources=[])],
    cmdclass={"build_ext": CMakeBuild},
)
