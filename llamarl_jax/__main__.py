"""Runs the command line: `python -m llamarl_jax`."""

from llamarl_jax.cli import main

if __name__ == "__main__":
    main()
