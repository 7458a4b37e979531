"""The part of the build that pyproject.toml cannot say: compiling the C++ kernels.

They are plain shared libraries, one for each instruction set, so the wheel depends on the platform but on no Python
version. Where there is no compiler the package installs without them, and pdserve says so when it starts.
"""

import shutil
import sys
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext
from setuptools.errors import CompileError

KERNELS = Path(__file__).parent / "src" / "pdserve" / "kernels"
sys.path.insert(0, str(KERNELS))
import native_build  # noqa: E402

PACKAGE = "pdserve.kernels.compiled"
VARIANTS = {variant.name: variant for variant in native_build.get_variants()}


class BuildKernels(build_ext):
    """Compiles each variant with `native_build`, not with the flags that Python was built with."""

    def get_ext_filename(self, fullname: str) -> str:
        """Where a variant's library lies: named by what went into it, not by a Python version."""
        package, _, name = fullname.rpartition(".")
        return str(Path(*package.split("."), VARIANTS[name].library_name))

    def build_extension(self, ext: Extension) -> None:
        """Compile one variant, if it is not beside its sources already; `optional` makes a failure a warning."""
        variant = VARIANTS[ext.name.rpartition(".")[2]]
        target = Path(self.get_ext_fullpath(ext.name)).absolute()
        target.parent.mkdir(parents=True, exist_ok=True)
        compiled = native_build.COMPILED_DIR / variant.library_name
        if compiled.exists():
            shutil.copy2(compiled, target)  # with its time, so that it is not copied back over itself
            return
        try:
            native_build.compile_variant(variant, target)
        except native_build.CompileError as error:
            raise CompileError(str(error)) from error

    def copy_extensions_to_source(self) -> None:
        """For an editable installation: the libraries go beside the sources, those of older sources go away."""
        directory = native_build.COMPILED_DIR
        directory.mkdir(exist_ok=True)
        current = {variant.library_name for variant in VARIANTS.values()}
        for library in directory.glob("*.so"):
            if library.name not in current:
                library.unlink()
        super().copy_extensions_to_source()


class PlatformWheel(bdist_wheel):
    """A wheel for any Python on this platform."""

    def get_tag(self) -> tuple[str, str, str]:
        """See wheel's tags (PEP 425)."""
        return ("py3", "none", super().get_tag()[2])


setup(
    cmdclass={"build_ext": BuildKernels, "bdist_wheel": PlatformWheel},
    options={"build_ext": {"parallel": True}},
    ext_modules=[Extension(f"{PACKAGE}.{name}", sources=[], optional=True) for name in VARIANTS],
)
