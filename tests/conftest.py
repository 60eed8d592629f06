"""The surroundings of every test: four CPU devices, checked shapes, one shared compile cache."""

from __future__ import annotations

import collections
import contextlib
import gc
import importlib
import importlib.util
import os
import sys
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parent.parent

# Before JAX is imported, and inherited by the commands that tests start.
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = (
    "--xla_force_host_platform_device_count=4"
    " --xla_cpu_collective_call_terminate_timeout_seconds=300"
    # Programs of tests run for milliseconds and compile for seconds: half as long without LLVM's
    # optimisation. Started commands (`environment`) are compiled as a user's are.
    " --xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
)
# Also of four devices, which halves the time of all tests, though some such programs wait for ever
# when they are read back (runtime._keep_compilations): the module of those turns it off.
os.environ["JAX_ENABLE_COMPILATION_CACHE"] = "true"
os.environ["JAX_COMPILATION_CACHE_DIR"] = str(REPOSITORY / ".cache" / "jax")
os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0.2"
os.environ["JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES"] = "-1"
os.environ.update(TPU_SKIP_MDS_QUERY="1", TPU_WORKER_HOSTNAMES="localhost")
os.environ.update(HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false")
os.environ["HF_DATASETS_CACHE"] = str(REPOSITORY / ".cache" / "datasets")

import jax
import jaxtyping
import pytest

# Loaded before the hook, so that trees of specs may stand in the data types: their fields hold
# arrays, ShapeDtypeStructs, shardings. Every other module is checked at each call.
for data_types in ("jaxgrpo.core.types", "jaxgrpo.core.metrics"):
    importlib.import_module(data_types)

if importlib.util.find_spec("beartype"):
    jaxtyping.install_import_hook("jaxgrpo", "checking.check")

STRICT = (
    *("tests/advantages/", "tests/losses/", "tests/models/test_logprobs.py"),
    *("tests/models/test_exact_kl.py", "tests/evaluation/test_calibration.py"),
    *("tests/evaluation/test_confidence.py", "tests/experiments/probe/test_group_signal.py"),
)


@pytest.fixture(autouse=True)
def strict_numbers(request: pytest.FixtureRequest):
    """No silent promotion of dtypes or ranks in the tests of the core."""
    place = request.path.relative_to(REPOSITORY).as_posix()
    with contextlib.ExitStack() as stack:
        if place.startswith(STRICT):
            stack.enter_context(jax.numpy_dtype_promotion("strict"))
            stack.enter_context(jax.numpy_rank_promotion("raise"))
        yield


@pytest.fixture(autouse=True, scope="module")
def few_programs():
    """Compiled programs go with the module that made them.

    Each holds memory maps, of which Linux allows a process 65,530: thousands of programs end in a
    segmentation fault.
    """
    yield
    jax.clear_caches()
    gc.collect()


@pytest.fixture(scope="session")
def repository() -> Path:
    return REPOSITORY


@pytest.fixture(scope="session")
def python() -> str:
    """The interpreter for tests that start a process."""
    return sys.executable


@pytest.fixture
def environment():
    """Environment of a started process: environment(devices=1, **more) -> dict.

    The process finds the checkout wherever it is started, has so many CPU devices, shares the
    compile cache of the tests and prints without colours or a fixed width.
    """

    def make(devices: int = 1, **more: str) -> dict[str, str]:
        flags = (
            f"--xla_force_host_platform_device_count={devices}"
            " --xla_cpu_collective_call_terminate_timeout_seconds=300"
        )
        paths = [str(REPOSITORY), os.environ.get("PYTHONPATH", "")]
        inherited = {**os.environ}
        del inherited["JAX_ENABLE_COMPILATION_CACHE"]
        return {
            **inherited,
            "XLA_FLAGS": flags,
            "PYTHONPATH": os.pathsep.join(path for path in paths if path),
            "NO_COLOR": "1",
            "COLUMNS": "200",
            **more,
        }

    return make


def pytest_terminal_summary(terminalreporter) -> None:
    """Prints the seconds spent in each area: a directory of tests/, or a file beside them."""
    seconds: dict[str, float] = collections.defaultdict(float)
    count: dict[str, int] = collections.defaultdict(int)
    for reports in terminalreporter.stats.values():
        for report in reports:
            if not hasattr(report, "duration") or not hasattr(report, "nodeid"):
                continue
            parts = report.nodeid.split("::")[0].split("/")
            area = parts[1] if len(parts) > 1 else parts[0]
            seconds[area] += report.duration
            count[area] += getattr(report, "when", None) == "call"
    if not seconds:
        return
    terminalreporter.section("time per area")
    for area, spent in sorted(seconds.items(), key=lambda item: -item[1]):
        terminalreporter.write_line(f"{spent:8.1f} s  {count[area]:5d} tests  {area}")
    terminalreporter.write_line(f"{sum(seconds.values()):8.1f} s  {sum(count.values()):5d} tests")
