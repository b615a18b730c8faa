"""`python -m crosspool` is `crosspool`."""

from crosspool.cli import main

main()
