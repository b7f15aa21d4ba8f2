"""``python -m mergegate``: the command, where its script is not on the path."""

from flows.cli import main

if __name__ == "__main__":
    main()
