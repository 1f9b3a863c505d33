"""`python -m raptr` is `raptr`."""

from raptr.cli import main

main()
