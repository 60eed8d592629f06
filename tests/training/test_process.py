"""The start and the end of a process."""

from __future__ import annotations

import concurrent.futures
import errno
import importlib.util
import os
import signal
import subprocess
import sys
import time

import jax
import pytest
from jax._src.clusters import K8sCluster, cloud_tpu_cluster
from processes import end, starting, together

import jaxgrpo
from jaxgrpo.core.errors import InputError
from jaxgrpo.training.processes import process as runtime
from jaxgrpo.training.processes.backend import (
    flags_without_graphs,
    idle_accelerator,
    start_backend,
)

# Steps until it is told to stop; with several processes each step is one collective.
LOOP = """
import sys, time
import jax, jax.numpy as jnp
from jax.experimental import multihost_utils
from jaxgrpo.training.processes import process as runtime

def command():
    line = runtime.start("cpu")
    with runtime.stop_signals():
        print(line, flush=True)  # from here on signals may come
        for step in range(1, 1000):
            multihost_utils.process_allgather(jnp.float32(step))
            if "fail" in sys.argv and step == 5:
                raise RuntimeError("step 5 went wrong")
            time.sleep(0.05)
            if runtime.stop_requested(step) and "deaf" not in sys.argv:
                raise runtime.StopRequested(f"saved at {step}")

sys.exit(runtime.guard(command))
"""


@pytest.fixture
def begin(environment, fork_server):
    with starting(LOOP, environment, fork_server) as begin:
        yield begin


def two(begin, *of_second: str) -> list[subprocess.Popen]:
    """Two processes of one run over the loopback."""
    first, second = together()
    return [begin(**first), begin(*of_second, **second)]


def first_line(process: subprocess.Popen) -> str:
    assert process.stdout is not None
    return process.stdout.readline()


def test_the_first_line_names_the_devices():
    version = f"jaxgrpo {jaxgrpo.__version__}"
    line = f"{version} on 4 cpu devices (cpu) in 1 process, jax {jax.__version__}"
    assert runtime.start() == runtime.start("cpu") == line
    assert runtime.is_main()


def test_a_platform_that_is_not_there_is_refused():
    with pytest.raises(InputError, match=r'mesh.platform = "gpu": JAX found cpu devices; install'):
        runtime.start("gpu")


@pytest.mark.parametrize(
    ("names", "message"),
    [
        ("", r"^the devices of this machine: JAX cannot use them \(busy\); set JAX_PLATFORMS=cpu$"),
        ("cuda", r"^JAX_PLATFORMS = cuda: JAX .* \(busy\); unset it, or set JAX_PLATFORMS=cpu$"),
    ],
)
def test_devices_that_jax_cannot_start_are_refused_with_the_reason(monkeypatch, names, message):
    def fail():
        raise RuntimeError("busy")

    monkeypatch.setattr(jax, "default_backend", fail)
    monkeypatch.setenv("JAX_PLATFORMS", names)
    with pytest.raises(InputError, match=message) as refusal:
        start_backend()
    assert isinstance(refusal.value.__cause__, RuntimeError)


def test_an_accelerator_that_jax_cannot_use_is_noticed_unless_it_is_hidden(tmp_path):
    assert idle_accelerator({}, str(tmp_path)) is None
    for name in ("nvidia0", "nvidiactl"):
        (tmp_path / name).touch()
    assert idle_accelerator({}, str(tmp_path)) == f"{tmp_path}/nvidia0"
    assert idle_accelerator({"JAX_PLATFORMS": "cpu"}, str(tmp_path)) is None
    assert idle_accelerator({"CUDA_VISIBLE_DEVICES": ""}, str(tmp_path)) is None
    (tmp_path / "accel0").touch()
    assert idle_accelerator({"CUDA_VISIBLE_DEVICES": ""}, str(tmp_path)) is not None


@pytest.mark.parametrize(("name", "tpus", "has_driver"), [("vfio/0", 4, False), ("dxg", 0, True)])
def test_a_device_file_that_others_have_too_is_an_accelerator_beside_its_chip_or_driver(
    tmp_path, name, tpus, has_driver
):
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).touch()
    assert idle_accelerator({}, str(tmp_path), lambda: (0, None), lambda: False) is None
    system = str(tmp_path), lambda: (tpus, None), lambda: has_driver
    assert idle_accelerator({}, *system) == f"{tmp_path}/{name}"
    assert (idle_accelerator({"CUDA_VISIBLE_DEVICES": "-1"}, *system) is None) == has_driver


GRAPHS_OFF = "--xla_gpu_enable_command_buffer="


def test_a_profile_turns_cuda_graphs_off_unless_the_user_has_said_what_they_are():
    assert flags_without_graphs("") == GRAPHS_OFF
    assert flags_without_graphs("--xla_dump_to=x") == f"--xla_dump_to=x {GRAPHS_OFF}"
    for flags in (GRAPHS_OFF, f"{GRAPHS_OFF}FUSION --xla_dump_to=x"):
        assert flags_without_graphs(flags, has_backend=True) == flags
    with pytest.raises(InputError, match=rf"^profile: .* new process with XLA_FLAGS={GRAPHS_OFF}$"):
        flags_without_graphs("--xla_dump_to=x", has_backend=True)
    with pytest.raises(InputError, match=r"^XLA_FLAGS = flags\.txt: .* the flags themselves$"):
        flags_without_graphs("flags.txt")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("has_driver", "platform", "profile", "is_off"),
    [
        (True, "auto", True, True),
        (True, "cpu", True, False),
        (True, "auto", False, False),
        (False, "auto", True, False),
    ],
)
def test_a_profile_turns_them_off_before_a_gpu_starts_and_changes_nothing_elsewhere(
    python, environment, tmp_path, has_driver, platform, profile, is_off
):
    """Beside a plugin and a driver without any GPU, so that a CPU computes with these flags."""
    (tmp_path / "jax_cuda12_plugin").mkdir()
    (tmp_path / "jax_cuda12_plugin" / "__init__.py").touch()
    library = importlib.util.find_spec("numpy._core._multiarray_umath")
    assert library is not None
    assert library.origin is not None
    driver = tmp_path / "libcuda.so.1"
    if has_driver:
        driver.symlink_to(library.origin)
    else:
        driver.write_text("no library")
    code = f"""
import os
from jaxgrpo.training.processes import process as runtime
runtime.start({platform!r}, {profile})
print(os.environ["XLA_FLAGS"])
"""
    variables = {"PYTHONPATH": f"{tmp_path}{os.pathsep}{environment()['PYTHONPATH']}"}
    variables |= {"LD_LIBRARY_PATH": str(tmp_path), "JAX_PLATFORMS": "", "CUDA_VISIBLE_DEVICES": ""}
    command = [python, "-c", code]
    flags = subprocess.check_output(command, env=environment(**variables), text=True)
    assert (GRAPHS_OFF in flags.split()) == is_off
    assert flags.split()[:1] == environment()["XLA_FLAGS"].split()[:1]


@pytest.mark.parametrize("devices", [1, 4])
def test_programs_of_several_cpu_devices_are_not_kept(devices, python, environment, tmp_path):
    # Taken from the cache they would wait for one another for ever.
    code = """
import jax, jax.numpy as jnp
from jaxgrpo.training.processes import process as runtime
runtime.start()
jax.jit(lambda x: jnp.tanh(x @ x))(jnp.ones((3, 3)))
"""
    cache = tmp_path / "kept"
    variables = {"JAX_COMPILATION_CACHE_DIR": str(cache)}
    variables["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
    completed = subprocess.run(
        [python, "-c", code], env=environment(devices, **variables), cwd=tmp_path, check=False
    )
    assert completed.returncode == 0
    assert (cache.is_dir() and any(cache.iterdir())) == (devices == 1)


def test_compiled_programs_go_where_jax_is_told_or_into_the_users_cache():
    assert str(runtime.cache_folder({"JAX_COMPILATION_CACHE_DIR": "/a"})) == "/a"
    assert str(runtime.cache_folder({"XDG_CACHE_HOME": "/b"})) == "/b/jaxgrpo/xla"
    assert runtime.cache_folder({}).parts[-3:] == (".cache", "jaxgrpo", "xla")


def test_the_three_variables_say_which_process_of_how_many_this_is():
    ours = {"JAX_COORDINATOR_ADDRESS": "a:1", "JAX_NUM_PROCESSES": "2", "JAX_PROCESS_ID": "1"}
    assert runtime.several_processes(ours) == {
        "coordinator_address": "a:1",
        "num_processes": 2,
        "process_id": 1,
    }


SLURM = {
    "SLURM_JOB_ID": "77",
    "SLURM_STEP_NODELIST": "node[01-02]",
    "SLURM_PROCID": "1",
    "SLURM_LOCALID": "0",
}
OPEN_MPI = {"OMPI_MCA_orte_hnp_uri": "1531576320.0;tcp://10.96.0.1:34911"}
CLUSTERS = {
    "SLURM": ({**SLURM, "SLURM_NTASKS": "2"}, {"SLURM_NTASKS": "1"}),
    "Open MPI": (
        {**OPEN_MPI, "OMPI_COMM_WORLD_SIZE": "4"},
        {"OMPI_COMM_WORLD_SIZE": "1"},
    ),
    "GKE": ({"TPU_WORKER_HOSTNAMES": "a,b"}, {"TPU_WORKER_HOSTNAMES": "localhost"}),
    "GKE, two slices": (
        {"TPU_WORKER_HOSTNAMES": "a", "MEGASCALE_NUM_SLICES": "2"},
        {"MEGASCALE_NUM_SLICES": "1"},
    ),
}
"""Name -> the variables of a job of several processes, and those that make it one of one."""


@pytest.mark.parametrize("name", CLUSTERS)
def test_a_cluster_is_found_and_a_job_of_one_process_stays_by_itself(name, monkeypatch):
    monkeypatch.delenv("TPU_WORKER_HOSTNAMES", raising=False)  # which the tests set
    monkeypatch.setattr(cloud_tpu_cluster, "running_in_cloud_tpu_vm", "GKE" in name)
    monkeypatch.setattr(cloud_tpu_cluster, "get_tpu_env_value_from_metadata", lambda key: None)
    assert runtime.several_processes({}) is None
    several, single = CLUSTERS[name]
    for variable, value in several.items():
        monkeypatch.setenv(variable, value)
    assert runtime.several_processes({}) == {}
    ours: dict[str, str] = dict(zip(runtime.PROCESS_VARIABLES, ("a:1", "3", "2"), strict=True))
    assert runtime.several_processes(ours) != {}, "what is said by hand comes first"
    for variable, value in single.items():
        monkeypatch.setenv(variable, value)
    assert runtime.several_processes({}) is None


@pytest.mark.parametrize("hosts", [1, 4])
def test_a_pod_of_cloud_tpu_vms_is_found_by_what_its_metadata_says(hosts, monkeypatch):
    endpoints = ",".join(f"worker-{host}" for host in range(hosts))
    metadata = {"agent-worker-number": "0", "worker-network-endpoints": endpoints, "tpu-env": ""}
    for variable in ("TPU_WORKER_HOSTNAMES", "TPU_SKIP_MDS_QUERY"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setattr(cloud_tpu_cluster, "running_in_cloud_tpu_vm", True)
    monkeypatch.setattr(cloud_tpu_cluster, "get_metadata", lambda key: (metadata[key], 200))
    assert runtime.several_processes({}) == (None if hosts == 1 else {})


def test_a_cluster_that_does_not_say_how_many_it_has_is_refused(monkeypatch):
    def count():  # as Open MPI 5 does, from JAX 0.12 on
        raise RuntimeError("Open MPI 5 or newer requires mpi4py for distributed initialization.")

    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "10.0.0.1")
    monkeypatch.setenv("JOB_COMPLETION_INDEX", "1")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(K8sCluster, "is_env_present", lambda: True)
    monkeypatch.setattr(K8sCluster, "get_process_count", count)
    message = r"\(RuntimeError: .* mpi4py .*\): mend its variables, or say it by --coordinator"
    with pytest.raises(InputError, match=message):
        runtime.several_processes({})


def test_a_pod_of_kubernetes_is_one_of_several_only_in_an_indexed_job(monkeypatch):
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "10.0.0.1")
    assert runtime.several_processes({}) is None
    monkeypatch.setenv("JOB_COMPLETION_INDEX", "1")
    if importlib.util.find_spec("kubernetes") is None:
        with pytest.raises(InputError, match="pip install kubernetes; or say it by --coordinator"):
            runtime.several_processes({})
    monkeypatch.setitem(sys.modules, "kubernetes", None)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(K8sCluster, "is_env_present", lambda: True)
    for count in (3, 1):
        monkeypatch.setattr(K8sCluster, "get_process_count", lambda count=count: count)
        assert runtime.several_processes({}) == ({} if count > 1 else None)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"JAX_PROCESS_ID": ""},
            "JAX_NUM_PROCESSES is set but JAX_PROCESS_ID is not: set all three",
        ),
        ({"JAX_PROCESS_ID": "2"}, "JAX_PROCESS_ID = 2: expected whole numbers, the second from 0"),
        ({"JAX_NUM_PROCESSES": "two"}, "JAX_NUM_PROCESSES = two"),
        ({"JAX_COORDINATOR_ADDRESS": "a"}, "JAX_COORDINATOR_ADDRESS = a: expected HOST:PORT"),
    ],
)
def test_half_an_environment_of_several_processes_is_refused(change, message):
    ours = {"JAX_COORDINATOR_ADDRESS": "a:1", "JAX_NUM_PROCESSES": "2", "JAX_PROCESS_ID": "1"}
    with pytest.raises(InputError, match=message):
        runtime.several_processes(ours | change)


def test_a_users_mistake_is_one_message_and_a_crash_a_traceback(capsys):
    def mistake():
        raise InputError("rollout.group_size = 0: expected 1 or more")

    def forbidden():
        raise PermissionError(errno.EACCES, "Permission denied", "rows.jsonl")

    def crash():
        return 1 // 0

    assert runtime.guard(mistake) == 2
    assert capsys.readouterr().err == "error: rollout.group_size = 0: expected 1 or more\n"
    assert runtime.guard(forbidden) == 2
    message = "error: rows.jsonl: Permission denied: give this user the permission\n"
    assert capsys.readouterr().err == message
    assert runtime.guard(crash) == 1
    assert "ZeroDivisionError" in capsys.readouterr().err
    assert runtime.guard(lambda: None) == 0
    assert {0, 1, 2} < runtime.EXIT_CODES.keys()


def test_within_a_run_a_pipe_that_is_read_no_more_is_an_error_and_ends_no_process():
    before = signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # as own code has it that is loaded
    try:
        with runtime.stop_signals():
            reader, writer = os.pipe()
            os.close(reader)
            with pytest.raises(BrokenPipeError):
                os.write(writer, b"x")
            os.close(writer)
        assert signal.getsignal(signal.SIGPIPE) == signal.SIG_DFL
    finally:
        signal.signal(signal.SIGPIPE, before)


CLOSES = """
import os, sys
from jaxgrpo.data.limits import restoring_process
from jaxgrpo.training.processes import parent

sys.stdout.close()
sys.stderr.close()
with parent.reaching_output(1):
    print("printed", flush=True)
parent.write_error("told\\n")
os.closerange(1, 3)
with parent.reaching_output(1):
    print("nowhere", flush=True)
parent.write_error("nowhere\\n")
with open(os.devnull) as file:
    assert file.fileno() > 2
with restoring_process():
    os.closerange(0, 3)
with open(os.devnull) as file:
    assert file.fileno() > 2
"""


@pytest.mark.fault(17)
def test_standard_files_that_a_reward_has_closed_are_opened_again():
    run = subprocess.run([sys.executable, "-c", CLOSES], capture_output=True, text=True, check=True)
    assert (run.stdout, run.stderr) == ("printed\n", "told\n")


@pytest.mark.fault(14)
@pytest.mark.parametrize("chain", ["from interruption", ""], ids=["cause", "context"])
def test_ctrl_c_that_a_library_makes_another_exception_of_is_an_interruption(capsys, chain):
    """As Orbax does while it reads a checkpoint."""
    program = f"""
try:
    try:
        raise KeyboardInterrupt
    except KeyboardInterrupt as interruption:
        raise ValueError("an array could not be read") {chain}
except ValueError as error:
    raise RuntimeError("nor the tree") from error
"""
    assert runtime.guard(lambda: exec(program)) == 130
    assert capsys.readouterr().err == "interrupted\n"


def test_a_command_that_exits_by_itself_has_crashed(capsys):
    def leave():
        raise SystemExit(0)  # as code that a config names may do

    assert runtime.guard(leave) == 1
    assert "SystemExit" in capsys.readouterr().err


@pytest.mark.fault(14)
@pytest.mark.parametrize("number", runtime.STOP_SIGNALS)
def test_a_signal_stops_the_loop_after_its_step(begin, number):
    process = begin()
    first_line(process)
    process.send_signal(number)
    code, errors = end(process)
    assert code == 128 + number
    assert code in runtime.EXIT_CODES
    assert "stopping after this step" in errors
    assert errors.endswith("\n")
    assert "saved at" in errors


def test_what_stopped_one_run_does_not_stop_a_later_one_of_another_thread():
    with concurrent.futures.ThreadPoolExecutor(1) as pool:

        def asked_in_thread() -> bool:
            return pool.submit(runtime.stop_requested, 1).result()

        with runtime.stop_signals():
            signal.raise_signal(signal.SIGTERM)
            assert asked_in_thread()
        assert runtime.stop_requested(1)  # the exit code and a comparison still know it
        assert not asked_in_thread()


def test_under_nohup_a_closed_terminal_stops_nothing():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with runtime.stop_signals():
            assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
            os.kill(os.getpid(), signal.SIGHUP)
            assert not runtime.stop_requested(1)
    finally:
        signal.signal(signal.SIGHUP, before)


def test_a_closed_terminal_does_not_end_the_run_in_an_error():
    reader, terminal = os.openpty()
    script = (
        "import os, signal, time\n"
        "from jaxgrpo.training.processes import process\n"
        "with process.stop_signals():\n"
        "    print('ready', flush=True)\n"
        "    while process._Stop.number is None: time.sleep(0.05)\n"
        "    print('saved', flush=True)\n"
    )
    child = subprocess.Popen([sys.executable, "-c", script], stdout=terminal, stderr=terminal)
    os.close(terminal)
    assert b"ready" in os.read(reader, 100)
    os.close(reader)  # from now on what is written to it raises EIO
    child.send_signal(signal.SIGHUP)
    assert child.wait(30) == 0


def test_a_second_ctrl_c_at_a_prompt_of_python_raises_and_the_process_lives_on(monkeypatch):
    monkeypatch.setattr(sys, "ps1", "In : ", raising=False)
    before = signal.getsignal(signal.SIGINT)
    with runtime.stop_signals():
        signal.raise_signal(signal.SIGINT)
        assert runtime.stop_requested(1)
        time.sleep(0.3)  # signals of one kind that come together count once
        with pytest.raises(KeyboardInterrupt, match="what was saved"):
            signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is before


@pytest.mark.fault(14)
def test_a_second_ctrl_c_ends_at_once(begin):
    process = begin("deaf")
    first_line(process)
    time.sleep(0.3)  # signals of one kind that come together count once
    process.send_signal(signal.SIGINT)
    time.sleep(0.3)
    assert process.poll() is None
    process.send_signal(signal.SIGINT)
    code, errors = end(process)
    assert code == 128 + signal.SIGINT
    assert "ended at once" in errors


@pytest.mark.fault(14)
@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_to_one_process_stops_all_at_the_same_step(begin, number):
    processes = two(begin)
    assert all("2 cpu devices (cpu) in 2 processes" in first_line(process) for process in processes)
    processes[1].send_signal(number)
    ends = [end(process) for process in processes]
    assert [code for code, _ in ends] == [143, 128 + number]
    saved = [line for _, errors in ends for line in errors.splitlines() if "saved at" in line]
    assert len(saved) == 2
    assert saved[0] == saved[1]


@pytest.mark.fault(16)
@pytest.mark.slow
def test_an_exception_in_one_process_ends_all_soon_with_its_traceback(begin):
    processes = two(begin, "fail")
    for process in processes:
        first_line(process)
    began = time.monotonic()
    ends = [end(process) for process in reversed(processes)]
    for code, errors in ends:
        assert code == 1
        assert "RuntimeError: step 5 went wrong" in errors
    assert time.monotonic() - began < 20
