"""Builds the optional native CPU library; everything else is in pyproject.toml.

The library links to nothing of torch: it has a plain C interface and is loaded with ctypes. Where it cannot be built
(no C++17 compiler; GCC 12 and Clang 14 are tried) the install goes on without it, and `widellm doctor` says so.
"""

from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

SOURCES = Path("src/widellm/kernels/csrc")
FLAGS = ["-std=gnu++17", "-O3", "-g0", "-fvisibility=hidden", "-fno-math-errno", "-fno-trapping-math", "-Wno-psabi"]


class BuildNative(build_ext):
    """A shared library under a fixed name: it is not a Python module, so it has no Python ABI in its name."""

    def get_ext_filename(self, fullname: str) -> str:
        return str(Path(*fullname.split("."))) + ".so"

    def get_export_symbols(self, ext: Extension) -> list[str]:
        return []  # there is no PyInit function to export

    def build_extension(self, ext: Extension) -> None:
        try:
            ext.extra_compile_args, ext.extra_link_args = [*FLAGS, "-fopenmp"], ["-fopenmp"]
            super().build_extension(ext)
        except Exception as error:  # a compiler without OpenMP (Apple's): one thread is better than no library
            print(f"widellm: building the native library with OpenMP failed ({error}); trying without")
            ext.extra_compile_args, ext.extra_link_args = list(FLAGS), []
            super().build_extension(ext)


setup(
    cmdclass={"build_ext": BuildNative},
    ext_modules=[
        Extension(
            "widellm.kernels._native",
            sources=sorted(map(str, SOURCES.glob("*.cpp"))),
            depends=sorted(map(str, SOURCES.glob("*.h"))),
            language="c++",
            optional=True,
        )
    ],
)
