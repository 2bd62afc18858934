"""The command: what its script runs, and `python -m shoal` where that is not on the path."""

import sys

try:
    from shoal.cli.main import main
except KeyboardInterrupt:  # as `main` has it, which is not there yet
    print(file=sys.stderr)
    sys.exit(130)

if __name__ == "__main__":
    sys.exit(main())
