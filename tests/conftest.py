"""The surroundings of every test: four CPU devices, checked shapes, one shared compile cache."""

from __future__ import annotations

import collections
import contextlib
import gc
import importlib
import importlib.util
import itertools
import os
import signal
import sys
from importlib.metadata import version
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parent.parent

UNOPTIMISED = "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
"""Programs of tests run for milliseconds and compile for seconds: half as long without LLVM's
optimisation, and half of that with the older emitters of kernels and one LLVM module."""
if version("jaxlib").startswith("0.10."):  # an XLA that does not know a flag ends the process
    UNOPTIMISED += " --xla_cpu_use_fusion_emitters=false --xla_cpu_parallel_codegen_split_count=1"

# Tracing makes objects by the million and few cycles: looking for these took a tenth of all tests.
gc.set_threshold(50_000, 20, 20)

# Commands that tests start inherit what is ignored: by nohup, and in what a shell has behind "&".
signal.signal(signal.SIGQUIT, signal.SIG_DFL)
signal.signal(signal.SIGINT, signal.default_int_handler)


def hang_up(number: int, _: object) -> None:
    """Ends this process as by default: libtpu ignores SIGHUP where nothing handles it."""
    signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)


signal.signal(signal.SIGHUP, hang_up)

# Before JAX is imported, and inherited by the commands that tests start.
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = (
    "--xla_force_host_platform_device_count=4"
    f" --xla_cpu_collective_call_terminate_timeout_seconds=300 {UNOPTIMISED}"
)
os.environ["JAX_ENABLE_COMPILATION_CACHE"] = "true"  # for programs of one device: see below
os.environ["JAX_COMPILATION_CACHE_DIR"] = str(REPOSITORY / ".cache" / "jax")
os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0.2"
os.environ["JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES"] = "-1"
os.environ.update(TPU_SKIP_MDS_QUERY="1", TPU_WORKER_HOSTNAMES="localhost")
os.environ["ALLOW_MULTIPLE_LIBTPU_LOAD"] = "1"  # workers compile for a TPU at the same time
os.environ.update(HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false")
os.environ["HF_DATASETS_CACHE"] = str(REPOSITORY / ".cache" / "datasets")

sys.path.append(str(Path(sys.prefix) / "cuda"))  # what compiles for GPUs: see the Makefile

import forked
import jax
import jaxtyping
import numpy as np
import programs
import pytest

programs.compile_each_program_once()

# Loaded before the hook, so that trees of specs may stand in the data types: their fields hold
# arrays, ShapeDtypeStructs, shardings.
for data_types in ("jaxgrpo.core.types", "jaxgrpo.core.metrics", "jaxgrpo.rollout.slots.state"):
    importlib.import_module(data_types)


def checked_modules() -> list[str]:
    """The modules whose calls are checked: those that name the shapes of arrays. `make test-all`
    sets CHECK_EVERY_MODULE; elsewhere pyright checks the plain types of the others: there are some
    10,000 functions, and to prepare their checks takes each process seconds."""
    if os.environ.get("CHECK_EVERY_MODULE"):
        return ["jaxgrpo"]
    files = sorted((REPOSITORY / "jaxgrpo").rglob("*.py"))
    named = [file for file in files if "\nfrom jaxtyping import " in file.read_text("utf-8")]
    places = [file.relative_to(REPOSITORY).with_suffix("").parts for file in named]
    return [".".join(place) for place in places]


if importlib.util.find_spec("beartype"):
    import checking

    checking.check_plain_types_by_beartype_alone()
    jaxtyping.install_import_hook(checked_modules(), "checking.check")

ENDED, DROPPING = itertools.count(), programs.Dropping()
"""Tests of this process, and what drops its programs."""

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


@pytest.fixture
def float64():
    """A test's arrays have 64 bits unless they say otherwise."""
    with jax.enable_x64(True):
        yield np.float64


@pytest.fixture(autouse=True, scope="session")
def shared_runs():
    """Runs that a config describes fully share their compiled programs, as in a comparison."""
    with programs.shared_by_all_runs():
        yield


@pytest.fixture(autouse=True)
def few_programs():
    """Drops the compiled programs when they hold too many memory maps: a look at every tenth test,
    since a module of long tests alone can reach the limit, and a look takes milliseconds."""
    yield
    if next(ENDED) % 10 == 9:
        DROPPING.drop_if_many()


@pytest.fixture(scope="session")
def repository() -> Path:
    return REPOSITORY


@pytest.fixture(scope="session")
def python() -> str:
    """The interpreter for tests that start a process."""
    return sys.executable


@pytest.fixture(scope="session")
def environment():
    """Environment of a started process: environment(devices=1, **more) -> dict.

    The process finds the checkout wherever it is started, has that many CPU devices, compiles
    without optimisation, shares the tests' compile cache if it has one device, and prints without
    colours or a fixed width.
    """

    def make(devices: int = 1, **more: str) -> dict[str, str]:
        flags = (
            f"--xla_force_host_platform_device_count={devices}"
            f" --xla_cpu_collective_call_terminate_timeout_seconds=300 {UNOPTIMISED}"
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


@pytest.fixture(scope="session")
def fork_server(environment):
    """A process that has imported JAX once and forks the commands that tests start."""
    with forked.ForkServer(environment()) as server:
        yield server


@pytest.fixture
def tries(request: pytest.FixtureRequest):
    """tries(count): so many more tries of the test's fault ended as promised."""

    def count(number: int = 1) -> None:
        request.node.user_properties.append(("tries", number))

    return count


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Reports say which of the twenty faults a test is about (reliability_table.py)."""
    faults = {*(config.option.faults or ())}
    for item in list(items):
        numbers = {mark.args[0] for mark in item.iter_markers("fault")}
        item.user_properties += [("fault", number) for number in numbers]
        if faults and not faults & numbers:
            items.remove(item)


ROOT_FILES = set(os.listdir(REPOSITORY))


def pytest_sessionfinish(session: pytest.Session) -> None:
    """A test that leaves a folder in the checkout changes what later ones find."""
    left = {name for name in set(os.listdir(REPOSITORY)) - ROOT_FILES if name[0] != "."}
    if left - {"runs", "build", "dist"}:
        print(f"\ntests left in the checkout: {sorted(left)}", file=sys.stderr)
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--faults", type=int, nargs="*", help="only tests of these of the twenty")
    parser.addoption("--times", metavar="FILE", help="write the time per area there, as Markdown")


def pytest_terminal_summary(terminalreporter, config: pytest.Config) -> None:
    """Prints the seconds spent in each area: a folder of tests/, or a file beside them."""
    seconds: dict[str, float] = collections.defaultdict(float)
    count: dict[str, int] = collections.defaultdict(int)
    for reports in terminalreporter.stats.values():
        for report in reports:
            if not hasattr(report, "duration") or not hasattr(report, "nodeid"):
                continue
            area = report.nodeid.split("::")[0].split("/")[1]
            seconds[area] += report.duration
            count[area] += getattr(report, "when", None) == "call"
    if not seconds:
        return
    rows = sorted(seconds.items(), key=lambda item: -item[1])
    rows = [(area, spent, count[area]) for area, spent in rows]
    rows.append(("all", sum(seconds.values()), sum(count.values())))
    terminalreporter.section("time per area")
    for area, spent, number in rows:
        terminalreporter.write_line(f"{spent:8.1f} s  {number:5d} tests  {area}")
    if config.option.times:
        lines = [f"| {area} | {spent:.0f} | {number} |" for area, spent, number in rows]
        head = ["| area | seconds | tests |", "|---|---:|---:|"]
        Path(config.option.times).write_text("\n".join([TIMES, *head, *lines]) + "\n")


TIMES = """# Time of the tests

Seconds per area of `make test TIMES=tests/TIMES.md`, on 2 cores; written by that command.
"""
