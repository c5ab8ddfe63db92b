"""The command `portranger`: hands over to the command line."""

import sys


def main() -> None:
    """Run the command line of this process."""
    from agent.cli import run

    sys.exit(run(sys.argv[1:]))


if __name__ == "__main__":
    main()
