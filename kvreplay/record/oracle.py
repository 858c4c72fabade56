"""The real engine that vectors are recorded from, where it is installed."""

import logging
import os
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from kvreplay.conformance.vector import Json
from kvreplay.conformance.workload import read_workload
from kvreplay.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping

_ENVIRONMENT: Final["Mapping[str, str]"] = {
    "VLLM_TARGET_DEVICE": "cpu",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
}
"""Read by vLLM when it is imported; what the user has set stays."""


class Recording(NamedTuple):
    """`resolved` is what vLLM made of the settings."""

    resolved: dict[str, int]
    steps: Iterator[dict[str, Any]]


class VllmOracle:
    """The vLLM of this Python. Importing it takes some seconds; open it once."""

    def __init__(self) -> None:
        if find_spec("vllm") is None:
            raise ConfigError("vLLM is not installed in this Python; vectors are recorded where it is")
        for name, value in _ENVIRONMENT.items():
            os.environ.setdefault(name, value)
        try:
            from kvreplay.record.vllm_driver import WorkloadDriver
        except ImportError as error:
            raise ConfigError(f"vllm {_installed_version()} cannot be driven: {error}") from error
        # It warns of each failed load, of which vectors are full.
        logging.getLogger("vllm").setLevel(logging.CRITICAL)
        self.name = f"vllm {_installed_version()}"
        self._driver = WorkloadDriver

    def record(self, workload: Json) -> Recording:
        """Raises ConfigError for a workload that is none, or whose engine vLLM refuses."""
        driver = self._driver(read_workload(workload))
        resolved = {"scheduler_block_size": driver.scheduler_block_size, "hash_block_size": driver.hash_block_size}
        return Recording(resolved, driver.steps())


def _installed_version() -> str:
    try:
        return version("vllm")
    except PackageNotFoundError:
        return "of unknown version"
