"""The scheduler in layers, each a class that uses only those below it: state, lockstep, ends, running, admission."""
