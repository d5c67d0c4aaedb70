"""The build step: catalog -> reachable plans -> packs. Needs the compiler and no GPU."""

from specplan.tools.build.pipeline import BuildError, Report, build

__all__ = ["BuildError", "Report", "build"]
