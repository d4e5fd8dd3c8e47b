"""Train the sick ones and their healthy twins, and print what `replay check` says of them."""

import sys
from pathlib import Path

import replay
from examples.sick.ailments import AILMENTS
from examples.sick.training import one_thread


def main(out: Path, names: list[str]) -> None:
    for name in names or AILMENTS:
        for state in ("sick", "healthy"):
            path = out / name / state
            with one_thread():
                AILMENTS[name].train(path, sick=state == "sick")
            print(f"\n{name}, {state}: {path}")
            for finding in replay.check(replay.open(path)) or ["  nothing found"]:
                is_text = isinstance(finding, str)
                print(finding if is_text else f"  {finding.rule}, step {finding.first_step}: {finding.message}")


if __name__ == "__main__":
    if len(sys.argv) < 2 or not set(sys.argv[2:]) <= set(AILMENTS):
        sys.exit(f"usage: python -m examples.sick OUT [{' | '.join(AILMENTS)}]...")
    main(Path(sys.argv[1]), sys.argv[2:])
