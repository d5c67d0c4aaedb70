"""The build step as a script: catalog -> reachable plans -> packs, like ``specplan build``."""

from specplan.tools.build.pipeline import main

if __name__ == "__main__":
    main()
