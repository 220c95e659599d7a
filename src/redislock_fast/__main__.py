"""`python -m redislock_fast`: the command line, `redislock`."""

import sys

from redislock_fast._cli.main import main

if __name__ == "__main__":
    sys.exit(main())
