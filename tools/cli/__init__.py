"""The command line: build, certify, simulate, coverage, verify, mark, list, size, explain, doctor,
gc.

Exit codes, everywhere: 0 it holds, 1 it does not, 2 the command was used wrongly. One module a
command; what needs torch or the compiler is imported by the command that uses it. What the system
refuses (a file, a directory, the output) is one line and exit code 1, in one place: ``Commands``.
"""

from __future__ import annotations

import gc as collector

import click
from specplan.plans.version import VERSION
from specplan.tools.cli.build import build_command
from specplan.tools.cli.certify import certify_command
from specplan.tools.cli.common import CONTEXT, Commands
from specplan.tools.cli.coverage import coverage_command
from specplan.tools.cli.doctor import doctor_command
from specplan.tools.cli.explain import explain_command
from specplan.tools.cli.gc import gc_command
from specplan.tools.cli.inventory import list_command, size_command
from specplan.tools.cli.mark import mark_command
from specplan.tools.cli.simulate import simulate_command
from specplan.tools.cli.verify import verify_command


@click.group(cls=Commands, context_settings=CONTEXT)
@click.version_option(VERSION, prog_name="specplan")
def main() -> None:
    """Certified, ahead-of-time compiled launch plans for the speculative-decoding step."""
    # A command makes some hundred thousand cells, none of them in a cycle, and ends: the cyclic
    # collector would walk them over and over.
    collector.disable()


for command in (
    build_command,
    coverage_command,
    verify_command,
    mark_command,
    list_command,
    size_command,
    explain_command,
    gc_command,
    certify_command,
    simulate_command,
    doctor_command,
):
    main.add_command(command)
