"""Leave out one row of the table after the other: the test that it names must fail then.

``python -m tests.isolation.each_row_matters [STATE ...]``; some minutes for all rows.
"""

import subprocess
import sys

from discolab.isolation import rows


def fails_without(state: str, test: str) -> bool:
    """Whether pytest finds a failure, and nothing but failures; or the process crashes."""
    command = [sys.executable, "-m", "pytest", "-q", "-x", "--without-row", state, test]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    if run.returncode > 1:
        sys.exit(f"{' '.join(command)} ended with {run.returncode}:\n{run.stdout}{run.stderr}")
    return run.returncode != 0


def main() -> None:
    """Print a line for each row, and end with status 1 if a row can be left out unnoticed."""
    asked = sys.argv[1:]
    missed = 0
    for row in rows():
        if row.test and (not asked or row.state in asked):
            noticed = fails_without(row.state, row.test)
            missed += not noticed
            print(f"{'ok    ' if noticed else 'MISSED'} {row.state}: {row.test}", flush=True)
    sys.exit(missed > 0)


if __name__ == "__main__":
    main()
