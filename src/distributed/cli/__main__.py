"""python -m distributed.cli: the same command line as `distributed`."""

from distributed.cli.main import main

main()
