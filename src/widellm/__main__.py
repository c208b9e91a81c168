"""`python -m widellm` is the command `widellm`: for `torchrun -m`, and where scripts are not on the path."""

from widellm.cli.main import main

if __name__ == "__main__":
    main()
