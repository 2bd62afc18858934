"""`python -m shoal`: the command, for where its script is not on the path."""

import sys

from shoal.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
