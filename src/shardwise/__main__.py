"""`python -m shardwise …` is the `shardwise …` command; `torchrun … -m shardwise train` uses it."""

from shardwise.launch.leave import run_and_leave


def work() -> int:
    """Returns the exit code of the command."""
    from shardwise.cli.main import main

    return main()


if __name__ == "__main__":
    run_and_leave(work)
