"""jaxgrpo as a contender: `jaxgrpo.train` on the files of a workload.

python -m benchmarks.versus.ours FOLDER
"""

from __future__ import annotations

import os
import sys

from benchmarks.versus.work import Teller, Work


def device_bytes() -> int:
    import jax

    return jax.local_devices()[0].memory_stats()["peak_bytes_in_use"]


def main() -> None:
    work = Work.read(sys.argv[1])
    teller = Teller(work, device_bytes)
    # transformers loads torch where it finds it. Nothing here needs it, so it is not to be found.
    sys.modules["torch"] = None  # pyright: ignore[reportArgumentType]
    import jaxgrpo
    from benchmarks.versus.files import run_config

    def on_step(_number: int, metrics: dict[str, float]) -> None:
        names = {"sample": "time/sample", "reward": "time/reward", "score": "time/prepare"}
        teller.stepped({phase: metrics[name] for phase, name in names.items()})

    config = run_config(work, steps=10**6)
    config["run"]["dir"] += f"_{os.getpid()}"
    jaxgrpo.train(config, rewards={"reward": teller.reward}, on_step=on_step)


if __name__ == "__main__":
    main()
