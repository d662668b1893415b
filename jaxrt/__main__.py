"""`python -m jaxrt`."""

from jaxrt.cli import main

main()
