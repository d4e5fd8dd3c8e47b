"""The command `hookrec` as `python -m hookrec`, which is how a launcher such as torchrun starts it."""

from hookrec.cli import main

if __name__ == "__main__":
    main(prog_name="hookrec")
