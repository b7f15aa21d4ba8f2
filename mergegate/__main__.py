"""Run the command line with ``python -m mergegate``."""

from mergegate.flows.cli import main

if __name__ == "__main__":
    main()
