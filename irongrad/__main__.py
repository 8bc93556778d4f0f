"""`python -m irongrad`."""

from irongrad.cli.main import main

main()
