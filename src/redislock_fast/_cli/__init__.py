"""The command line, `redislock`: one module for each command. See `docs/reference/cli.md`."""
