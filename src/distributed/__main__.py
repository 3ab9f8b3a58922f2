"""python -m distributed: the same command line as `distributed`."""

from distributed.cli.main import main

main()
