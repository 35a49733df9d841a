"""What every stage script shares: read params.yaml, run, and fail in one line."""

from __future__ import annotations

import argparse
import inspect
import os
import shlex
import subprocess
import sys
from collections.abc import Callable

from selfspec.config import Config, load, require_checkpoint
from selfspec.errors import SelfspecError


def run(stage: Callable[[Config], None], *, before_training: bool = False, processes: bool = False) -> None:
    """Run ``stage`` on the validated params.yaml of the current folder.

    Stages ``before_training`` also refuse a head.checkpoint that is not there, which stage 1 would find out only
    after their work. They do not depend on it otherwise: dvc.yaml names the sections that a script itself reads.

    With ``processes``, the options in SELFSPEC_LAUNCH go to `torchrun`, which then starts the stage in several
    processes or on several machines (`accelerate launch` starts no second process on a CPU without MPI). An
    environment variable and not a parameter, so that moving to more of them leaves the lock valid.

    A ``SelfspecError`` (bad parameter, missing resource, …) becomes its message on stderr and exit
    code 2. ``--help`` prints the docstring of the stage's module.
    """
    module = inspect.getmodule(stage)
    name = f"stages.{stage.__code__.co_filename.rsplit('/', 1)[-1].removesuffix('.py')}"
    parser = argparse.ArgumentParser(
        prog=f"python -m {name}",
        description=(module and module.__doc__) or stage.__doc__,
        epilog="Parameters come from params.yaml; `dvc exp run -S section.name=value` overrides one.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.parse_args()
    try:
        config = load()
        if before_training:
            require_checkpoint(config.head)
        launch = os.environ.get("SELFSPEC_LAUNCH") if processes else None
        if launch:
            command = [sys.executable, "-m", "torch.distributed.run", *shlex.split(launch), "--module", name]
            environment = {key: value for key, value in os.environ.items() if key != "SELFSPEC_LAUNCH"}
            raise SystemExit(subprocess.run(command, env=environment).returncode)
        stage(config)
    except SelfspecError as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(2) from None
