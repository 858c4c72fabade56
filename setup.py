"""The one step that pyproject.toml cannot say: `configs/` and `traces/` are also data of the package.

They lie at the top level, where a user looks for them, and are found by name after `pip install .` because a built
wheel carries copies inside `kvreplay/`. An editable install reads them where they are.
"""

from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

DATA = {"configs": "*.toml", "traces": "*.parquet"}


class BuildWithData(build_py):
    def run(self) -> None:
        super().run()
        if not self.editable_mode:
            for source, target in self._data_pairs():
                self.mkpath(str(Path(target).parent))
                self.copy_file(source, target)

    def get_outputs(self, include_bytecode: bool = True) -> list[str]:  # noqa: FBT001 - setuptools' signature
        return [*super().get_outputs(include_bytecode), *(target for _, target in self._data_pairs())]

    def _data_pairs(self) -> list[tuple[str, str]]:
        package = Path(self.build_lib) / "kvreplay"
        return [
            (str(source), str(package / folder / source.name))
            for folder, pattern in DATA.items()
            for source in sorted(Path(folder).glob(pattern))
        ]


setup(cmdclass={"build_py": BuildWithData})
