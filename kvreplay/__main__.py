"""`python -m kvreplay`."""

from kvreplay.cli import main

if __name__ == "__main__":
    main()
