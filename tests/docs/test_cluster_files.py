"""The examples of clusters: each is parsed, and jaxgrpo reads the command that it starts.

The batch script runs here as well, with other programs for SLURM's. Each checker finds a fault that
is planted.
"""

from __future__ import annotations

import math
import os
import re
import shlex
import subprocess
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import yaml_files
from jax._src.clusters import ClusterEnv
from packaging.specifiers import SpecifierSet

from jaxgrpo.cli import main
from jaxgrpo.config.files import Config, load
from jaxgrpo.training.processes import process

REPOSITORY = Path(__file__).resolve().parent.parent.parent
CLUSTER = REPOSITORY / "examples" / "cluster"
MARGIN = 60  # seconds that a process has to end in, after run.stop_grace


class Launch(NamedTuple):
    """What one process of a run is told."""

    config: Config
    resume: str | None
    join: dict[str, str]  # PROCESS_VARIABLES, without those that are not given


def launch(words: list[str]) -> Launch:
    """Reads a command as jaxgrpo does. Raises: SystemExit for what it refuses."""
    arguments = vars(main._parser().parse_args(words))
    assert arguments["calls"] == main.COMMANDS["train"][1]
    join = {
        variable: arguments[flag.strip("-").replace("-", "_")]
        for flag, (variable, *_) in main.JOIN.items()
        if flag.strip("-").replace("-", "_") in arguments
    }
    return Launch(load(arguments["config"], arguments["overrides"]), arguments.get("resume"), join)


def mesh_devices(config: Config) -> int:
    """How many devices the mesh takes; `data = 0` is one here."""
    mesh = config.mesh
    return math.prod(max(size, 1) for size in (mesh.data, mesh.fsdp, mesh.tensor, mesh.context))


def test_a_command_that_jaxgrpo_does_not_know_is_found(capsys):
    for words in (["train", "quickstart", "--resumes", "auto"], ["trains", "quickstart"]):
        with pytest.raises(SystemExit):
            launch(words)
    assert "unrecognized arguments: --resumes" in capsys.readouterr().err


# SLURM

SCRIPT = CLUSTER / "slurm.sbatch"
SBATCH = {
    "job-name": r"[\w-]+",
    "nodes": r"\d+",
    "ntasks-per-node": r"\d+",
    "gpus-per-node": r"\d+",
    "exclusive": "",
    "time": r"\d+(-\d+)?(:\d\d){2}",
    "signal": r"(B:)?(TERM|USR1)@\d+",
    "requeue": "",
    "output": r"[\w%.-]+",
    "open-mode": "append|truncate",
}
"""Options of sbatch that the example may have, and what their values look like."""


def sbatch_options(text: str) -> dict[str, str]:
    """The options of a batch script. Raises: ValueError for what sbatch does not take."""
    if not text.startswith("#!/"):
        raise ValueError("sbatch needs a first line such as #!/bin/bash")
    lines = text.splitlines()
    commands = [number for number, line in enumerate(lines) if line and not line.startswith("#")]
    options = {}
    for number, line in enumerate(lines):
        if not line.startswith("#SBATCH"):
            continue
        if number > commands[0]:
            raise ValueError(f"after the first command, where sbatch does not look: {line}")
        for word in line.split()[1:]:
            name, _, value = word.removeprefix("--").partition("=")
            if not word.startswith("--") or name not in SBATCH or name in options:
                raise ValueError(f"no option of sbatch, or twice: {word}")
            if not re.fullmatch(SBATCH[name], value):
                raise ValueError(f"no value of --{name}: {value!r}")
            options[name] = value
    return options


@pytest.mark.parametrize(
    ("line", "faulty"),
    [
        ("#SBATCH --requeue", "#SBATCH --re-queue"),
        ("#SBATCH --requeue", "#SBATCH --requeue --requeue"),
        ("#SBATCH --requeue", "#SBATCH requeue"),
        ("#SBATCH --nodes=2", "#SBATCH --nodes=two"),
        ("#SBATCH --signal=TERM@360", "#SBATCH --signal=SIGTERM"),
        ("#!/bin/bash", "# a comment"),
        ("#SBATCH --job-name", "true\n#SBATCH --job-name"),
    ],
)
def test_a_fault_of_a_batch_script_is_found(line, faulty):
    text = SCRIPT.read_text()
    assert line in text
    with pytest.raises(ValueError, match=r"sbatch|no value"):
        sbatch_options(text.replace(line, faulty, 1))


PROGRAMS = {
    "srun": """
while [[ $1 == --* ]]; do shift; done
code=0
for task in 0 1; do SLURM_PROCID=$task SLURM_NTASKS=2 "$@" || code=$?; done
exit $code
""",
    "jaxgrpo": """
printf '%s\\n' "$JAX_LOCAL_DEVICE_IDS" "$@" > "$RECORD/process-$SLURM_PROCID"
exit $EXIT_CODE
""",
    "scontrol": """
case "$1" in
  show) printf '%s\\n' gpu-07 gpu-08 ;;
  requeue) echo "$2" > "$RECORD/requeued" ;;
esac
""",
    "squeue": """
echo $STATE
""",
}
"""In place of SLURM's and of jaxgrpo: what they are told is written into $RECORD."""


class Job(NamedTuple):
    code: int
    processes: list[list[str]]  # of each: JAX_LOCAL_DEVICE_IDS and its arguments
    requeued: bool
    errors: str


@pytest.fixture
def run_script(tmp_path):
    def run(code: int = 0, state: str = "RUNNING", **more: str) -> Job:
        for name, body in PROGRAMS.items():
            (tmp_path / name).write_text(f"#!/bin/bash{body}")
            (tmp_path / name).chmod(0o755)
        slurm = {
            "SLURM_JOB_ID": "123456",
            "SLURM_JOB_NODELIST": "gpu-[07-08]",
            "SLURM_SUBMIT_DIR": "/shared",
            "SLURM_GPUS_ON_NODE": sbatch_options(SCRIPT.read_text())["gpus-per-node"],
        }
        test = {"RECORD": str(tmp_path), "EXIT_CODE": str(code), "STATE": state}
        path = os.pathsep.join([str(tmp_path), os.environ["PATH"]])
        variables = {**os.environ, "PATH": path, **slurm, **test, **more}
        result = subprocess.run(["bash", SCRIPT], env=variables, capture_output=True, text=True)
        records = sorted(tmp_path.glob("process-*"))
        processes = [record.read_text().splitlines() for record in records]
        requeued = (tmp_path / "requeued").exists()
        return Job(result.returncode, processes, requeued, result.stderr)

    return run


def test_the_batch_script_starts_one_process_per_host_with_all_its_gpus(run_script):
    job = run_script()
    assert (job.code, job.errors, job.requeued) == (0, "", False)
    options = sbatch_options(SCRIPT.read_text())
    hosts, gpus = int(options["nodes"]), int(options["gpus-per-node"])
    assert options["ntasks-per-node"] == "1"
    assert len(job.processes) == hosts
    for index, (ids, *words) in enumerate(job.processes):
        config, resume, join = launch(words)
        assert process.several_processes(join) == {
            "coordinator_address": "gpu-07:23456",
            "num_processes": hosts,
            "process_id": index,
        }
        assert ids == ",".join(map(str, range(gpus)))
        assert mesh_devices(config) == hosts * gpus
        assert resume == "auto"
        assert config.run.dir == "/shared/runs/qwen3_8b"


def test_the_run_folder_of_the_batch_script_may_have_spaces(run_script):
    _, *words = run_script(RUN_DIR="/shared/my runs/first").processes[0]
    assert launch(words).config.run.dir == "/shared/my runs/first"


def test_the_batch_script_warns_a_run_in_time():
    options = sbatch_options(SCRIPT.read_text())
    seconds = int(options["signal"].removeprefix("TERM@"))
    assert seconds >= load("qwen3_8b_h100").run.stop_grace + MARGIN
    assert {"requeue", "exclusive"} <= options.keys()
    assert options["open-mode"] == "append"  # a job that is requeued goes on in its log


@pytest.mark.parametrize(
    ("code", "state", "restarts", "requeued"),
    [
        (143, "RUNNING", "0", True),
        (6, "RUNNING", "3", True),
        (143, "RUNNING", "20", False),
        (143, "CANCELLED", "0", False),
        (2, "RUNNING", "0", False),
        (0, "RUNNING", "0", False),
    ],
)
def test_a_job_goes_back_into_the_queue_only_if_the_run_can_go_on(
    run_script, code, state, restarts, requeued
):
    job = run_script(code, state, SLURM_RESTART_COUNT=restarts)
    assert (job.code, job.requeued) == (code, requeued)


def test_a_batch_script_without_gpus_starts_nothing(run_script):
    job = run_script(SLURM_GPUS_ON_NODE="none")
    assert job.code != 0
    assert job.processes == []


def test_jax_takes_one_gpu_of_a_slurm_host_unless_a_variable_names_more(monkeypatch):
    """Also where coordinator and processes are given: why the script sets JAX_LOCAL_DEVICE_IDS."""
    job = {"JOB_ID": "1", "STEP_NODELIST": "n[1-2]", "NTASKS": "2", "PROCID": "1", "LOCALID": "0"}
    for name, value in job.items():
        monkeypatch.setenv(f"SLURM_{name}", value)
    detect = ClusterEnv.auto_detect_unset_distributed_params
    *_, device_ids = detect("n1:1", 2, 1, None, None, None)
    assert device_ids == [0]


# Kubernetes

SELECTORS = {
    "cloud.google.com/gke-tpu-accelerator": "google.com/tpu",
    "cloud.google.com/gke-accelerator": "nvidia.com/gpu",
}
"""Label of the nodes -> the resource that they have."""
CHIPS = {
    "tpu-v5-lite-podslice": "v5e",
    "tpu-v5p-slice": "v5p",
    "tpu-v6e-slice": "v6e",
    "nvidia-h100-80gb": "h100",
}
"""Value of such a label -> the chip, by its name in a plan's topology."""
COMPLETION_INDEX = "metadata.annotations['batch.kubernetes.io/job-completion-index']"


class Slice(NamedTuple):
    """What a JobSet of one job asks for."""

    name: str
    job: Any
    pod: Any
    container: Any

    @property
    def hosts(self) -> int:
        return self.job["spec"]["parallelism"]

    @property
    def devices_per_host(self) -> int:
        (number,) = self.container["resources"]["limits"].values()
        return number

    @property
    def environment(self) -> dict[str, Any]:
        return {entry["name"]: entry for entry in self.container.get("env", [])}

    def words(self) -> list[str]:
        """The arguments of jaxgrpo, with the variables that Kubernetes puts in, in pod 1."""
        index = self.environment.get("PROCESS_ID", {}).get("valueFrom", {})
        value = "1" if index == {"fieldRef": {"fieldPath": COMPLETION_INDEX}} else ""
        return [word.replace("$(PROCESS_ID)", value) for word in self.container["args"]]


def tpu_slice(document: Any) -> Slice:
    (job,) = document["spec"]["replicatedJobs"]
    pod = job["template"]["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    name = f"{document['metadata']['name']}-{job['name']}"
    return Slice(name, job["template"], pod, container)


def jobset_problems(document: Any) -> list[str]:
    problems = []
    if (document.get("apiVersion"), document.get("kind")) != ("jobset.x-k8s.io/v1alpha2", "JobSet"):
        problems.append("no JobSet of v1alpha2")
    part = tpu_slice(document)
    if not re.fullmatch(r"[a-z]([a-z0-9-]{0,40}[a-z0-9])?", part.name):
        problems.append(f"no name: {part.name}")
    if document["spec"].get("failurePolicy", {}).get("maxRestarts", 0) < 1:
        problems.append("never restarted")
    return [*problems, *job_problems(part), *pod_problems(part), *command_problems(part)]


def job_problems(part: Slice) -> Iterator[str]:
    job = part.job["spec"]
    if job.get("completionMode") != "Indexed" or job["parallelism"] != job.get("completions"):
        yield "every pod has an index, and all run at once"
    if job.get("backoffLimit") != 0:
        yield "one pod that ends must end all: backoffLimit 0"
    for rule in job["podFailurePolicy"]["rules"]:
        codes = rule["onExitCodes"]
        if codes.get("containerName") != part.container["name"]:
            yield f"a rule for {codes.get('containerName')}, which is no container"
        if not set(codes["values"]) <= process.EXIT_CODES.keys() - {0, 6, 143}:
            yield f"exit codes {codes['values']}"


def pod_problems(part: Slice) -> Iterator[str]:
    pod, container = part.pod, part.container
    if pod.get("restartPolicy") != "Never":
        yield "restartPolicy: the JobSet restarts"
    labels = [label for label in SELECTORS if label in pod.get("nodeSelector", {})]
    if len(labels) != 1 or pod["nodeSelector"][labels[0]] not in CHIPS:
        yield f"nodeSelector {pod.get('nodeSelector')}"
    resources = container.get("resources", {})
    if resources.get("limits") != resources.get("requests"):
        yield "requests are not the limits"
    if [SELECTORS[label] for label in labels] != [*resources.get("limits", {})]:
        yield f"limits {resources.get('limits')}"
    mounts = {mount["name"] for mount in container.get("volumeMounts", [])}
    if mounts != {volume["name"] for volume in pod.get("volumes", [])}:
        yield "a volume that is not mounted, or the other way round"
    if "command" in container or not container.get("image"):
        yield "the image's own entry point is jaxgrpo"


def command_problems(part: Slice) -> Iterator[str]:
    try:
        config, resume, join = launch(part.words())
    except SystemExit:
        yield f"no command of jaxgrpo: {part.words()}"
        return
    grace = part.pod.get("terminationGracePeriodSeconds", 30)
    if grace < config.run.stop_grace + MARGIN:
        yield f"{grace} s to end in"
    if resume != "auto" or not config.run.dir.startswith("gs:"):
        yield "a restart must find the run, in a bucket"
    devices = part.hosts * part.devices_per_host
    if mesh_devices(config) != devices:
        yield f"a mesh of {mesh_devices(config)} devices on {devices}"
    selector = part.pod["nodeSelector"]
    chip = next((CHIPS[value] for value in selector.values() if value in CHIPS), None)
    planned, _, sizes = str(config.plan.topology).partition(":")
    if chip != planned:
        yield f"{chip}, but the config is for {planned}"
    if "google.com/tpu" in part.container["resources"]["limits"]:
        topology = selector.get("cloud.google.com/gke-tpu-topology", "")
        if topology != sizes or math.prod(map(int, topology.split("x"))) != devices:
            yield f"topology {topology}: not {devices} chips, or not the config's {sizes}"
        if join:
            yield "GKE says which process it is"
    else:
        yield from joining_problems(part, join)


def joining_problems(part: Slice, join: dict[str, str]) -> Iterator[str]:
    name = part.name.rpartition("-")[0]
    expected = {
        "JAX_COORDINATOR_ADDRESS": f"{part.name}-0-0.{name}:8476",
        "JAX_NUM_PROCESSES": str(part.hosts),
        "JAX_PROCESS_ID": "1",
    }
    if join != expected:
        yield f"processes {join}, not {expected}"
    ids = part.environment.get("JAX_LOCAL_DEVICE_IDS", {}).get("value")
    if ids != ",".join(map(str, range(part.devices_per_host))):
        yield f"GPUs {ids} of a host"


JOBSETS = ("jobset_tpu", "jobset_gpu")


@pytest.mark.parametrize("name", JOBSETS)
def test_a_jobset_asks_for_the_devices_of_its_config(name):
    assert jobset_problems(yaml_files.read(CLUSTER / f"{name}.yaml")) == []


def test_a_tpu_machine_gets_a_python_that_is_new_enough_and_commands_that_are_read():
    page = (REPOSITORY / "docs" / "scaling.md").read_text().replace("\\\n", " ")
    make, install, *runs = re.findall(r'--worker=all +--command="([^"]+)"', page)
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    (version,) = re.findall(r"uv venv --python (\S+) ~/jaxgrpo$", make)
    assert version in SpecifierSet(project["requires-python"])
    (extras,) = re.findall(r"uv pip install --python ~/jaxgrpo 'jaxgrpo\[([a-z,]+)\] @", install)
    assert {*extras.split(",")} <= project["optional-dependencies"].keys()
    for words in map(shlex.split, runs):
        assert words[0] == "~/jaxgrpo/bin/jaxgrpo"
        main._parser().parse_args(words[1:])
    assert launch(shlex.split(runs[-1])[1:]).resume == "auto"


def test_every_file_of_the_folder_is_tested():
    expected = {SCRIPT.name, *(f"{name}.yaml" for name in JOBSETS)}
    assert {file.name for file in CLUSTER.iterdir()} == expected


JOB = ("spec", "replicatedJobs", 0, "template", "spec")
POD = (*JOB, "template", "spec")
CONTAINER = (*POD, "containers", 0)
TPU = "cloud.google.com/gke-tpu-"


@pytest.mark.parametrize(
    ("name", "path", "value", "problem"),
    [
        ("tpu", ("apiVersion",), "batch/v1", "no JobSet"),
        ("tpu", ("metadata", "name"), "GRPO", "no name: GRPO-slice"),
        ("tpu", ("spec", "failurePolicy"), {}, "never restarted"),
        ("tpu", (*JOB, "completions"), 3, "all run at once"),
        ("tpu", (*JOB, "completionMode"), None, "every pod has an index"),
        ("tpu", (*JOB, "backoffLimit"), None, "backoffLimit 0"),
        ("tpu", (*JOB, "parallelism"), 2, "a mesh of 16 devices on 8"),
        ("tpu", (*CONTAINER, "name"), "main", "a rule for jaxgrpo, which is no container"),
        ("tpu", (*POD, "restartPolicy"), "OnFailure", "the JobSet restarts"),
        ("tpu", (*POD, "terminationGracePeriodSeconds"), None, "30 s to end in"),
        ("tpu", (*POD, "nodeSelector", f"{TPU}topology"), "2x4", "topology 2x4: not 16 chips"),
        ("tpu", (*POD, "nodeSelector", f"{TPU}accelerator"), "tpu-v5p-slice", "v5p, but the"),
        ("tpu", (*POD, "nodeSelector", f"{TPU}accelerator"), "tpu-v6", "nodeSelector"),
        ("tpu", (*CONTAINER, "resources", "requests"), {}, "requests are not the limits"),
        ("tpu", (*CONTAINER, "resources", "limits"), {"nvidia.com/gpu": 4}, "limits {'nvidia"),
        ("tpu", (*CONTAINER, "command"), ["bash"], "entry point"),
        ("tpu", (*CONTAINER, "args", 2), "--resumes", "no command of jaxgrpo"),
        ("tpu", (*CONTAINER, "args", 5), "run.dir=runs/first", "in a bucket"),
        ("gpu", (*CONTAINER, "volumeMounts"), [], "a volume that is not mounted"),
        ("gpu", (*CONTAINER, "args", 5), "grpo-gpu-0:8476", "processes {"),
        ("gpu", (*CONTAINER, "args", 7), "4", "processes {"),
        ("gpu", (*CONTAINER, "env", 0, "valueFrom"), {}, "processes {"),
        ("gpu", (*CONTAINER, "env", 1, "value"), "0", "GPUs 0 of a host"),
        ("gpu", (*JOB, "podFailurePolicy", "rules", 0, "onExitCodes", "values"), [6], "codes [6]"),
    ],
)
def test_a_fault_of_a_jobset_is_found(name, path, value, problem):
    document = yaml_files.read(CLUSTER / f"jobset_{name}.yaml")
    problems = jobset_problems(yaml_files.changed(document, path, value))
    assert any(problem in text for text in problems), problems
