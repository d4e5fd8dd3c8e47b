"""The command `hookrec` as `python -m hookrec`, which is how a launcher such as torchrun starts it.

`-m` looks for modules in the current folder first, where the script may have a `replay.py` or a `click.py` of its own;
so that folder is taken out of the path. Our packages are beside this one.
"""

import sys
from pathlib import Path

if __name__ == "__main__":
    if not sys.flags.safe_path:
        del sys.path[0]
    sys.path.append(str(Path(__file__).resolve().parent.parent))

    from hookrec.cli import main

    main(prog_name="hookrec")
