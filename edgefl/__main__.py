"""`python -m edgefl`: the command, where no script of it lies on PATH."""

from edgefl.cli.main import main

if __name__ == "__main__":
    main()
