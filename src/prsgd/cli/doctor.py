"""``prsgd doctor``: this machine, and under torchrun the job, looked at before something is trained."""

from __future__ import annotations

import argparse

from prsgd.cli.parser import Parser, fail, refusing
from prsgd.comm import job
from prsgd.errors import PeerError


def add(parser: Parser) -> None:
    parser.description = (
        f"{parser.description} Give torchrun the options of your own job. Exit code 1: an error was found. What "
        "needs your model and your loader is found by prsgd.doctor(local, loader), in your script."
    )


def run(_: argparse.Namespace) -> int:
    from prsgd.preflight.finding import is_wrong, table
    from prsgd.preflight.job import Meeting, alone

    with refusing("doctor"):
        ours = job.find()
    if ours is None:
        findings = alone()
        print(table(findings))
        print("\nThe job as a whole: torchrun --nproc-per-node 2 -m prsgd doctor")
        return int(is_wrong(findings))
    try:
        meeting = Meeting(ours)
        findings = meeting.findings()
    except PeerError as error:
        fail("doctor", str(error), code=1)
    except ValueError as error:
        fail("doctor", str(error), code=2)
    if ours.rank == 0:
        print(table(findings), flush=True)
    meeting.part()
    return int(is_wrong(findings))
