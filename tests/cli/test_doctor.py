"""`jaxgrpo doctor`: lines for a bug report, the same as JSON, and its exit code."""

from __future__ import annotations

import importlib.metadata
import json
import subprocess

import jax
import pytest

import jaxgrpo
from jaxgrpo.cli import doctor
from jaxgrpo.cli.main import main
from jaxgrpo.core.errors import InputError
from jaxgrpo.training.processes import process

METADATA = {
    "jaxgrpo": [
        "numpy>=2.0",
        "wandb>=0.19; extra == 'wandb'",
        "jax[cuda12]>=0.10; extra == 'cuda12'",
        "absent>=1; extra == 'elsewhere' and sys_platform == 'none'",
        "jax[tpu]; (sys_platform != 'none') and extra == 'plan'",
    ],
    "jax": [
        "jax-cuda12-plugin[with-cuda]<=0.10.2,>=0.10.2; extra == 'cuda12'",
        "libtpu==0.0.42.*; extra == 'tpu'",
    ],
    "jax-cuda12-plugin": ["nvidia-cublas-cu12>=12.1; extra == 'with-cuda'"],
}
INSTALLED = {
    "numpy": "2.4",
    "jax": "0.10.2",
    "jax-cuda12-plugin": "0.10.2",
    "libtpu": "0.0.41",
    "jaxgrpo": "0.1",
}


@pytest.mark.full
@pytest.mark.parametrize(
    ("variables", "message"),
    [
        (
            {"JAX_PLATFORMS": "cuda"},
            "JAX_PLATFORMS = cuda: JAX cannot use them (there are none)",
        ),
        ({"JAX_PLATFORMS": "cup"}, "JAX_PLATFORMS = cup: JAX cannot use them (Unable to initial"),
        (
            {"JAX_NUM_CPU_DEVICES": "two"},
            '(Invalid value "two" for JAX flag jax_num_cpu',
        ),
    ],
)
def test_variables_that_jax_cannot_follow_are_named(variables, message, python, environment):
    """Also by commands that ask for no devices at their start."""
    for command in ("doctor", "losses"):
        words = [python, "-m", "jaxgrpo", command, *["clip"] * (command == "losses")]
        run = subprocess.run(words, env=environment(**variables), capture_output=True, text=True)
        assert run.returncode == 2
        assert message in run.stdout + run.stderr
        assert "Traceback" not in run.stderr
    if command == "doctor" and "JAX_PLATFORMS" in variables:
        assert "devices: none" in run.stdout


def test_a_few_lines_say_versions_devices_memory_and_disk(capsys, repository):
    assert main(["doctor"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) <= 11
    starts = ("jaxgrpo ", "python ", "jax ", "numpy ", "devices: ", "memory: ", "disk: ")
    always = [line for line in lines if not line.startswith("plugins: ")]
    for line, start in zip(always, (*starts, "compile cache: "), strict=False):
        assert line.startswith(start)
    shown = "\n".join(lines)
    commit = "not known"
    if (repository / ".git").exists():  # not in a source distribution
        command = ["git", "-C", repository, "rev-parse", "--short", "HEAD"]
        commit = subprocess.run(command, capture_output=True, text=True).stdout.strip()
    assert lines[0].startswith(f"jaxgrpo {jaxgrpo.__version__}, commit {commit}")
    for name in ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "transformers", "datasets"):
        assert f"{name} {importlib.metadata.version(name)}" in shown
    assert "devices: 4 cpu devices (cpu) in 1 process, " in shown
    assert " unused" in shown
    assert "GiB free in " in shown


def test_the_lines_fit_a_terminal(monkeypatch):
    monkeypatch.setattr(doctor.platform, "platform", lambda: "Linux-6.8-x86_64-with-glibc2.39")
    monkeypatch.setattr(doctor, "_disk", lambda folder: {"folder": "/home/a", "free": 2**35})
    monkeypatch.setattr(doctor, "_cache", lambda: {"folder": "/c", "bytes": 2**29, "used": False})
    machine = doctor.examine()
    plugins = dict.fromkeys(doctor.DEVICE_PACKAGES, "0.10.2")
    lines = [*doctor.lines(machine | {"packages": machine["packages"] | plugins})]
    assert max(map(len, lines)) <= 80
    assert "plugins: libtpu 0.10.2, jax-cuda12-plugin 0.10.2, jax-cuda13-plugin 0.10.2" in lines
    assert "disk: 32.0 GiB free in /home/a" in lines
    assert "compile cache: /c, 512.0 MiB, not used here" in lines


def test_the_document_holds_what_the_lines_show(capsys, tmp_path, monkeypatch):
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", str(tmp_path / "cache"))
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache" / "program").write_bytes(b"x" * 1000)
    monkeypatch.setattr(process, "start", lambda platform: "")
    assert main(["doctor", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["jaxgrpo"] == jaxgrpo.__version__
    assert document["packages"]["jax"] == jax.__version__
    assert document["packages"]["safetensors"] == importlib.metadata.version("safetensors")
    assert document["devices"] == "4 cpu devices (cpu) in 1 process"
    assert document["problem"] is None
    assert document["memory"]["total"] > document["memory"]["unused"] > 0
    assert document["disk"]["free"] > 0
    cache = document["compile_cache"]
    assert (cache["folder"], cache["bytes"]) == (str(tmp_path / "cache"), 1000)
    assert document["extras"]["math"] == document["extras"]["wandb"] == [], "the tests need them"


def test_devices_that_jax_cannot_use_end_with_2(capsys, monkeypatch):
    def refuse(platform):
        raise InputError("/dev/nvidia0 is there, but this JAX has only the CPU")

    monkeypatch.setattr(process, "start", refuse)
    assert main(["doctor"]) == 2
    lines = capsys.readouterr().out.splitlines()
    assert "problem: /dev/nvidia0 is there, but this JAX has only the CPU" in lines
    assert len(lines) <= 11
    assert main(["doctor", "--json"]) == 2
    document = json.loads(capsys.readouterr().out)
    assert document["problem"].startswith("/dev/nvidia0 is there")


def test_memory_of_devices_is_shown_where_they_say_it():
    devices = [{"total": 80 * 2**30, "used": 2**30}, {"total": 80 * 2**30, "used": 0}]
    words = doctor._memory_words({"total": 2**37, "unused": 2**36}, devices)
    assert words == "128.0 GiB, 64.0 GiB unused; each device 80.0 GiB, 1.0 GiB in use"
    assert doctor._memory_words(None, []) == "not known"


@pytest.fixture
def metadata(monkeypatch):
    def version(name: str) -> str:
        if name not in INSTALLED:
            raise importlib.metadata.PackageNotFoundError(name)
        return INSTALLED[name]

    monkeypatch.setattr(importlib.metadata, "version", version)
    monkeypatch.setattr(importlib.metadata, "requires", METADATA.get)


@pytest.mark.parametrize(
    ("extra", "missing"),
    [
        ("wandb", ["wandb"]),
        ("cuda12", ["nvidia-cublas-cu12"]),  # of the package that jax[cuda12] asks for
        ("plan", ["libtpu 0.0.41, not ==0.0.42.*"]),
        ("elsewhere", []),  # of another system
    ],
)
def test_what_an_extra_lacks_is_read_from_the_metadata(metadata, extra, missing):
    assert [*doctor.find_missing("jaxgrpo", extra)] == missing


def test_the_extras_are_those_of_the_package():
    extras = doctor._extras()
    assert extras is not None
    assert {"cuda12", "tpu", "plan", "math", "wandb", "gcs", "s3"} <= extras.keys()
    listed = importlib.metadata.metadata("jaxgrpo").get_all("Provides-Extra")
    assert [*extras] == listed


def test_a_line_names_what_is_missing_as_far_as_it_has_room():
    def line(**extras):
        return "".join(doctor._extras_line(extras))

    assert line(math=[], s3=[]) == ""
    assert line(math=[], s3=["s3fs"]) == "extras without: s3 (s3fs); pip install 'jaxgrpo[s3]'"
    both_extras = "extras without: plan (libtpu), s3 (s3fs); pip install 'jaxgrpo[NAME]'"
    assert line(plan=["libtpu"], s3=["s3fs"]) == both_extras
    many = {f"extra{i}": ["a-package"] for i in range(4)}
    expected = "extras without: extra0, extra1, extra2, extra3; pip install 'jaxgrpo[NAME]'"
    assert line(**many) == expected
    (text,) = doctor._extras_line(None)
    assert "jaxgrpo is not installed" in text


@pytest.mark.full
@pytest.mark.slow
@pytest.mark.parametrize("name", ["flax", "transformers", "datasets"])
def test_it_works_where_a_package_of_the_trainer_is_missing(python, environment, name):
    program = (
        f"import sys; sys.modules[{name!r}] = None;"
        "from jaxgrpo.cli.main import main; sys.exit(main(['doctor']))"
    )
    doctor_run = subprocess.run(
        [python, "-c", program], env=environment(), capture_output=True, text=True
    )
    assert doctor_run.returncode == 0, doctor_run.stderr
    assert doctor_run.stdout.startswith("jaxgrpo ")
